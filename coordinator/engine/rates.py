"""Turns within a provider's rate, for the calls of this process that wait and have a free slot.

One task per provider asks the database for as many turns as calls could begin, all in one transaction, and one transaction at a time: a
turn is asked for when it can be used, and used at once or given back. What is not granted is asked for again when it may be there; the
waiting calls hold no slot meanwhile. A turn is good for `GOOD_FOR_S` from before it was asked for: a request that is sent within that
reaches the provider within the second that the arithmetic allows for (`core/rate.py`).

What calls report to have used travels with the next question, or soon after. If this process dies first, the estimates stand. If a
COMMIT's answer is lost, what would give back is dropped, and what would take is repeated: the rest of both is on the safe side.
"""

from __future__ import annotations

import asyncio
import random
import time

import anyio

from coordinator import telemetry
from coordinator.core.rate import Correction, Granted
from coordinator.engine.pools import Grant, Provider, Waiting
from coordinator.engine.recover import quietly
from coordinator.errors import CommitUnknown
from coordinator.store import pools
from coordinator.store.database import NIL_TENANT, Database

GOOD_FOR_S = 0.5
REPORT_WITHIN_S = 0.25
SHORTEST_S, LONGEST_S = 0.01, 1.0
SPREAD_S = 0.25
"""Processes that wait for the same rate do not all ask at the same moment."""


class Rates:
    """The turns of one provider. ``processes`` is how many may be asking."""

    def __init__(self, database: Database, provider: Provider, processes: int) -> None:
        self.exhausted = False
        self._database = database
        self._provider = provider
        self._processes = processes
        self._corrections: list[Correction] = []
        self._wanted = asyncio.Event()
        self._waits = telemetry.POOL_RATE_WAITS.labels(provider.name)
        provider.turns = self

    def wanted(self) -> None:
        self._wanted.set()

    def give_back(self, grant: Grant) -> None:
        self._corrections.append(Correction(grant.second, requests=-1, units=-grant.units))
        self._wanted.set()

    def correct(self, grant: Grant, units: int) -> None:
        self._corrections.append(Correction(grant.second, units=units - grant.units))
        self._wanted.set()

    async def run(self) -> None:
        """For as long as the service runs."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._corrections and not self._provider.first():
                with anyio.move_on_after(REPORT_WITHIN_S):
                    await self._wanted.wait()
            if not await quietly("claim of a rate", self.ask):
                await anyio.sleep(LONGEST_S)
                self._wanted.set()

    async def ask(self) -> None:
        """Once; and if that was not enough, wait until there may be more."""
        self.exhausted = False
        calls = self._provider.first()
        if not calls and not self._corrections:
            return
        before = time.monotonic()
        granted = await self._claim(calls)
        for waiting in calls[: granted.count]:
            grant = Grant(before + GOOD_FOR_S, granted.second, waiting.units)
            if not self._provider.begin(waiting, grant):
                self.give_back(grant)
        self.exhausted = granted.count < len(calls)
        if self.exhausted:
            await self._until_there_may_be_more(before, calls[granted.count :], granted.wait_s)

    async def _claim(self, calls: list[Waiting]) -> Granted:
        corrections, self._corrections = self._corrections, []
        try:
            while True:
                async with self._database.transaction(NIL_TENANT, also=pools.LET_GO) as connection:
                    units = [waiting.units for waiting in calls]
                    granted = await pools.claim(connection, self._provider.name, units, corrections)
                if granted is not None:
                    return granted
        except CommitUnknown:
            self._corrections += [each for each in corrections if each.units > 0]
            raise
        except BaseException:
            self._corrections += corrections
            raise

    async def _until_there_may_be_more(self, asked: float, left: list[Waiting], wait_s: float) -> None:
        for waiting in left:
            if not waiting.told:
                waiting.told = True
                self._waits.inc()
        self._provider.refuse_late(asked + wait_s)
        spread = random.uniform(0, min(SPREAD_S, wait_s * (self._processes - 1)))
        await anyio.sleep(min(LONGEST_S, max(SHORTEST_S, wait_s + spread)))
        self.wanted()
