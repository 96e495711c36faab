"""Awaited: wait for decisions that run elsewhere, or wait for their turn, to come to rest.

Callers that wait for such a decision share one look at the database per tenant and tick, however many they are. What comes to rest in
this process is told at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store import reading
from coordinator.store.database import Database

log = logging.getLogger(__name__)
TICK_S = 0.05


class Awaited:
    """``tasks`` owns the looking, which goes on while somebody waits."""

    def __init__(self, database: Database, tasks: TaskGroup) -> None:
        self._database = database
        self._tasks = tasks
        self._waiting: dict[UUID, dict[UUID, set[asyncio.Future[None]]]] = defaultdict(dict)
        self._looking = False

    def told(self, tenant: UUID, id: UUID) -> None:
        """The decision rests, or something else about it is worth a look."""
        for future in self._waiting[tenant].pop(id, ()):
            if not future.done():
                future.set_result(None)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    async def rested(self, tenant: UUID, id: UUID, timeout_s: float) -> bool:
        """Wait for it, at most so long; whether it is worth looking at."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[tenant].setdefault(id, set()).add(future)
        if not self._looking:
            self._looking = True
            self._tasks.start_soon(self._look)
        try:
            done, _ = await asyncio.wait([future], timeout=max(0.0, timeout_s))
            return bool(done)
        finally:
            self._forget(tenant, id, future)

    def _forget(self, tenant: UUID, id: UUID, future: asyncio.Future[None]) -> None:
        of_tenant = self._waiting.get(tenant, {})
        of_tenant.get(id, set()).discard(future)
        if not of_tenant.get(id):
            of_tenant.pop(id, None)
        if not of_tenant:
            self._waiting.pop(tenant, None)

    def stop(self) -> None:
        """Let everyone go who waits."""
        for tenant, of_tenant in list(self._waiting.items()):
            for id in list(of_tenant):
                self.told(tenant, id)

    async def _look(self) -> None:
        try:
            while self._waiting:
                await anyio.sleep(TICK_S)
                for tenant, of_tenant in list(self._waiting.items()):
                    await self._look_at(tenant, list(of_tenant))
        finally:
            self._looking = False

    async def _look_at(self, tenant: UUID, ids: list[UUID]) -> None:
        try:
            async with self._database.transaction(tenant) as connection:
                rested = await reading.rested(connection, tenant, ids)
        except (CommitUnknown, Overloaded) as error:
            log.warning("could not look whether decisions rest: %s", error)
            return
        for id in rested:
            self.told(tenant, id)
