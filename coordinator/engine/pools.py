"""Pools: how many calls go to one provider at once.

A slot is claimed and released in pairs by a context manager, so that every way out of its block, cancellation included, gives it
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.core.breaker import Breaker


class Call:
    """One call that is under way."""

    def __init__(self, units: int) -> None:
        self.units = units

    def used(self, units: int | None) -> None:
        """How many units it really used, if the provider said."""
        if units is not None:
            self.units = units


class Provider:
    """The calls of this process to one provider: how many at once, how many wait, and whether it answers at all."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.busy = 0
        self.waiting = 0
        self.breaker = Breaker()
        self._slots = asyncio.Semaphore(total)

    @asynccontextmanager
    async def slot(self, units: int = 0) -> AsyncIterator[Call]:
        """Around one call, which is estimated to use so many ``units``."""
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        try:
            yield Call(units)
        finally:
            self.busy -= 1
            self._slots.release()


class Providers:
    """All providers of one process, by name."""

    def __init__(self, per_provider: int) -> None:
        self._per_provider = per_provider
        self.by_name: dict[str, Provider] = {}

    def of(self, name: str) -> Provider:
        provider = self.by_name.get(name)
        if provider is None:
            provider = self.by_name[name] = Provider(self._per_provider)
        return provider
