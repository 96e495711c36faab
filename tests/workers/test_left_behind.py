"""No program outlives its worker: what would be left behind by one that is killed is known before it begins, and for as long as it
may run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from coordinator.core.evidence import Failed, Found
from coordinator.worker import pulse
from coordinator.worker.program import Program
from coordinator.worker.pulse import News, Order, Start
from tests.support.demo import lives
from tests.support.waiting import eventually_now
from tests.workers.asking import Service
from tests.workers.processes import ended
from tests.workers.test_task import TOLD, task


async def test_a_program_begins_when_its_group_is_known_to_whoever_would_kill_it(tmp_path: Path) -> None:
    group: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    known = asyncio.Event()

    async def started(pid: int) -> None:
        group.set_result(pid)
        await known.wait()

    program = Program(f"echo begun >> {tmp_path}/begun; cat > {tmp_path}/told; echo 7", tmp_path)
    run = asyncio.ensure_future(program.run(task(TOLD), started))
    assert lives(await group)
    assert not await _begins(tmp_path)
    known.set()
    assert await run == Found(7)
    assert (tmp_path / "begun").read_text() == "begun\n"
    assert (tmp_path / "told").read_bytes() == TOLD


async def test_a_program_that_this_machine_cannot_run_now_is_a_failure_that_may_be_repeated(
    tmp_path: Path,
) -> None:
    """Of that task, and nothing else ends."""
    ended = await Program("echo 7", tmp_path / "not-there").run(task(TOLD), _known)
    assert isinstance(ended, Failed)
    assert (ended.code, ended.retryable) == ("program-unusable", True)


async def _known(pid: int) -> None:
    pass


async def _begins(folder: Path) -> bool:
    """A shell started after it has done as much meanwhile."""
    shell = await asyncio.create_subprocess_shell(f"echo other >> {folder}/other")
    await shell.wait()
    return (folder / "begun").exists()


def test_a_program_whose_worker_ends_before_that_does_not_begin(tmp_path: Path) -> None:
    """The kernel closes a dead worker's end of the pipe."""
    code = f"""
import asyncio, os
from pathlib import Path
from coordinator.worker.program import Program
from tests.workers.test_task import TOLD, task

async def started(pid):
    print(pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(Program("echo begun >> {tmp_path}/begun", Path("{tmp_path}")).run(task(TOLD), started))
"""
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert worker.returncode == -9, worker.stderr
    group = int(worker.stdout)
    eventually_now(lambda: not lives(group))
    assert not (tmp_path / "begun").exists()


def test_the_group_of_a_lost_task_is_killed_if_the_worker_ends_before_it_has_done_so(
    service: Service,
) -> None:
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    start = Start(url=service.address, key=service.key, parent=os.getpid(), lease_ms=300)
    beside = subprocess.Popen(
        [sys.executable, "-P", pulse.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert beside.stdin is not None
        assert beside.stdout is not None
        nobodys = "00000000-0000-7000-8000-000000000000"
        for message in (start, Order(hold=nobodys, token=1, group=left.pid)):
            beside.stdin.write(msgspec.json.encode(message) + b"\n")
        beside.stdin.flush()
        assert msgspec.json.decode(beside.stdout.readline(), type=News).lost == nobodys
        assert lives(left.pid)
        beside.stdin.close()
        assert beside.wait(20) == 0
        assert left.wait(1) == -15
    finally:
        ended(beside)
        ended(left)
