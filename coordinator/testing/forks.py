"""Server processes by the dozen: one process imports everything once and forks a server whenever it is told to.

    parent -> forker    {"id", "env", "log"}                   fork a server with this environment; its stderr goes to the log
    server -> parent    {"id", "pid", "url"}                   it is ready
    forker -> parent    {"pid", "returncode"}                  it has ended

One line of JSON each, over the forker's stdin and the stdout that it shares with its servers. Starting a server takes a tenth of a
second so, where a fresh interpreter takes two. A server dies with the forker, and the forker with the parent.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from coordinator import failpoints
from coordinator.app import serve
from coordinator.config import settings_from_env
from coordinator.demo.launch import LaunchFailed, die_with_parent, package_environment, python_module

LONGEST_LINE = 4096
START_S = 30.0


class Order(msgspec.Struct, frozen=True):
    id: int
    env: dict[str, str]
    log: str


class Said(msgspec.Struct, frozen=True):
    pid: int
    id: int | None = None
    url: str | None = None
    returncode: int | None = None


class ForkedServer:
    """One server. ``ended`` is set once it is gone."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.pid = 0
        self.url = ""
        self.ready = anyio.Event()
        self.ended = anyio.Event()

    def has_said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with suppress(ProcessLookupError):  # gone, and the forker has not said so yet
            if not self.ended.is_set():
                os.kill(self.pid, signal.SIGKILL)
        await self.ended.wait()


class Forks:
    """Use `forks`."""

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._ids = count(1)
        self._starting: dict[int, ForkedServer] = {}
        self._running: dict[int, ForkedServer] = {}

    async def start(self, env: Mapping[str, str]) -> ForkedServer:
        """A server that is ready. Raises `LaunchFailed`."""
        id = next(self._ids)
        server = self._starting[id] = ForkedServer(self._folder / f"{id}.log")
        server.log.touch()
        assert self._process.stdin is not None
        await self._process.stdin.send(msgspec.json.encode(Order(id, dict(env), str(server.log))) + b"\n")
        with anyio.move_on_after(START_S):
            await server.ready.wait()
        if not server.url:
            raise LaunchFailed(f"a forked server did not start: {server.log.read_text()[-2000:]}")
        return server

    async def listen(self) -> None:
        """What the forker and its servers say, to whom it concerns."""
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        while True:
            try:
                said = msgspec.json.decode(await lines.receive_until(b"\n", LONGEST_LINE), type=Said)
            except anyio.IncompleteRead:
                return
            if said.id is not None and said.url is not None:
                server = self._running[said.pid] = self._starting.pop(said.id)
                server.pid, server.url = said.pid, said.url
                server.ready.set()
            elif said.pid in self._running:
                self._running.pop(said.pid).ended.set()

    async def kill_all(self) -> None:
        for server in [*self._running.values()]:
            await server.kill()


@asynccontextmanager
async def forks(folder: Path) -> AsyncIterator[Forks]:
    """The forker, for as long as the block lasts; whatever still runs then is killed. Logs go to ``folder``."""
    command = python_module("coordinator.testing.forks")
    env = {**os.environ, **package_environment()}
    async with (
        await anyio.open_process(command, env=env, stderr=None) as process,
        anyio.create_task_group() as tasks,
    ):
        made = Forks(process, folder)
        tasks.start_soon(made.listen)
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.kill_all()
            process.terminate()
            tasks.cancel_scope.cancel()


def _say(**facts: Any) -> None:
    os.write(1, msgspec.json.encode(facts) + b"\n")


def _reap(*_: object) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(pid=pid, returncode=os.waitstatus_to_exitcode(status))


def _serve(order: Order) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    os.dup2(os.open(order.log, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(order.env)
    failpoints.arm(order.env.get("COORDINATOR_FAILPOINTS", ""))
    serve(
        "coordinator.testing.drill_types:coordinator",
        url=os.environ["DATABASE_URL"],
        settings=settings_from_env(),
        port=0,
        on_ready=lambda url: _say(id=order.id, pid=os.getpid(), url=url),
    )


def main() -> None:
    """The forker."""
    die_with_parent()
    import adapters.http
    import adapters.records
    import adapters.webhook  # noqa: F401 - so that the servers need not

    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        if os.fork() == 0:
            try:
                _serve(order)
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
