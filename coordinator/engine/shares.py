"""This process's share of the slots of each declared pool: claimed at the start, kept by a lease, moved to where calls wait.

    at the start      an equal part of the slots, `limit // processes`, is claimed, and never more than nobody else holds
    a call lacks one  the process says how many it could use and takes what is free and its due, at once; then, while it lacks some,
                      every `pool_poll_ms`
    others lack one   what is above this process's part goes back as calls end; idle slots at once. Who uses more than an equal part
                      looks every four `pool_poll_ms` whether others lack some
    otherwise         the lease is renewed every third of it
    in the end        what is free goes back, and calls that are still under way keep theirs until they must have ended

A process begins calls only while its lease is certainly good: counted on its monotonic clock from before the renewal was written. It
uses less before it has written so, and more only once COMMIT was acknowledged. If it dies, or is paused, its slots are nobody's until
its lease and then the longest call that is declared for that provider have passed; so a call that was under way never shares a slot
with its successor. If the database is away, the lease runs out and no call begins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import anyio
import msgspec

from coordinator.core.share import Holder, Share, home_of, share_of
from coordinator.engine.pools import Provider
from coordinator.engine.recover import quietly
from coordinator.store import pools
from coordinator.store.database import NIL_TENANT, Database

AFTER_A_FAILURE_S = 0.5
NO_SHARE = Share(part=0, slots=0)
MARGIN_MS = 1_500
"""A call may end this much later than its declared limit: sinks get a second of grace, and the rest is for the way to the provider."""


@dataclass(slots=True)
class Held:
    """A pool of which this process holds slots. ``told`` is how many it said it could use."""

    provider: Provider
    longest_ms: int
    limit: int = 0
    share: Share = NO_SHARE
    told: int = 0
    tried_at: float = -math.inf


class Shares:
    """``longest_ms``: how long a call of each provider may take."""

    def __init__(self, database: Database, process: UUID, longest_ms: Mapping[Provider, int]) -> None:
        self._database = database
        self._process = process
        self._settings = database.settings
        self._held = {
            provider.name: Held(provider, longest + MARGIN_MS) for provider, longest in longest_ms.items()
        }
        self._noticed = asyncio.Event()
        self._writing = anyio.Lock()
        self._released = False
        for provider in longest_ms:
            provider.total, provider.until = 0, 0.0
            provider.changed = self._noticed.set

    async def run(self) -> None:
        """For as long as the service runs, or until `release`."""
        while not self._released:
            now = time.monotonic()
            for held in [held for held in self._held.values() if now >= self._due_at(held)]:
                if not await quietly("share the slots of a provider", partial(self.sync, held)):
                    await anyio.sleep(AFTER_A_FAILURE_S)
            self._noticed.clear()
            with anyio.move_on_after(min(map(self._due_at, self._held.values())) - time.monotonic()):
                await self._noticed.wait()

    def _due_at(self, held: Held) -> float:
        return held.tried_at + min(self._settings.lease_ms / 3, self._interval_ms(held)) / 1000

    def _interval_ms(self, held: Held) -> float:
        provider, share, poll_ms = held.provider, held.share, self._settings.pool_poll_ms
        owes_now = share.slots > max(share.part, provider.busy)
        if owes_now or (provider.lacks and (share.slots < share.part or held.told <= share.slots)):
            return poll_ms
        above = share.slots > home_of(held.limit, self._settings.processes)
        return 4 * poll_ms if provider.lacks or above else self._settings.lease_ms / 3

    async def sync(self, held: Held) -> None:
        """Renew the lease, and take or give back what is due."""
        async with self._writing:
            written = self._released
            while not written:
                before = held.tried_at = time.monotonic()
                async with self._database.transaction(NIL_TENANT, also=pools.LET_GO) as connection:
                    written = await pools.share(
                        connection,
                        self._process,
                        held.provider.name,
                        self._settings.lease_ms,
                        partial(self._decide, held),
                    )
                if written:
                    self._may_use(held, before + self._settings.lease_ms / 1000)

    def _decide(self, held: Held, limit: int, holders: Sequence[Holder], me: int) -> pools.Told:
        provider, home = held.provider, home_of(limit, self._settings.processes)
        wanted = max(provider.most, provider.demand, min(home, 1))
        mine = msgspec.structs.replace(holders[me], wanted=wanted, waited_ms=provider.waited_ms)
        everybody = [mine if index == me else holder for index, holder in enumerate(holders)]
        share = share_of(limit, everybody, me, home=home, busy=provider.busy)
        provider.total = min(provider.total, share.slots, share.part)
        held.limit, held.told, held.share = limit, wanted, share
        return pools.Told(
            slots=share.slots,
            busy=provider.busy,
            waiting=provider.waiting,
            wanted=wanted,
            waited_ms=provider.waited_ms,
            longest_ms=held.longest_ms,
        )

    def _may_use(self, held: Held, until: float) -> None:
        provider, share = held.provider, held.share
        provider.total, provider.until = min(share.slots, share.part), until
        provider.owes = share.slots > share.part
        provider.most = provider.demand
        provider.begin_waiting()

    async def release(self) -> None:
        """Begin no more calls, and give back what is free."""
        async with self._writing:
            self._released = True
            busy = {}
            for name, held in self._held.items():
                held.provider.total, held.provider.changed = 0, _nothing
                busy[name] = held.provider.busy
            async with self._database.transaction(NIL_TENANT, also=pools.LET_GO) as connection:
                await pools.release(connection, self._process, busy)
        self._noticed.set()


def _nothing() -> None:
    """What is released is nobody's concern any more."""
