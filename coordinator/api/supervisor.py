"""Several server processes behind one listening socket, and the process that keeps them alive.

The supervisor binds the socket; each child inherits it, and the kernel hands every connection to one of them. A child's
standard input is a lifeline, one end of a socket pair: the supervisor writes what to serve, the child answers that it is ready, and when an
end closes, its process is gone. So no child outlives its supervisor, whatever ended it, and no secret stands on a command line.

A child that dies is replaced, after a pause if it died young. Until all have been ready once, a dying child ends the supervisor
instead: what cannot start at all should say so, not try for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import anyio
import anyio.to_thread
from prometheus_client.multiprocess import mark_process_dead

log = logging.getLogger(__name__)

YOUNG_S = 5.0
PAUSE_S = 1.0
LAST_WAIT_S = 15.0
"""What a stopping child gets beyond the time it has to drain, before it is killed."""
METRICS = "PROMETHEUS_MULTIPROC_DIR"


class ChildFailed(Exception):
    """A child ended before all of them were ready for the first time."""


class Supervisor:
    """Keeps ``processes`` runs of ``command`` alive. ``spec`` is one line, told to each. ``on_ready`` is called once all are."""

    def __init__(
        self,
        command: Sequence[str],
        spec: bytes,
        listener: socket.socket,
        processes: int,
        drain_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._command = command
        self._spec = spec
        self._listener = listener
        self._processes = processes
        self._stop_within_s = drain_s + LAST_WAIT_S
        self._on_ready = on_ready
        self._ready: set[int] = set()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = anyio.Event()
        self._environment: dict[str, str] = {}

    async def run(self) -> None:
        """Until SIGTERM or SIGINT, and then until every child has drained. Raises `ChildFailed`."""
        with _metrics_folder() as folder, self._signals():
            self._environment = {**os.environ, METRICS: folder}
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end_for_sure)
                    async with anyio.create_task_group() as lives:
                        for slot in range(self._processes):
                            lives.start_soon(self._keep, slot)
                    tasks.cancel_scope.cancel()
            except* ChildFailed as failed:
                raise _first(failed) from None
            finally:
                self._signal_children(signal.SIGKILL)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop, handled = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self._stopping.set()
        self._signal_children(signal.SIGTERM)

    def _signal_children(self, number: int) -> None:
        for child in self._children.values():
            child.send_signal(number)

    async def _end_for_sure(self) -> None:
        await self._stopping.wait()
        await anyio.sleep(self._stop_within_s)
        self._signal_children(signal.SIGKILL)

    async def _keep(self, slot: int) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._live(slot)
            if self._stopping.is_set():
                return
            if len(self._ready) < self._processes:
                raise ChildFailed(f"a server process ended with {code} before all were ready; see above")
            log.error("a server process ended with %s; starting another", code)
            if time.monotonic() - began < YOUNG_S:
                with anyio.move_on_after(PAUSE_S):
                    await self._stopping.wait()

    async def _live(self, slot: int) -> int:
        """One child from its start to its end; its exit code."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            child = subprocess.Popen(  # noqa: ASYNC220  # milliseconds, once in a child's life
                self._command,
                env=self._environment,
                stdin=theirs.fileno(),
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the supervisor, which tells its children
            )
        self._children[slot] = child
        try:
            with ours:
                await self._talk(slot, ours)
            return await anyio.to_thread.run_sync(child.wait, abandon_on_cancel=True)
        finally:
            del self._children[slot]
            if child.poll() is None:
                child.kill()
                child.wait()  # it was killed
            mark_process_dead(child.pid, self._environment[METRICS])  # type: ignore[no-untyped-call]  # untyped package

    async def _talk(self, slot: int, lifeline: socket.socket) -> None:
        """Tell the child what to serve, hear that it is ready, and wait for its end of the line to close."""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            await loop.sock_sendall(lifeline, self._spec + b"\n")
            while await loop.sock_recv(lifeline, 64):
                self._ready.add(slot)
                if len(self._ready) == self._processes:
                    self._on_ready()
                    self._on_ready = _nothing


@contextmanager
def _metrics_folder() -> Iterator[str]:
    """Where the processes keep their metrics, so that each can show the sum of all."""
    with tempfile.TemporaryDirectory(prefix="coordinator-metrics-", ignore_cleanup_errors=True) as folder:
        yield folder


def _first(failed: BaseExceptionGroup[ChildFailed]) -> ChildFailed:
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _nothing() -> None:
    """`on_ready` is called once."""
