"""Tasks: readings that remote workers make, as the deciding side goes about them.

A task is stored, then waited for: its end arrives at once if its worker reports to this process, else with the next look that one
loop takes for all tasks together (`watch`). If the reading is cancelled or runs out of time, the task is given up, so that no
worker begins it and the one that has it hears of that with its next heartbeat. If this process dies, whoever takes the decision
over asks again and goes on with the same task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from anyio.abc import TaskGroup
from uuid_utils.compat import uuid7

from coordinator import telemetry
from coordinator.core.evidence import Answer, Ask, Evidence, Failed, ReadRequest, RemoteSource, clean_text
from coordinator.core.money import Money
from coordinator.core.task import answer_of, request_bytes
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store import late
from coordinator.store import tasks as store
from coordinator.store.database import Connection, Database
from coordinator.store.group_commit import GroupCommit

Offer = Callable[[UUID, str, str | None], None]
"""Tells whoever polls here: a task of this tenant and capability waits, perhaps for one worker alone."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A task that somebody here waits for."""

    tenant: UUID
    end: asyncio.Future[store.Ended]


@dataclass(slots=True)
class Asker:
    """Which reading of which decision it is for; ``until`` is when the reading has to end, on the monotonic clock. ``had_before``
    is told how many others had the task and what they said that it cost. ``begun``: how often it was given to a worker, 1 as long as
    that is not known."""

    tenant: UUID
    decision: UUID
    token: int
    traceparent: str
    until: float
    had_before: Callable[[int, Sequence[Money]], None]
    begun: int = 1


class Tasks:
    """The tasks of one process's decisions. ``group`` owns the transactions in flight."""

    def __init__(self, database: Database, group: TaskGroup, offer: Offer, wake: Callable[[], None]) -> None:
        self._database = database
        self._settings = database.settings
        self._offer = offer
        self._wake = wake
        self.awaited: dict[UUID, Awaited] = {}
        self._let_go = False
        limits = {"max_batch": self._settings.max_batch, "bound": self._settings.max_waiting_commits}

        async def ask_all(
            connection: Connection, tenant: UUID, items: Sequence[store.NewTask | store.GiveUp]
        ) -> Sequence[store.Asked]:
            return await store.ask(connection, tenant, items, lease_ms=self._settings.worker_lease_ms)

        self._asking = GroupCommit("task", database, group, ask_all, **limits)

    async def read(
        self, asker: Asker, declared: Evidence[Any, Any], source: RemoteSource[Any], request: ReadRequest
    ) -> Answer[Any]:
        """One task from its asking to its end. A worker's value comes back as JSON."""
        try:
            ask = source.ask(request)
        except ValueError as error:
            asker.begun = 0
            return Failed("no-address", clean_text(str(error)))
        task = self._new_task(asker, declared, source, ask)
        request.on_cancel(partial(self._give_up, asker, task.id))
        try:
            asked = await self._asking.submit(asker.tenant, task)
        except (CommitUnknown, Overloaded) as error:
            return Failed("task-not-stored", clean_text(str(error)), retryable=True)
        match asked:
            case Failed():
                asker.begun = 0
                return asked
            case store.Ended():
                ended = asked
            case store.Waiting(id=id, pinned=pinned):
                if id != task.id:
                    request.on_cancel(partial(self._give_up, asker, id))
                self._offer(asker.tenant, source.capability, pinned)
                ended = await self._end_of(asker.tenant, id)
                telemetry.TASKS.labels(source.name, ended.state).inc()
            case _:
                raise AssertionError(f"an unknown answer to a new task: {asked}")
        await self._account(asker, ended)
        return answer_of(ended.state, ended.answer, asked.older_ms)

    async def _account(self, asker: Asker, ended: store.Ended) -> None:
        """Earlier holders of the task may have cost something, too."""
        asker.begun = ended.token
        earlier = ended.token - (ended.answer is not None and ended.token > 0)
        if earlier <= 0:
            return
        account = partial(late.account, tenant=asker.tenant, task=ended.id)
        try:
            costs = await self._database.run(asker.tenant, account)
        except (CommitUnknown, Overloaded):
            costs = []
        asker.had_before(earlier, costs)

    def _new_task(
        self, asker: Asker, declared: Evidence[Any, Any], source: RemoteSource[Any], ask: Ask
    ) -> store.NewTask:
        return store.NewTask(
            id=uuid7(),
            decision_id=asker.decision,
            decision_token=asker.token,
            evidence=declared.name,
            source=source.name,
            capability=source.capability,
            pinned=ask.pinned,
            may_fall_back=ask.may_fall_back,
            request=request_bytes(ask.request),
            traceparent=asker.traceparent,
            deadline_ms=max(1, round((asker.until - time.monotonic()) * 1000)),
            max_attempts=self._settings.task_attempts,
        )

    async def _end_of(self, tenant: UUID, id: UUID) -> store.Ended:
        awaited = Awaited(tenant, asyncio.get_running_loop().create_future())
        self.awaited[id] = awaited
        self._wake()
        try:
            return await awaited.end
        finally:
            # A later run in this process may have adopted the task; then it is that one that waits.
            if self.awaited.get(id) is awaited:
                del self.awaited[id]

    def let_go(self) -> None:
        """The process stops: whoever takes its decisions over goes on with their tasks."""
        self._let_go = True

    async def _give_up(self, asker: Asker, id: UUID) -> None:
        """Nobody waits for the task any more; does nothing to one that has ended, or that others may go on with."""
        if self._let_go:
            return
        given_up = await self._asking.submit(asker.tenant, store.GiveUp(id, asker.token))
        if isinstance(given_up, store.GivenUp) and given_up.begun is not None:
            asker.begun = given_up.begun

    def deliver(self, ended: Iterable[store.Ended]) -> None:
        """How tasks ended, some of which may be waited for here."""
        for task in ended:
            awaited = self.awaited.get(task.id)
            if awaited is not None and not awaited.end.done():
                awaited.end.set_result(task)
