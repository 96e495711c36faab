"""The declared pools of this process as one thing: declared, kept, shown, and released in the end.

What each needs is put together here: a share of its slots if it limits calls at once (`shares`), turns if it limits calls or units per
minute (`rates`). Without a declared pool nothing runs here, and the database is not asked.
"""

from __future__ import annotations

import logging
import time
from uuid import UUID

import anyio
import msgspec

from coordinator.core.breaker import BreakerState
from coordinator.core.decision import Coordinator
from coordinator.core.evidence import Billed
from coordinator.core.pool import Limits
from coordinator.engine.budgets import ASK_TIMEOUT_S
from coordinator.engine.pools import Providers
from coordinator.engine.rates import Rates
from coordinator.engine.recover import quietly
from coordinator.engine.shares import AFTER_A_FAILURE_S, Shares
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store import pools
from coordinator.store.database import NIL_TENANT, Database

log = logging.getLogger(__name__)


class PoolNow(msgspec.Struct, frozen=True, kw_only=True):
    """One provider. ``busy``, ``total``, ``waiting`` and ``waited_ms`` are this process's; ``others`` is what all other
    processes said last, and the rates, if the provider has a declared pool."""

    provider: str
    busy: int
    total: int
    waiting: int
    waited_ms: int
    breaker: BreakerState
    others: pools.PoolState | None = None


class Pooled:
    """``process`` is the name under which this process holds slots."""

    def __init__(
        self, coordinator: Coordinator, database: Database, providers: Providers, process: UUID
    ) -> None:
        self._coordinator = coordinator
        self._database = database
        self._providers = providers
        self._process = process
        declared = coordinator.pools
        self._limits: dict[str, Limits] = {name: pool.limits for name, pool in declared.items()}
        shared = [name for name, limits in self._limits.items() if limits.concurrency is not None]
        rated = [name for name, limits in self._limits.items() if limits.has_rate]
        longest = {
            providers.of(name): longest_call_ms(coordinator, name) + declared[name].lingers_ms
            for name in shared
        }
        self._shares = Shares(database, process, longest) if longest else None
        self._rates = [Rates(database, providers.of(name), database.settings.processes) for name in rated]

    async def run(self) -> None:
        """For as long as the service runs."""
        if not self._limits:
            return
        while True:
            if await quietly("declare the pools", self._declare):
                break
            await anyio.sleep(AFTER_A_FAILURE_S)
        async with anyio.create_task_group() as tasks:
            if self._shares is not None:
                tasks.start_soon(self._shares.run)
            for rates in self._rates:
                tasks.start_soon(rates.run)

    async def _declare(self) -> None:
        async with self._database.transaction(NIL_TENANT) as connection:
            await pools.declare(connection, self._limits)

    async def release(self) -> None:
        """Begin no more calls of shared pools; what is free is there for other processes at once."""
        if self._shares is not None:
            try:
                await self._shares.release()
            except (CommitUnknown, Overloaded) as error:
                log.warning("the slots of providers are free when their leases have run out: %s", error)

    async def now(self) -> list[PoolNow]:
        """Every provider of a declared source or sink, by name."""
        others: dict[str, pools.PoolState] = {}
        if self._limits:
            async with self._database.transaction(NIL_TENANT) as connection:
                others = await pools.state(connection, self._process, [*self._limits])
        now_ms = round(time.monotonic() * 1000)
        return [
            PoolNow(
                provider=name,
                busy=provider.busy,
                total=provider.total,
                waiting=provider.waiting,
                waited_ms=provider.waited_ms,
                breaker=provider.breaker.state(now_ms),
                others=others.get(name),
            )
            for name in sorted(self._coordinator.providers)
            for provider in [self._providers.of(name)]
        ]


def longest_call_ms(coordinator: Coordinator, provider: str) -> int:
    """Of its readings and effects, and of asking it what it has billed."""
    sources = (each for declared in coordinator.types.values() for each in declared.evidence.values())
    asked = any(each.provider == provider and isinstance(each.source, Billed) for each in sources)
    return max(coordinator.longest_call_ms(provider), round(ASK_TIMEOUT_S * 1000) if asked else 0)
