"""Pools: the calls of this process to each provider, how many at once and how many wait.

    async with engine.providers.of(name).slot(units=3) as call:
        ...
        call.used(5)

A call waits in the order of arrival for a slot, and where the provider has a rate, for its turn within that; both together, so that no
slot is held while a call waits for the rate, and nothing of the rate is used up by a call that waits for a slot. Slot and turn are
claimed and released in pairs by the context manager, so that every way out of its block, cancellation included, gives the slot back.

The slots of a declared pool are this process's share (`shares`), good until ``until`` on the monotonic clock; its turns are granted by
`rates` and good for half a second. A call that was told to go on too late, because its process was paused just then, waits again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from coordinator import telemetry
from coordinator.core.breaker import Breaker
from coordinator.core.pool import Pool
from coordinator.errors import RateLimited

MEASURED_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Grant:
    """A turn within the rate, given in this ``second`` of the database's clock; unused after ``until`` it is lost."""

    until: float
    second: int
    units: int


class Turns(Protocol):
    """Who hands out turns within a provider's rate."""

    @property
    def exhausted(self) -> bool:
        """Whether there was none left when it was last asked."""

    def wanted(self) -> None: ...
    def give_back(self, grant: Grant) -> None: ...
    def correct(self, grant: Grant, units: int) -> None: ...


class Call:
    """One call that is under way."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.given_up = False

    def used(self, units: int | None) -> None:
        """How many units it really used, if the provider said."""
        if units is not None:
            self.units = units

    def give_up(self) -> None:
        """We wait for its answer no longer, but the provider may still be busy with it."""
        self.given_up = True


class Waiting:
    """A call that waits: for its ``turn``, which comes with a grant where there is a rate."""

    __slots__ = ("deadline", "since", "told", "turn", "units")

    def __init__(self, units: int, until: float) -> None:
        self.units = units
        self.since = time.monotonic()
        self.deadline = min(until, anyio.current_effective_deadline())
        self.turn: asyncio.Future[Grant | None] = asyncio.get_running_loop().create_future()
        self.told = False


class Provider:
    """The calls of this process to one provider, and whether it answers at all (`breaker`)."""

    def __init__(self, name: str, total: int, *, lingers_ms: int = 0) -> None:
        self.name = name
        self.total = total
        self.until = math.inf
        self.busy = 0
        self.most = 0
        """The most calls that could have been under way at once, since this was last asked."""
        self.breaker = Breaker()
        self.turns: Turns | None = None
        self.changed: Callable[[], None] = _nothing
        """Told when a call lacks a slot, or a slot came free that others lack."""
        self.owes = False
        self._lingers_s = lingers_ms / 1000
        self._queue: deque[Waiting] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waited_ms(self) -> int:
        """How long the first has waited."""
        return round((time.monotonic() - self._queue[0].since) * 1000) if self._queue else 0

    @property
    def free(self) -> int:
        return max(0, self.total - self.busy) if time.monotonic() < self.until else 0

    @property
    def demand(self) -> int:
        """How many calls could be under way now, had it slots enough."""
        held_up = self.turns is not None and self.turns.exhausted
        return self.busy + (min(1, self.waiting) if held_up else self.waiting)

    @property
    def lacks(self) -> bool:
        """Whether a call waits for a slot, and not for the rate."""
        return self.demand > self.busy and not self.free

    @asynccontextmanager
    async def slot(self, units: int = 0, *, until: float = math.inf) -> AsyncIterator[Call]:
        """Around one call, which is estimated to use so many ``units``. Raises `RateLimited` if the rate would let it begin only
        after ``until`` or the deadline of the scope that it is in."""
        grant = await self._turn(units, until)
        call = Call(units)
        try:
            yield call
        except BaseException:
            call.give_up()
            raise
        finally:
            if grant is not None and self.turns is not None and call.units != units:
                self.turns.correct(grant, call.units)
            if call.given_up and self._lingers_s:
                asyncio.get_running_loop().call_later(self._lingers_s, self._free_slot)
            else:
                self._free_slot()

    def begin(self, waiting: Waiting, grant: Grant | None = None) -> bool:
        """Let a call go on that waits; false if it waits no longer, or no slot is free."""
        if not self.free or waiting not in self._queue:
            return False
        self._queue.remove(waiting)
        if waiting.turn.cancelled():  # its task does not know yet
            return False
        self.busy += 1
        waiting.turn.set_result(grant)
        return True

    def first(self) -> list[Waiting]:
        """Those that would go on now if the rate let them."""
        return [self._queue[index] for index in range(min(self.free, self.waiting))]

    def begin_waiting(self) -> None:
        """Slots may have come free, or more than before may be used."""
        self.most = max(self.most, self.demand)
        if self.turns is not None:
            self.turns.wanted()
        else:
            while self._queue and self.free:
                self.begin(self._queue[0])
        if self.lacks:
            self.changed()

    def refuse_late(self, turn_at: float) -> None:
        """Those whose deadline is before the next turn need not wait for it."""
        for waiting in [each for each in self._queue if each.deadline < turn_at]:
            self._queue.remove(waiting)
            if waiting.turn.cancelled():
                continue
            why = f"the rate of provider {self.name} lets no call begin before this one's deadline"
            waiting.turn.set_exception(RateLimited(why))

    async def _turn(self, units: int, until: float) -> Grant | None:
        while True:
            grant = await self._begun(units, until)
            now = time.monotonic()
            if now < self.until and (grant is None or now < grant.until):
                return grant
            self._undo(grant)

    async def _begun(self, units: int, until: float) -> Grant | None:
        if self.turns is None and not self._queue and self.busy < self.total and self.free:
            self.busy += 1
            self.most = max(self.most, self.busy)
            return None
        waiting = Waiting(units, until)
        self._queue.append(waiting)
        self.begin_waiting()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self._undo(waiting.turn.result())
            raise

    def _undo(self, grant: Grant | None) -> None:
        """A call that had its turn was not made."""
        if grant is not None and self.turns is not None:
            self.turns.give_back(grant)
        self._free_slot()

    def _free_slot(self) -> None:
        self.busy -= 1
        if self._queue:
            self.begin_waiting()
        if self.owes:
            self.changed()


class Providers:
    """All providers of one process, by name."""

    def __init__(self, per_provider: int, pools: Mapping[str, Pool] = {}) -> None:
        self._per_provider = per_provider
        self.by_name: dict[str, Provider] = {
            name: Provider(name, per_provider, lingers_ms=pool.lingers_ms) for name, pool in pools.items()
        }

    def of(self, name: str) -> Provider:
        provider = self.by_name.get(name)
        if provider is None:
            provider = self.by_name[name] = Provider(name, self._per_provider)
        return provider

    async def measure(self) -> None:
        """Keep the metrics up to date, for as long as the service runs."""
        while True:
            for name, provider in self.by_name.items():
                telemetry.POOL_BUSY.labels(name).set(provider.busy)
                telemetry.POOL_WAITING.labels(name).set(provider.waiting)
                telemetry.POOL_OLDEST_WAIT.labels(name).set(provider.waited_ms / 1000)
            await anyio.sleep(MEASURED_EVERY_S)


def _nothing() -> None:
    """Nobody shares its slots."""
