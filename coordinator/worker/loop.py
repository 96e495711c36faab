"""The life of a worker: register, claim while there is room, do, report, drain.

claim    a long poll for as many tasks as there is room for; with no room it does not ask
do       one coroutine for each task, until its end, its deadline, or the news that nobody waits for it any more
report   whatever came of it, also too late: the coordinator keeps what a superseded worker found, and its cost
drain    at SIGTERM: no new task, `drain_s` for what runs, then it is stopped; the coordinator gives it to others
again    a second signal stops everything at once
"""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from coordinator.core.evidence import Absent, Failed, Found, clean_text
from coordinator.core.task import TaskGiven, WorkerShown
from coordinator.worker.beside import Beside
from coordinator.worker.client import Client, Pause, Refused, Unreachable
from coordinator.worker.pulse import News
from coordinator.worker.task import Outcome, Task

log = logging.getLogger(__name__)
POLL_S = 20
REPORT_S = 60.0
"""How much longer than its lease a report is repeated to a coordinator that does not answer."""

Handler = Callable[[Task, Callable[[int], Awaitable[None]]], Awaitable[Outcome | None]]
"""``handler(task, started)``: what became of it, None if there is nothing to say. ``started(group)`` names the process group that
does it; when it returns, the group will not outlive the worker."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker offers. ``drain_s``: how long it goes on with what it has when it is told to stop."""

    name: str
    capabilities: list[str]
    max_tasks: int
    drain_s: float


@dataclass(slots=True)
class Doing:
    """A task under way. ``deadline`` ends it, ``lost`` says why nobody waits for it."""

    task: Task
    deadline: anyio.CancelScope
    lost: str | None = None


class Loop:
    """Use `run` once. ``stop_on_signals`` is for the main thread."""

    def __init__(
        self, client: Client, offer: Offer, handler: Handler, *, stop_on_signals: bool = True
    ) -> None:
        self._client = client
        self._offer = offer
        self._handler = handler
        self._stop_on_signals = stop_on_signals
        self._incarnation = secrets.token_hex(8)
        self._worker = ""
        self._lease_s = 0.0
        self._doing: dict[str, Doing] = {}
        self._room = anyio.Event()
        self._stopping = anyio.Event()
        self._everything = anyio.CancelScope()
        self._beside = Beside(client.url, client.key, self._hear)

    async def run(self) -> None:
        """Returns when it has drained. Raises `Refused` if the coordinator will not have it."""
        with self._everything:
            async with anyio.create_task_group() as beside:
                registered = await self._register()
                beside.start_soon(self._beside.run, registered.lease_ms)
                if self._stop_on_signals:
                    beside.start_soon(self._until_signal, beside)
                try:
                    async with anyio.create_task_group() as doing:
                        await self._claim_and_do(doing)
                        await self._let_finish(doing)
                finally:
                    beside.cancel_scope.cancel()

    def stop(self) -> None:
        """Drain."""
        self._stopping.set()

    async def _register(self) -> WorkerShown:
        offer = self._offer
        registered = await self._client.register(
            offer.name, offer.capabilities, offer.max_tasks, self._incarnation
        )
        self._worker, self._lease_s = registered.id, registered.lease_ms / 1000
        log.info("registered as %s for %s", offer.name, ", ".join(offer.capabilities))
        return registered

    async def _until_signal(self, group: TaskGroup) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if self._stopping.is_set():
                    self._abandon_all()
                    self._everything.cancel()
                    return
                log.info("%s: draining, up to %s s", number.name, self._offer.drain_s)
                self._stopping.set()
                group.start_soon(self._tell_of_drain)

    async def _tell_of_drain(self) -> None:
        """Ends the poll that is open, too."""
        try:
            limit_ms = round(self._offer.drain_s * 1000)
            await self._client.drain(self._worker, limit_ms=limit_ms, for_s=self._offer.drain_s)
        except (Refused, Unreachable) as error:
            log.warning("the coordinator does not know that we drain: %s", error)

    async def _claim_and_do(self, group: TaskGroup) -> None:
        pause = Pause()
        while not self._stopping.is_set():
            free = self._offer.max_tasks - len(self._doing)
            if free <= 0:
                self._room = anyio.Event()
                await self._either(self._room, self._stopping)
                continue
            try:
                claimed = await self._claim(free)
                pause.reset()
            except Unreachable as error:
                log.warning("cannot claim: %s", error)
                await pause.sleep()
                continue
            for given in claimed:
                self._begin(group, given)

    async def _either(self, one: anyio.Event, other: anyio.Event) -> None:
        async with anyio.create_task_group() as group:

            async def wait_for(event: anyio.Event) -> None:
                await event.wait()
                group.cancel_scope.cancel()

            group.start_soon(wait_for, one)
            group.start_soon(wait_for, other)

    async def _claim(self, free: int) -> list[TaskGiven]:
        try:
            claimed = await self._client.claim(
                self._worker, limit=free, wait_s=POLL_S, incarnation=self._incarnation
            )
        except Refused as refused:
            if refused.status != 404:
                self._stopping.set()
                raise
            await self._register()  # another database knows nothing of us
            return []
        if claimed.draining and not self._stopping.is_set():
            log.info("drained by the coordinator")
            self._stopping.set()
        return claimed.tasks

    def _begin(self, group: TaskGroup, given: TaskGiven) -> None:
        id = given.id
        task = Task(given, lambda lines: self._beside.say(id, lines))
        deadline = anyio.CancelScope(deadline=anyio.current_time() + task.remaining_s())
        self._doing[id] = Doing(task, deadline)
        self._beside.hold(id, given.fencing_token)
        group.start_soon(self._do, self._doing[id])

    async def _do(self, doing: Doing) -> None:
        task = doing.task
        outcome: Outcome | None = None
        try:
            with doing.deadline:
                outcome = await self._handler(
                    task, lambda group: self._beside.hold_group(task.id, task.fencing_token, group)
                )
            if doing.deadline.cancelled_caught and doing.lost is None:
                outcome = Failed("deadline-exceeded", "not done by its deadline")
            if outcome is not None:
                await self._beside.flush(task.id)
                await self._report(task, outcome)
        finally:
            task.cancelled.set()
            self._beside.drop(task.id)
            del self._doing[task.id]
            self._room.set()

    def _hear(self, news: News) -> None:
        if news.lost is not None and (doing := self._doing.get(news.lost)) is not None:
            log.warning("task %s is lost: %s", news.lost, news.why)
            doing.lost = news.why
            doing.task.cancelled.set()
            doing.deadline.cancel()
        elif news.kept is not None and (doing := self._doing.get(news.kept)) is not None:
            doing.task.put_off(news.remaining_ms)
            doing.deadline.deadline = anyio.current_time() + doing.task.remaining_s()

    async def _report(self, task: Task, outcome: Outcome) -> None:
        """What is refused for what it says is told again with less: as a failure, then without its cost."""
        verb, body = _reported(outcome)
        while True:
            try:
                await self._send(task, verb, body | {"fencing_token": task.fencing_token})
                return
            except Refused as refused:
                log.warning("task %s: what came of it is refused: %s", task.id, refused)
                less = _less(verb, body, refused)
                if less is None:
                    return
                verb, body = "fail", less
            except Unreachable as error:
                log.error("task %s: what came of it could not be reported: %s", task.id, error)
                return

    async def _send(self, task: Task, verb: str, body: Mapping[str, Any]) -> None:
        await self._client.report(task.id, verb, body, for_s=self._lease_s + REPORT_S)

    async def _let_finish(self, group: TaskGroup) -> None:
        with anyio.move_on_after(self._offer.drain_s):
            while self._doing:
                self._room = anyio.Event()
                await self._room.wait()
        if self._doing:
            log.warning("stopping %s tasks that are not done; others will get them", len(self._doing))
            self._abandon_all()
            group.cancel_scope.cancel()

    def _abandon_all(self) -> None:
        for doing in self._doing.values():
            doing.task.abandon()


def _less(verb: str, body: Mapping[str, Any], refused: Refused) -> dict[str, Any] | None:
    """The failure to report instead of what was refused; None if there is nothing left to say."""
    if refused.status not in (400, 413, 422):
        return None
    spent = {name: body[name] for name in ("cost", "units") if body.get(name) is not None}
    if verb == "complete":
        code = "result-too-large" if refused.status == 413 else "malformed-result"
        return {"code": code, "message": clean_text(refused.detail), **spent}
    return {name: value for name, value in body.items() if name not in spent} if spent else None


def _reported(outcome: Outcome) -> tuple[str, dict[str, Any]]:
    """The verb and the body of a report. A value that cannot be written as JSON is a failure."""
    match outcome:
        case Found(value=value):
            said = {name: getattr(outcome, name) for name in outcome.__struct_fields__ if name != "value"}
            try:
                result = msgspec.to_builtins(value, str_keys=True)
                msgspec.json.encode(result)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                failed = Failed("malformed-result", clean_text(f"the result is no JSON: {error}"))
                return _reported(failed)
            return "complete", {"result": result, **said}
        case Absent():
            return "complete", {"result": None, **msgspec.to_builtins(outcome)}
        case Failed():
            return "fail", dict(msgspec.to_builtins(outcome))
