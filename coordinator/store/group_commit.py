"""Group commit: calls of one tenant that arrive while its transaction is in flight ride the next one together.

There are no timers: an idle service commits a lone call at once, a busy one fills its transactions by itself. Each tenant has one
transaction of a kind in flight, so its calls are carried out in the order in which they came; transactions of a tenant would wait
for each other at its log anyway. The transaction runs in a task of its own: a caller that is cancelled does not take its
neighbours' COMMIT with it.

One bad row never fails its neighbours: if a batch fails before its COMMIT, whoever objected to it, its calls are run again one by
one, and only the offender gets the error. An error during COMMIT goes to every caller as `CommitUnknown`; each reads back its
own. A database that is away is `Overloaded` for all of them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar
from uuid import UUID

from anyio.abc import TaskGroup

from coordinator import telemetry
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store.database import Connection, Database

I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")
Work = Callable[[Connection, UUID, Sequence[I]], Awaitable[Sequence[R]]]


class GroupCommit(Generic[I, R]):
    """``work(connection, tenant, items)`` does one batch inside the transaction and returns one result per item, in order.
    ``bound`` limits how many calls may wait; beyond it `submit` raises `Overloaded` at once, unless ``must`` is set: what was
    already promised has to be written."""

    def __init__(
        self, name: str, database: Database, tasks: TaskGroup, work: Work[I, R], *, max_batch: int, bound: int
    ) -> None:
        self._database = database
        self._tasks = tasks
        self._work = work
        self._max_batch = max_batch
        self._bound = bound
        self._waiting: dict[UUID, list[tuple[I, asyncio.Future[R]]]] = defaultdict(list)
        self._busy: set[UUID] = set()
        self.depth = 0
        self._transactions = telemetry.TRANSACTIONS.labels(name)

    async def submit(self, tenant: UUID, item: I, *, must: bool = True) -> R:
        if self.depth >= self._bound and not must:
            raise Overloaded("too many calls are waiting for the database", retry_after_ms=500)
        return await self.enqueue(tenant, item)

    def enqueue(self, tenant: UUID, item: I) -> asyncio.Future[R]:
        """Take a place now; calls of a tenant are carried out in the order of their places."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[tenant].append((item, future))
        self.depth += 1
        if tenant not in self._busy:
            self._busy.add(tenant)
            self._tasks.start_soon(self._carry_out, tenant)
        return future

    async def _carry_out(self, tenant: UUID) -> None:
        try:
            while waiting := self._waiting[tenant]:
                batch, self._waiting[tenant] = waiting[: self._max_batch], waiting[self._max_batch :]
                self.depth -= len(batch)
                await self._settle(tenant, batch)
        except BaseException as error:  # our owner ends: nobody will carry out what waits
            _fail(self._waiting.pop(tenant, []), error)
            raise
        finally:
            self._busy.remove(tenant)
            self._waiting.pop(tenant, None)

    async def _settle(self, tenant: UUID, batch: list[tuple[I, asyncio.Future[R]]]) -> None:
        try:
            results = await self._transact(tenant, [item for item, _ in batch])
        except (CommitUnknown, Overloaded) as error:
            _fail(batch, error)
        except Exception as error:  # noqa: BLE001 - the boundary to what an item brings along; its caller gets it
            if len(batch) == 1:
                _fail(batch, error)
                return
            for entry in batch:
                await self._settle(tenant, [entry])
        except BaseException as error:  # every caller waits for it; then it goes on to our owner
            _fail(batch, error)
            raise
        else:
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def _transact(self, tenant: UUID, items: Sequence[I]) -> Sequence[R]:
        self._transactions.inc()
        return await self._database.run(tenant, lambda connection: self._work(connection, tenant, items))


def _fail(batch: Sequence[tuple[object, asyncio.Future[R]]], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
