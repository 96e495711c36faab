"""The driver as a child process: its half and the parent's.

    parent   -> Plan, a line of JSON
    child    warms up, answers with an empty line, and waits
    parent   reads its meters, -> an empty line
    child    measures -> Measured, a line of JSON
    parent   reads its meters again, then closes the child's input; the child ends

So the meters cover exactly what was measured, the driver's own CPU included. A child whose parent dies reads an end of file and
ends.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TypeVar

import msgspec

from coordinator.demo.launch import package_environment, python_module
from loadtests.load import Ask, Measured, Plan, load

T = TypeVar("T", bound=msgspec.Struct)


class DriverFailed(Exception):
    """The driver ended early; what it said is on stderr."""


async def drive(plan: Plan, ask: Ask) -> None:
    """The child's half, once it can ask."""
    warmed, number = await load(plan, ask, 0, plan.warmup_s)
    gc.collect()
    gc.freeze()
    say(b"")
    sys.stdin.buffer.readline()  # nothing else runs between warm-up and measurement
    measured, _ = await load(plan, ask, number, plan.seconds)
    say(msgspec.json.encode(msgspec.structs.replace(measured, warmed_up=warmed.committed)))


def hear(kind: type[T]) -> T:
    """The next line from the parent."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


class Driver:
    """The parent's half; use `started`."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = child.pid
        self._stdin = stdin
        self._stdout = stdout

    def warm_up(self, plan: Plan) -> None:
        self._tell(msgspec.json.encode(plan))
        self._hear()

    def measure(self) -> Measured:
        self._tell(b"")
        return msgspec.json.decode(self._hear(), type=Measured)

    def _tell(self, line: bytes) -> None:
        self._stdin.write(line + b"\n")
        self._stdin.flush()

    def _hear(self) -> bytes:
        line = self._stdout.readline()
        if not line:
            raise DriverFailed(f"the load driver, process {self.pid}, ended before it answered")
        return line


@contextmanager
def started(module: str, env: Mapping[str, str]) -> Iterator[Driver]:
    """A driver of its own for the length of the block."""
    child = subprocess.Popen(
        python_module(module),
        env={**os.environ, **package_environment(), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield Driver(child, child.stdin, child.stdout)
    finally:
        child.stdin.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


Main = Callable[[Plan], Awaitable[None]]


async def child(main: Main) -> None:
    """What a driver's module runs: hear the plan, do it, and live on until the parent has read the meters."""
    await main(hear(Plan))
    sys.stdin.buffer.read()  # the work is done
