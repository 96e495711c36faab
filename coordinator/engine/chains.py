"""Chains: what the writers of one record in this process have proposed, so that they commit one after the other, not against each
other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.store.records import Locked


class Chain:
    """The proposals of this process for one record. ``latest`` is what the last of them makes of it, if all of them are accepted.
    When one fails, so do all behind it; the first to learn of it begins the next ``generation`` from what is really there."""

    def __init__(self) -> None:
        self.latest: Locked | None = None
        self.generation = 0
        self.members = 0

    def broke(self, generation: int, present: Locked | None) -> None:
        if generation == self.generation:
            self.generation += 1
            self.latest = present

    def newest(self, present: Locked) -> Locked:
        """What to decide on next: what others of this generation have proposed by now, else what is there."""
        return self.latest if self.latest and self.latest.version > present.version else present


class Chains:
    """Writers of one hot record would all conflict with each other in the database. Here each one learns what its predecessor
    has proposed and decides on that, so that many of them can be committed together, in order."""

    def __init__(self) -> None:
        self._chains: dict[object, Chain] = {}

    @contextmanager
    def of(self, key: object) -> Iterator[Chain]:
        chain = self._chains.setdefault(key, Chain())
        chain.members += 1
        try:
            yield chain
        finally:
            chain.members -= 1
            if not chain.members:
                del self._chains[key]
