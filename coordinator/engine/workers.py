"""Workers: what a process does for the remote workers that talk to it.

Claiming is a long poll that costs nothing while it waits: it tries once, then sleeps until a task is offered to it. A task that is
asked for in this process is offered at once, to one poll for each task; what other processes asked for is found by the one look
that `watch` takes for all polls together. No poll asks the database by itself, and nothing is notified by it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import anyio
from anyio.abc import TaskGroup
from uuid_utils.compat import uuid7

from coordinator.core.task import able
from coordinator.errors import Draining, NotFound, RequestRefused, Supplanted
from coordinator.store import claims, workers
from coordinator.store.claims import (
    Accepted,
    Beat,
    Claimed,
    Judge,
    Kept,
    NotYours,
    Report,
    Superseded,
    Unknown,
)
from coordinator.store.database import Connection, Database
from coordinator.store.group_commit import GroupCommit
from coordinator.store.handback import HandedBack
from coordinator.store.tasks import Ended
from coordinator.store.workers import Registration, WorkerRow

FULL_PAUSE_S = 1.0
"""How soon a poll of a worker that has all it may have tries again; it is offered nothing meanwhile."""


@dataclass(eq=False, slots=True)
class Poll:
    """A worker that waits for tasks. ``name`` and ``capabilities`` are unknown until it has tried once; until then it may be
    offered anything."""

    tenant: UUID
    worker: UUID
    name: str | None = None
    capabilities: frozenset[str] = frozenset()
    full: bool = False
    gone: bool = False
    offered: asyncio.Event = field(default_factory=asyncio.Event)

    def suits(self, capability: str, pinned: str | None) -> bool:
        if self.full:
            return False
        return self.name is None or (able(self.capabilities, capability) and pinned in (None, self.name))

    def is_gone(self) -> bool:
        return self.gone

    def leave(self) -> None:
        """Its caller has gone away."""
        self.gone = True
        self.offered.set()


class Polls:
    """The polls that wait in this process, by tenant, the longest-waiting first."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.by_tenant: dict[UUID, dict[Poll, None]] = defaultdict(dict)

    def __bool__(self) -> bool:
        return bool(self.by_tenant)

    @contextmanager
    def added(self, poll: Poll) -> Iterator[None]:
        self.by_tenant[poll.tenant][poll] = None
        self._wake()
        try:
            yield
        finally:
            waiting = self.by_tenant[poll.tenant]
            del waiting[poll]
            if not waiting:
                del self.by_tenant[poll.tenant]

    def offer(self, tenant: UUID, capability: str, pinned: str | None, count: int = 1) -> None:
        """Wake as many polls as there are tasks, and no more."""
        for poll in self.by_tenant.get(tenant, ()):
            if count <= 0:
                return
            if not poll.offered.is_set() and poll.suits(capability, pinned):
                poll.offered.set()
                count -= 1

    def wake_all(self, of: UUID | None = None) -> None:
        """Every poll tries again, or every poll of one worker."""
        for waiting in self.by_tenant.values():
            for poll in waiting:
                if of is None or poll.worker == of:
                    poll.offered.set()


Progress = Callable[[UUID, UUID, str, Sequence[str]], None]
"""(tenant, decision, evidence, lines): what a worker says while it works."""


class Workers:
    """``deliver`` takes the ends of tasks that are reported here to whoever waits for them here, ``progress`` what their workers
    say meanwhile to whoever follows. ``judge`` refuses reports that cannot be evidence."""

    def __init__(
        self,
        database: Database,
        group: TaskGroup,
        wake: Callable[[], None],
        deliver: Callable[[Sequence[Ended]], None],
        progress: Progress,
        judge: Judge,
    ) -> None:
        self._database = database
        self._settings = database.settings
        self._deliver = deliver
        self._progress = progress
        self._wake = wake
        self._stopping = False
        self.polls = Polls(wake)
        limits = {"max_batch": self._settings.max_batch, "bound": self._settings.max_waiting_commits}

        async def heartbeat_all(
            connection: Connection, tenant: UUID, beats: Sequence[Beat]
        ) -> Sequence[Kept | Superseded | Unknown]:
            return await claims.heartbeat(connection, tenant, beats, lease_ms=self._settings.worker_lease_ms)

        self._beats = GroupCommit("heartbeat", database, group, heartbeat_all, **limits)

        async def end_all(
            connection: Connection, tenant: UUID, reports: Sequence[Report]
        ) -> Sequence[Accepted | Superseded | Unknown | RequestRefused]:
            return await claims.end(connection, tenant, reports, judge)

        self._reports = GroupCommit("report", database, group, end_all, **limits)

    def stop(self) -> None:
        """The process drains: polls that wait here end, so that their workers go elsewhere."""
        self._stopping = True
        self.polls.wake_all()

    async def register(
        self, tenant: UUID, *, name: str, capabilities: Sequence[str], max_tasks: int, incarnation: str | None
    ) -> tuple[WorkerRow, bool]:
        """The worker as it is now, and whether its name is new."""
        wanted = Registration(
            id=uuid7(),
            name=name,
            capabilities=capabilities,
            max_tasks=max_tasks,
            incarnation=incarnation,
        )
        registered = await self._database.run(
            tenant, lambda connection: workers.register(connection, tenant, wanted)
        )
        self.polls.wake_all(of=registered.id)
        self.offer_again(tenant, registered.handed_back)
        return await self.show(tenant, registered.id), registered.created

    def offer_again(self, tenant: UUID, handed_back: Sequence[HandedBack]) -> None:
        """Tasks that are in nobody's hands any more."""
        for task in handed_back:
            if task.state == "waiting":
                self.polls.offer(tenant, task.capability, task.pinned)

    async def claim(
        self, tenant: UUID, poll: Poll, *, limit: int, incarnation: str | None, wait_s: float
    ) -> Claimed:
        """At most ``limit`` tasks and at most what its worker may have; none if none came within ``wait_s``, or if it drains.
        Raises `NotFound`, `Supplanted`, `Draining`."""
        wanted = claims.Claim(
            worker=poll.worker, limit=limit, incarnation=incarnation, lease_ms=self._settings.worker_lease_ms
        )
        until = time.monotonic() + wait_s
        with self.polls.added(poll):
            while True:
                poll.offered.clear()
                claimed = await self._try(tenant, poll, wanted)
                if claimed.tasks or claimed.draining or time.monotonic() >= until:
                    return claimed
                if self._stopping:
                    raise Draining("this process is stopping; poll again", retry_after_ms=1000)
                left = until - time.monotonic()
                with anyio.move_on_after(min(left, FULL_PAUSE_S) if claimed.full else left):
                    await poll.offered.wait()
                if poll.is_gone():
                    return claimed

    async def _try(self, tenant: UUID, poll: Poll, wanted: claims.Claim) -> Claimed:
        claimed = await self._database.run(
            tenant, lambda connection: claims.claim(connection, tenant, wanted)
        )
        if claimed is None:
            raise NotFound("there is no such worker; register it first")
        if isinstance(claimed, NotYours):
            raise Supplanted("another process has registered under this worker's name")
        poll.name, poll.capabilities = claimed.name, frozenset(claimed.capabilities)
        poll.full = claimed.full
        return claimed

    async def heartbeat(
        self, tenant: UUID, task: UUID, token: int, lines: Sequence[str]
    ) -> Kept | Superseded | Unknown:
        """Prolongs the lease; ``lines`` of progress count only from whoever holds the task."""
        result = await self._beats.submit(tenant, Beat(task, token))
        if isinstance(result, Kept) and lines:
            self._progress(tenant, result.decision_id, result.evidence, lines)
        return result

    async def end(self, tenant: UUID, report: Report) -> Accepted | Superseded | Unknown:
        """Raises the refusal of what cannot be evidence: the task goes on."""
        result = await self._reports.submit(tenant, report)
        if isinstance(result, RequestRefused):
            raise result
        if isinstance(result, Accepted) and result.first:
            self._deliver(
                [Ended(id=report.task, state=report.state, answer=report.encoded, token=report.token)]
            )
        elif isinstance(result, Superseded) and result.late:
            self._wake()
        return result

    async def drain(self, tenant: UUID, id: UUID, *, limit_ms: int | None) -> WorkerRow:
        """No new task from now on; what is left at the limit is handed back. Raises `NotFound`."""
        limit = self._settings.worker_drain_ms if limit_ms is None else limit_ms
        drain = partial(workers.drain, tenant=tenant, id=id, limit_ms=limit)
        if not await self._database.run(tenant, drain):
            raise NotFound("there is no such worker")
        self.polls.wake_all(of=id)
        return await self.show(tenant, id)

    async def show(self, tenant: UUID, id: UUID) -> WorkerRow:
        """Raises `NotFound`."""
        async with self._database.transaction(tenant) as connection:
            row = await workers.worker(connection, tenant, id, lease_ms=self._settings.worker_lease_ms)
        if row is None:
            raise NotFound("there is no such worker")
        return row

    async def list(self, tenant: UUID, *, before: UUID | None, limit: int) -> Sequence[WorkerRow]:
        """A page, the newest first."""
        async with self._database.transaction(tenant) as connection:
            lease_ms = self._settings.worker_lease_ms
            return await workers.workers(connection, tenant, lease_ms=lease_ms, before=before, limit=limit)
