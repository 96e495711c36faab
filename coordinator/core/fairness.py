"""Which class starts next when a slot comes free: reserved slots first, then shares by weight (stride scheduling).

Each class carries a virtual time that advances by 1/weight per start; the waiting class that is furthest behind goes next, so
shares follow the weights and every class with weight > 0 advances. A class that comes back from idleness starts at the present
virtual time: it does not get to catch up for what it did not want. (C. A. Waldspurger, W. E. Weihl, *Stride Scheduling*, 1995.)
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ClassLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``weight``: share of starts under contention; ``reserved``: slots only this class may use; ``queue_depth``: how many may
    wait in one process before a request is refused."""

    weight: int
    reserved: int
    queue_depth: int

    def __post_init__(self) -> None:
        if self.weight < 1 or self.reserved < 0 or self.queue_depth < 0:
            raise ValueError("weight must be at least 1, reserved and queue_depth must not be negative")


class ClassShares:
    """The state of the choice; ``slots`` is how many decisions run at once."""

    def __init__(self, classes: Mapping[str, ClassLimits], slots: int) -> None:
        self.classes = classes
        self.slots = slots
        self.running = dict.fromkeys(classes, 0)
        self._virtual = dict.fromkeys(classes, 0.0)
        self._now = 0.0

    def may_start(self, name: str) -> bool:
        """Whether a slot is free for this class, the other classes' unused reserves left alone."""
        free = self.slots - sum(self.running.values())
        if free <= 0:
            return False
        if self.running[name] < self.classes[name].reserved:
            return True
        kept = sum(
            max(0, limits.reserved - self.running[other])
            for other, limits in self.classes.items()
            if other != name
        )
        return free > kept

    def next(self, waiting: Mapping[str, int]) -> str | None:
        """The class to start from, of those that have someone waiting; None if no slot is free for any of them."""
        able = [name for name, count in waiting.items() if count > 0 and self.may_start(name)]
        return min(able, key=lambda name: (max(self._virtual[name], self._now), name), default=None)

    def start(self, name: str) -> None:
        self._now = max(self._virtual[name], self._now)
        self._virtual[name] = self._now + 1 / self.classes[name].weight
        self.running[name] += 1

    def finish(self, name: str) -> None:
        self.running[name] -= 1
