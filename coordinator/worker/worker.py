"""`Worker`: Python functions as handlers of tasks.

An async function runs on the worker's event loop and is cancelled at its deadline, or when nobody waits for it any more. A plain
function runs in a thread of its own; a thread cannot be stopped, so it keeps its place until it returns, and what it returns is
reported even if it is too late.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from coordinator.core.evidence import Absent, Failed, Found
from coordinator.core.task import MAX_TASKS
from coordinator.logs import THEIR_FAULTS, description_of, traceback_of
from coordinator.worker.client import Client
from coordinator.worker.client import Refused as WorkerRefused
from coordinator.worker.loop import Loop, Offer
from coordinator.worker.task import Outcome, Task

__all__ = ["Worker", "WorkerRefused", "default_name"]

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[[Task], Any])


class Worker:
    """``key`` needs the scope ``work``. ``name`` is the worker's for ever: started again under it, it takes over from itself. At
    most ``max_tasks`` (1..20) run at once; ``drain_s`` is how long they may go on after SIGTERM."""

    def __init__(
        self, url: str, key: str, *, name: str | None = None, max_tasks: int = 1, drain_s: float = 30.0
    ) -> None:
        if not 1 <= max_tasks <= MAX_TASKS:
            raise ValueError(f"max_tasks must be within 1..{MAX_TASKS}, not {max_tasks}")
        self.name = name or default_name()
        self._url = url
        self._key = key
        self._max_tasks = max_tasks
        self._drain_s = drain_s
        self._handlers: dict[str, Callable[[Task], Any]] = {}
        self._loop: Loop | None = None

    def handles(self, capability: str) -> Callable[[F], F]:
        """Declare a function, sync or async, as what the worker does for the sources that ask for this capability."""

        def declare(function: F) -> F:
            if capability in self._handlers:
                raise ValueError(f"{capability!r} is handled already")
            self._handlers[capability] = function
            return function

        return declare

    def run(self) -> None:
        """Until SIGTERM or Ctrl-C, then drain. Call it in the main thread. Raises `WorkerRefused`."""
        anyio.run(self.serve)

    async def serve(self, *, stop_on_signals: bool = True) -> None:
        """The same inside an event loop. Raises `WorkerRefused`."""
        if not self._handlers:
            raise ValueError("the worker handles nothing: declare a function with @worker.handles(...)")
        offer = Offer(self.name, sorted(self._handlers), self._max_tasks, self._drain_s)
        async with Client(self._url, self._key) as client:
            self._loop = Loop(client, offer, self._handle, stop_on_signals=stop_on_signals)
            await self._loop.run()

    def stop(self) -> None:
        """Drain; `serve` returns then. From the loop that it runs in."""
        if self._loop is not None:
            self._loop.stop()

    async def _handle(self, task: Task, started: Callable[[int], Awaitable[None]]) -> Outcome | None:
        function = self._handlers[task.capability]
        try:
            if inspect.iscoroutinefunction(function):
                return _outcome(await function(task))
            return await _in_thread(function, task)
        except THEIR_FAULTS as error:  # the boundary to the handler; logged, and told to the coordinator
            log.error("task %s: %s", task.id, traceback_of(error))
            return Failed("worker-raised", description_of(error))


def default_name() -> str:
    """Another one for each process."""
    host = "".join(char if char.isalnum() or char in ".-" else "-" for char in socket.gethostname())
    return f"{host[:40] or 'worker'}-{os.getpid()}-{secrets.token_hex(3)}"


def _outcome(returned: object) -> Outcome:
    match returned:
        case Found() | Absent() | Failed():
            return returned
        case None:
            return Absent()
        case value:
            return Found(value)


async def _in_thread(function: Callable[[Task], Any], task: Task) -> Outcome:
    """Waits for the thread whatever happens to the task; only the worker's own end leaves it behind, a daemon."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(task), None)
        except BaseException as error:  # noqa: BLE001 - the end of a thread; it is raised where it is waited for
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(deliver, *outcome)
        except RuntimeError:
            log.warning("task %s: its function returned after the worker had ended", task.id)

    threading.Thread(target=run, name=f"task {task.id}", daemon=True).start()
    with anyio.CancelScope(shield=True) as waiting:
        task.abandon = waiting.cancel
        return _outcome(await done)
    raise AbandonedThread


class AbandonedThread(Exception):
    """The worker ends and does not wait for the thread."""
