"""Lines: the decisions of one process that want the same named lock, in the order in which they came.

Only the head of a line goes on; it stays the head until it leaves, and whoever leaves lets the next one go on at once. A place is left
on every way out of the block that keeps it, cancellation included.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TypeAlias
from uuid import UUID

Name: TypeAlias = tuple[UUID, str]
"""A tenant and the name of its lock."""


class Lines:
    """All lines of one process; one that nobody stands in takes no room."""

    def __init__(self) -> None:
        self.by_name: dict[Name, deque[asyncio.Event]] = {}
        self.without_slot = 0
        """How many of those who wait have given their slot back."""

    @contextmanager
    def places_of(self, tenant: UUID) -> Iterator[Places]:
        """The places of one decision, left when the block ends."""
        places = Places(self, tenant)
        try:
            yield places
        finally:
            places.leave(places.names)


class Places:
    """Where one decision stands: at most one place in each line."""

    def __init__(self, lines: Lines, tenant: UUID) -> None:
        self._lines = lines.by_name
        self._tenant = tenant
        self._mine: dict[str, asyncio.Event] = {}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._mine)

    def is_head(self, name: str) -> bool:
        return name in self._mine and self._mine[name].is_set()

    async def turn(self, name: str) -> None:
        """Stand in line, unless we do, until we are the head."""
        await self._stand(name).wait()

    def heads(self, names: Iterable[str]) -> int:
        """Of how many of the first of these we are the head; where nobody stands, we are from now on."""
        able = takewhile(lambda name: self.is_head(name) or self._begins(name), names)
        return sum(1 for _ in able)

    def leave(self, names: Iterable[str]) -> None:
        for name in [name for name in names if name in self._mine]:
            line = self._lines[self._tenant, name]
            line.remove(self._mine.pop(name))
            if line:
                line[0].set()
            else:
                del self._lines[self._tenant, name]

    def _begins(self, name: str) -> bool:
        return (self._tenant, name) not in self._lines and self._stand(name).is_set()

    def _stand(self, name: str) -> asyncio.Event:
        if name not in self._mine:
            line = self._lines.setdefault((self._tenant, name), deque())
            line.append(asyncio.Event())
            self._mine[name] = line[-1]
            line[0].set()
        return self._mine[name]
