"""The example of the README works as it stands, and Python handlers of every kind do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from coordinator.core.money import money
from coordinator.demo.launch import package_environment
from coordinator.worker import Absent, Failed, Found, Task, Worker
from tests.workers.asking import Service
from tests.workers.processes import ended
from tests.workers.told import Told

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_readme_works(service: Service, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if block.startswith("# researcher.py")]
    (tmp_path / "researcher.py").write_text(example)
    env = {**os.environ, **package_environment(), "COORDINATOR_URL": service.address}
    env["COORDINATOR_KEY"] = service.key
    process = subprocess.Popen([sys.executable, "researcher.py"], cwd=tmp_path, env=env)
    try:
        assert service.ask("bees").findings()["value"] == {"summary": "what is known about bees"}
        process.terminate()
        assert process.wait(20) == 0
    finally:
        ended(process)


def plain(task: Task) -> dict[str, str]:
    return {"summary": f"{task.input['topic']} {task.attempt}"}


async def coroutine(task: Task) -> Found[dict[str, str]]:
    await anyio.lowlevel.checkpoint()
    return Found({"summary": "so"}, revision="r1", cost=money("0.07 SGD"))


def nothing(task: Task) -> None:
    return None


def absent(task: Task) -> Absent:
    return Absent()


def failing(task: Task) -> Failed:
    return Failed("closed-today", "come back tomorrow")


def raising(task: Task) -> dict[str, str]:
    raise LookupError("no \udfff such page")


async def exiting(task: Task) -> dict[str, str]:
    sys.exit(1)


def junk(task: Task) -> object:
    return object()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("function", "state", "code"),
    [
        (plain, "found", None),
        (coroutine, "found", None),
        (nothing, "absent", None),
        (absent, "absent", None),
        (failing, "failed", "closed-today"),
        (raising, "failed", "worker-raised"),
        (exiting, "failed", "worker-raised"),
        (junk, "failed", "malformed-result"),
    ],
)
async def test_what_a_function_returns_or_raises_is_typed_evidence(
    service: Service, function: object, state: str, code: str | None
) -> None:
    findings = await Told(service, function).asked(service)
    assert (findings["state"], (findings["error"] or {"code": None})["code"]) == (state, code)  # type: ignore[index]


@pytest.mark.anyio
async def test_an_async_function_is_cancelled_when_nobody_waits_for_it(service: Service) -> None:
    cancelled = []

    async def waiting(task: Task) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            cancelled.append(task.id)
            raise

    findings = await Told(service, waiting).asked(service, type="short-question")
    assert findings["state"] in ("timed_out", "failed")
    assert len(cancelled) == 1


@pytest.mark.anyio
async def test_a_function_in_a_thread_keeps_its_place_until_it_returns(service: Service) -> None:
    told, release = threading.Event(), threading.Event()

    def stubborn(task: Task) -> None:
        task.cancelled.wait(30)
        told.set()
        release.wait(30)

    worker = Worker(service.address, service.key, name="stubborn", max_tasks=1, drain_s=5)
    worker.handles("research")(stubborn)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: worker.serve(stop_on_signals=False))
        service.ask(type="short-question")
        await to_thread.run_sync(told.wait, 30)
        question, other = service.ask(), service.register("other")
        (task,) = await to_thread.run_sync(other.claim, 10)
        assert task["attempt"] == 1, "it is not given to a worker that has no place for it"
        other.complete(task)
        release.set()
        assert (await to_thread.run_sync(question.findings))["state"] == "found"
        worker.stop()


def test_a_worker_that_handles_nothing_or_too_much_says_so_at_once() -> None:
    with pytest.raises(ValueError, match="max_tasks"):
        Worker("http://127.0.0.1:1", "key", max_tasks=21)
    worker = Worker("http://127.0.0.1:1", "key")
    with pytest.raises(ValueError, match="handles nothing"):
        worker.run()
    worker.handles("research")(plain)
    with pytest.raises(ValueError, match="handled already"):
        worker.handles("research")(absent)
