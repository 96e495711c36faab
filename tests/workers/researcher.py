"""A worker process of these tests. Each task says in a file that it has begun, and goes on once its gate is open.

    python -m tests.workers.researcher URL KEY NAME MAX_TASKS FOLDER [kind]

``FOLDER/began-NAME`` gets a line for each task: its id, its token, and how many run here at once. The gate of all tasks of a worker
is the file ``FOLDER/open-NAME``, which is looked at for each task when it has begun and then again and again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

from coordinator.worker import Task, Worker
from tests.support.waiting import eventually_now

BLOCKED_S = 2.5
"""Longer than a lease of these tests."""
running = 0
lock = threading.Lock()


def main(url: str, key: str, name: str, max_tasks: str, folder: str, kind: str = "gated") -> None:
    logging.basicConfig(level=logging.INFO, format=f"{name} %(message)s")
    worker = Worker(url, key, name=name, max_tasks=int(max_tasks), drain_s=20)
    began, gate = Path(folder) / f"began-{name}", Path(folder) / f"open-{name}"

    def begin(task: Task) -> None:
        with lock, began.open("a") as lines:
            lines.write(f"{task.id} {task.fencing_token} {running}\n")

    def gated(task: Task) -> dict[str, str]:
        global running
        with lock:
            running += 1
        begin(task)
        eventually_now(gate.exists, 60)
        with lock:
            running -= 1
        return {"summary": f"{name} {task.fencing_token}"}

    async def blocking(task: Task) -> dict[str, str]:
        begin(task)
        before = time.monotonic()
        sum(range(5_000_000))
        size = int(5_000_000 * BLOCKED_S / (time.monotonic() - before))
        while not gate.exists():
            sum(
                range(size)
            )  # in C, without a moment for another thread: neither loop nor threads run meanwhile
        return {"summary": "blocked"}

    worker.handles("research")({"gated": gated, "blocking": blocking}[kind])
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
