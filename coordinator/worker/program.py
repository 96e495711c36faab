"""A program per task: what `coordinator worker --exec CMD` runs.

    stdin     the task's request as JSON; COORDINATOR_TASK, _SOURCE, _ATTEMPT, _REMAINING_MS and TRACEPARENT are in the environment
    stdout    the result as JSON, once, before it ends
    stderr    lines of progress, as they come: to the decision's events, and into the task's log file

    exit 0    found: stdout is the result; ``null`` is absent
    exit 3    absent: it looked, and there is no such thing
    exit 75   failed, and asking again may help (EX_TEMPFAIL of sysexits.h)
    other     failed, with the last line of stderr

Each program is a process group of its own. At the deadline, or when nobody waits for it any more, the group gets SIGTERM, and what
is left of it `kill_after_s` later SIGKILL. What a program leaves running when it ends is killed, too. It begins when the group is
known to the process that kills it if the worker dies, and not at all if the worker dies before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio import StreamReader
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import anyio
import msgspec

from coordinator.core.canonical import InvalidJson, parse
from coordinator.core.evidence import Absent, Failed, Found, clean_text
from coordinator.core.task import MAX_LINE, Completed
from coordinator.worker.task import Outcome, Task

log = logging.getLogger(__name__)
ABSENT, TEMPORARY = 3, 75
CANNOT_RUN = frozenset({126, 127})
"""What a shell says of a command that it cannot run."""
MAX_RESULT = 4 * 1024 * 1024
"""Bytes of stdout; a program that writes more is stopped. (A coordinator takes less than that.)"""
CHECK_S = 0.02
PIPES_S = 1.0
HELD_BACK = 'read -r _ && exec /bin/sh -c "$1"'
"""Waits for the first line of stdin, which is not the program's."""
SECRETS = frozenset({"COORDINATOR_KEY", "DATABASE_URL"})
"""What the program has no business with."""


@dataclass(frozen=True, slots=True)
class Program:
    """``command`` is run by ``sh``. ``envelope``: stdout is ``{"result": ..., "cost": ..., ...}`` instead of the result alone."""

    command: str
    log_dir: Path
    kill_after_s: float = 5.0
    envelope: bool = False

    async def run(self, task: Task, started: Callable[[int], Awaitable[None]]) -> Outcome | None:
        """What became of it. Cancelled, it takes as long as it takes to kill the program."""
        try:
            return await self._run(task, started)
        except OSError as error:  # of this machine, at this moment: no room for its log, no process to be had
            return Failed("program-unusable", clean_text(str(error)), retryable=True)

    async def _run(self, task: Task, started: Callable[[int], Awaitable[None]]) -> Outcome | None:
        with self._log_of(task).open("ab", buffering=0) as log_file:
            os.fchmod(log_file.fileno(), 0o600)
            begun = await _start(self.command, _environment(task))
            try:
                return await self._watched(begun.process, begun.exited, task, log_file, started)
            finally:
                begun.transport.close()

    def _log_of(self, task: Task) -> Path:
        return self.log_dir / f"{task.id}.{task.attempt}.log"

    async def _watched(
        self,
        process: Process,
        exited: asyncio.Event,
        task: Task,
        log_file: IO[bytes],
        started: Callable[[int], Awaitable[None]],
    ) -> Outcome | None:
        assert process.stdout is not None
        assert process.stderr is not None
        said, written = _Said(task, log_file), _Written(process.pid)
        streams = [  # not in a task group: what it says while it is being killed is heard, too
            asyncio.ensure_future(written.read(process.stdout)),
            asyncio.ensure_future(said.read(process.stderr)),
        ]
        try:
            await started(process.pid)
            streams.append(asyncio.ensure_future(_feed(process, task.request)))
            await exited.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end_group(process.pid, exited, self.kill_after_s)
                await _drained(streams)
            said.end(f"ended with {_ending(process.returncode)}")
        return self._outcome(process.returncode or 0, written, said.last)

    def _outcome(self, code: int, written: _Written, last: str) -> Outcome:
        if written.too_large:
            return Failed("result-too-large", f"more than {MAX_RESULT} bytes on stdout")
        match code:
            case 0:
                return self._result(bytes(written.data))
            case _ if code == ABSENT:
                return Absent()
            case _ if code == TEMPORARY:
                return Failed("temporary-failure", last or "exit status 75", retryable=True)
            case _ if code in CANNOT_RUN:
                return Failed("program-unusable", last or f"exit status {code}")
            case _ if code < 0:
                return Failed("program-killed", f"{_ending(code)}: {last}")
        return Failed("program-failed", clean_text(f"exit status {code}: {last}"))

    def _result(self, text: bytes) -> Outcome:
        try:
            value = parse(text.strip())
            if not self.envelope:
                return Absent() if value is None else Found(value)
            told = msgspec.convert(value, Completed)
        except (InvalidJson, msgspec.ValidationError) as error:
            return Failed("malformed-result", clean_text(f"stdout is not the result as JSON: {error}"))
        if told.result is None:
            return Absent(told.revision, told.cost, told.units)
        return Found(
            told.result,
            told.revision,
            told.age_ms,
            told.cost,
            told.confidence,
            told.interval,
            told.units,
        )


class _Written:
    """stdout, up to its bound; a program that goes beyond it is killed."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.data = bytearray()
        self.too_large = False

    async def read(self, stream: StreamReader) -> None:
        while chunk := await stream.read(1 << 16):
            if len(self.data) + len(chunk) > MAX_RESULT:
                self.too_large = True
                _signal(self._group, signal.SIGKILL)
                break
            self.data += chunk


class _Said:
    """stderr: line by line to the log file and to whoever follows."""

    def __init__(self, task: Task, log_file: IO[bytes]) -> None:
        self._task = task
        self._log = log_file
        self._rest = b""
        self.last = ""

    async def read(self, stream: StreamReader) -> None:
        while chunk := await stream.read(1 << 16):
            self._log.write(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._tell(lines)
            while len(self._rest) > MAX_LINE:
                self._tell([self._rest[:MAX_LINE]])
                self._rest = self._rest[MAX_LINE:]

    def end(self, how: str) -> None:
        if self._rest:
            self._log.write(b"\n")
            self._tell([self._rest])
        self._log.write(f"-- {how}\n".encode())

    def _tell(self, lines: list[bytes]) -> None:
        texts = [clean_text(line.decode("utf-8", "replace").rstrip("\r"), MAX_LINE) for line in lines]
        told = [text for text in texts if text.strip()]
        if told:
            self.last = told[-1][:500]
            self._task.progress(*told)


async def _feed(process: Process, request: bytes) -> None:
    """It begins now. A program that does not read its input is none of our business."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(b"\n" + request)
        await process.stdin.drain()
    process.stdin.close()


class _Exit(SubprocessStreamProtocol):
    """Tells when the program itself has ended: ``Process.wait`` waits for its pipes as well, which children may hold open."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _Begun(NamedTuple):
    process: Process
    transport: asyncio.SubprocessTransport
    exited: asyncio.Event


async def _start(command: str, environment: Mapping[str, str]) -> _Begun:
    """Held back, in a session and process group of its own."""
    loop = asyncio.get_running_loop()
    argv = ("/bin/sh", "-c", HELD_BACK, "/bin/sh", command)
    transport, protocol = await loop.subprocess_exec(
        _Exit, *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, env=environment
    )
    return _Begun(Process(transport, protocol, loop), transport, protocol.exited)


async def _end_group(group: int, exited: asyncio.Event, kill_after_s: float) -> None:
    """Everything of the group ends: those that are left get SIGTERM, and SIGKILL when their time is over."""
    until = time.monotonic() + kill_after_s
    if _signal(group, signal.SIGTERM):
        while _signal(group, 0) and time.monotonic() < until:  # noqa: ASYNC110 - the kernel tells nobody
            await anyio.sleep(CHECK_S)
        _signal(group, signal.SIGKILL)
    await exited.wait()


async def _drained(streams: Sequence[asyncio.Future[None]]) -> None:
    """What was written is read, unless somebody who left the group holds the pipes open."""
    _, late = await asyncio.wait(streams, timeout=PIPES_S)
    for stream in late:
        stream.cancel()


def _signal(group: int, number: int) -> bool:
    """Whether anybody of the group was there."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


def _environment(task: Task) -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return inherited | {
        "COORDINATOR_TASK": task.id,
        "COORDINATOR_SOURCE": task.source,
        "COORDINATOR_ATTEMPT": str(task.attempt),
        "COORDINATOR_REMAINING_MS": str(round(task.remaining_s() * 1000)),
        "TRACEPARENT": task.traceparent,
    }
