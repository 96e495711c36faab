"""A remote worker in Python: functions that make readings for a coordinator, on any machine that reaches it over HTTP.

    from coordinator.worker import Task, Worker

    worker = Worker("http://127.0.0.1:8080", key, name="w1", max_tasks=3)

    @worker.handles("research")
    def research(task: Task) -> dict[str, str]:
        task.progress("looking")
        return {"summary": f"about {task.input['topic']}"}

    worker.run()

`run` registers, claims tasks as long as it has room, and returns after SIGTERM or Ctrl-C, once it has drained. What a function
returns is the result; None means that there is no such thing; `Found`, `Absent` and `Failed` say more (a cost, a revision, whether
to ask again). What it raises makes the reading failed.
"""

from coordinator.core.evidence import Absent, Failed, Found
from coordinator.worker.task import Task
from coordinator.worker.worker import Worker, WorkerRefused

__all__ = ["Absent", "Failed", "Found", "Task", "Worker", "WorkerRefused"]
