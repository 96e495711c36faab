"""Watch: the one look of a process at what other processes did with tasks, instead of one for each poll and each reading.

While a poll or a reading waits here, every `worker_poll_ms` (half as often while there is no task at all, and with jitter, so that
processes do not look in step), in one transaction that sees of all tenants only this much:

    tasks awaited here that have ended      -> their answers are fetched and delivered
    tenants with tasks whose lease ran out  -> handed back: waiting again, failed after the last attempt, or expired
    tasks that wait for a worker            -> offered to as many polls as there are tasks

While nothing waits here, it looks once a minute. Polls that are open are signs of life of their workers, and whoever waits for a
task says so.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from coordinator.core.decision import DecisionType
from coordinator.engine.reports import Reports
from coordinator.engine.tasks import Tasks
from coordinator.engine.workers import Progress, Workers
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store import handback, late, tasks, workers
from coordinator.store.database import Database

IDLE_LOOK_S = 60.0
BILL_EVERY_S = 1.0
log = logging.getLogger(__name__)


class Remote:
    """Everything of a process that has to do with remote workers; `watch` runs as long as the service does."""

    def __init__(
        self,
        database: Database,
        group: TaskGroup,
        types: Mapping[str, DecisionType[Any, Any]],
        progress: Progress,
    ) -> None:
        self._database = database
        self._settings = database.settings
        self._needed = asyncio.Event()
        self._open = False
        self._touched = self._bill_at = time.monotonic()
        self.tasks = Tasks(database, group, self._offer, self._needed.set)
        reports = Reports(types, database.settings.max_evidence_bytes)
        self.workers = Workers(
            database, group, self._needed.set, self.tasks.deliver, progress, reports.refusal
        )

    def _offer(self, tenant: UUID, capability: str, pinned: str | None) -> None:
        self.workers.polls.offer(tenant, capability, pinned)

    async def watch(self) -> None:
        while True:
            with anyio.move_on_after(IDLE_LOOK_S):
                await self._needed.wait()
            try:
                await self._look()
            except (CommitUnknown, Overloaded, OSError) as error:
                log.warning("could not look after tasks: %s", error)
            except Exception:  # the boundary of a loop that must not end
                log.exception("could not look after tasks")
            pause_s = self._settings.worker_poll_ms / 1000 * (1 if self._open else 2)
            await anyio.sleep(pause_s * random.uniform(0.75, 1.25))
            if not self.workers.polls and not self.tasks.awaited:
                self._needed.clear()

    async def _look(self) -> None:
        await self._touch()
        awaited = [(task.tenant, id) for id, task in self.tasks.awaited.items()]
        async with self._database.dispatch_view() as connection:
            ended = await tasks.ended_of_all(connection, awaited) if awaited else []
            groups = await handback.open_tasks(connection)
            unbilled = await late.tenants_with_unbilled(connection) if self._is_time_to_bill() else ()
        self._open = bool(groups)
        for tenant in {group.tenant for group in groups if group.lost}:
            ended += await self._hand_back(tenant)
        await self._fetch(ended)
        for group in groups:
            self.workers.polls.offer(group.tenant, group.capability, group.pinned, group.waiting)
        for tenant in unbilled:
            await self._bill(tenant)

    async def _bill(self, tenant: UUID) -> None:
        try:
            await self._database.run(tenant, partial(late.bill_unbilled, tenant=tenant))
        except Exception:  # the boundary of one tenant; its fault holds up no other's
            log.exception("could not bill late answers of tenant %s", tenant)

    def _is_time_to_bill(self) -> bool:
        """Nobody waits for the costs of late answers, and some of them have to wait until their decision rests."""
        if time.monotonic() < self._bill_at:
            return False
        self._bill_at = time.monotonic() + BILL_EVERY_S
        return True

    async def _touch(self) -> None:
        """Signs of life: of the workers whose polls are open here, and of whoever waits for tasks here."""
        if time.monotonic() - self._touched < self._settings.worker_lease_ms / 3000:
            return
        self._touched = time.monotonic()
        for tenant, polls in list(self.workers.polls.by_tenant.items()):
            ids = sorted({poll.worker for poll in polls if not poll.gone})
            await self._database.run(tenant, partial(workers.touch, tenant=tenant, ids=ids))
        for tenant, awaited in _by_tenant(
            (task.tenant, id) for id, task in self.tasks.awaited.items()
        ).items():
            await self._database.run(tenant, partial(tasks.still_awaited, tenant=tenant, ids=awaited))

    async def _hand_back(self, tenant: UUID) -> list[tuple[UUID, UUID]]:
        """Those that have ended by it, as (tenant, id)."""
        handed_back = await self._database.run(tenant, partial(handback.hand_back_lost, tenant=tenant))
        self.workers.offer_again(tenant, handed_back)
        return [(tenant, task.id) for task in handed_back if task.state != "waiting"]

    async def _fetch(self, ended: Sequence[tuple[UUID, UUID]]) -> None:
        """The answers of those that are waited for here."""
        here = [(tenant, id) for tenant, id in ended if id in self.tasks.awaited]
        for tenant, ids in _by_tenant(here).items():
            async with self._database.transaction(tenant) as connection:
                self.tasks.deliver(await tasks.fetch(connection, tenant, ids))


def _by_tenant(pairs: Iterable[tuple[UUID, UUID]]) -> dict[UUID, list[UUID]]:
    found: dict[UUID, list[UUID]] = defaultdict(list)
    for tenant, id in pairs:
        found[tenant].append(id)
    return found
