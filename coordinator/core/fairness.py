"""Which decision starts next when a slot comes free: first which class, then which tenant of it.

Classes: a class that waits and has fewer running than its reserve starts at once; otherwise shares follow the weights (stride
scheduling). An idle reserve is lent: any class may run on it. When its owner comes, it does not wait for that: it runs beyond the
slots, and the next ones that come free are not filled until what was lent is back, within the time of one run. So at most ``slots``
and the reserves together ever run at once. Every class has a weight of at least 1, so the lowest advances too.

Tenants of a class: start-time fair queuing. Each start advances its tenant's virtual time by the cost of what was started; the
waiting tenant that is furthest behind goes next. Who was idle begins at the present virtual time and does not catch up. So one
tenant's flood lengthens its own queue and nobody else's.

(C. A. Waldspurger, W. E. Weihl, *Stride Scheduling*, 1995; P. Goyal, H. M. Vin, H. Cheng, *Start-time Fair Queuing*, 1996.)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class ClassLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one class.

    ``weight``: share of starts under contention. ``reserved``: slots of each process that are this class's whenever it wants them: lent to
    others while it does not, and then had beyond the slots until they are back.
    ``queue_depth``: how many decisions of one tenant may wait, over all processes, before a request is refused;
    ``total_depth``: of all tenants (0: eight times ``queue_depth``); beyond that, only tenants with more than their part of it
    waiting are refused. ``start_objective_ms``: within which time a decision should start; misses are counted.
    """

    weight: int
    reserved: int
    queue_depth: int
    total_depth: int = 0
    start_objective_ms: int = 5_000

    def __post_init__(self) -> None:
        if self.weight < 1 or min(self.reserved, self.queue_depth, self.total_depth) < 0:
            raise ValueError(
                "weight must be at least 1; reserved, queue_depth and total_depth must not be negative"
            )
        if self.start_objective_ms < 1:
            raise ValueError("start_objective_ms must be at least 1")

    def room(self, waiting: int, waiting_of_all: int, tenants: int) -> bool:
        """Whether a tenant that has ``waiting`` may add one more, while ``tenants`` have ``waiting_of_all`` together."""
        bound = self.total_depth or 8 * self.queue_depth
        if waiting >= self.queue_depth:
            return False
        return waiting_of_all < bound or waiting < bound // max(1, tenants)


class ClassShares:
    """The choice among classes; ``slots`` is how many decisions run at once, but for reserves that are lent."""

    def __init__(self, classes: Mapping[str, ClassLimits], slots: int) -> None:
        self.classes = classes
        self.slots = slots
        self.running = dict.fromkeys(classes, 0)
        self.busy = 0
        self._virtual = dict.fromkeys(classes, 0.0)
        self._now = 0.0

    def next(self, waiting: Mapping[str, int]) -> str | None:
        """The class to start from, of those that have someone waiting; None if none may start."""
        able = [name for name, count in waiting.items() if count > 0 and self.may_start(name)]
        owed = [name for name in able if self.running[name] < self.classes[name].reserved]
        return min(owed or able, key=lambda name: (max(self._virtual[name], self._now), name), default=None)

    def may_start(self, name: str) -> bool:
        """Whether a slot is free, or the class's own reserve is lent."""
        return self.busy < self.slots or self.running[name] < self.classes[name].reserved

    def start(self, name: str) -> None:
        self._now = max(self._virtual[name], self._now)
        self._virtual[name] = self._now + 1 / self.classes[name].weight
        self.running[name] += 1
        self.busy += 1

    def finish(self, name: str) -> None:
        self.running[name] -= 1
        self.busy -= 1


class TenantTurns(Generic[T]):
    """The choice among the tenants of one class. A pick costs O(log n) of the tenants that wait."""

    def __init__(self) -> None:
        self.waiting: dict[T, int] = {}
        """How many of each tenant wait; never 0."""
        self.total = 0
        self._virtual: dict[T, float] = {}
        self._turns: list[tuple[float, int, T]] = []
        self._listed: set[T] = set()
        self._entries = 0
        self._now = 0.0

    def set(self, tenant: T, count: int) -> None:
        """So many of this tenant wait now."""
        before = self.waiting.get(tenant, 0)
        self.total += count - before
        if count:
            self.waiting[tenant] = count
            if not before:
                self._virtual[tenant] = max(self._virtual.get(tenant, 0.0), self._now)
                self._push(tenant)
        elif before:
            del self.waiting[tenant]

    def add(self, tenant: T) -> None:
        self.set(tenant, self.waiting.get(tenant, 0) + 1)

    def pick(self) -> T | None:
        """The tenant whose turn it is, one fewer of which waits from now on; it is charged a cost of 1."""
        while self._turns:
            at, _, tenant = heapq.heappop(self._turns)
            self._listed.remove(tenant)
            if at < self._virtual[tenant]:  # it was charged since
                self._push(tenant)
            elif tenant in self.waiting:
                self._now = max(self._now, self._virtual[tenant])
                self._virtual[tenant] += 1.0
                self._push(tenant)
                self.set(tenant, self.waiting[tenant] - 1)
                return tenant
            else:  # what it has had is made up for: it would begin at the present time anyway
                del self._virtual[tenant]
        return None

    def charge(self, tenant: T, cost: float) -> None:
        """What was started turned out to cost more (or less) than the 1 that it was charged."""
        if tenant in self._virtual:
            self._virtual[tenant] += cost - 1.0

    def _push(self, tenant: T) -> None:
        """Each tenant has one entry at most; one that is too early is put right when it comes up."""
        if tenant not in self._listed:
            self._listed.add(tenant)
            self._entries += 1
            heapq.heappush(self._turns, (self._virtual[tenant], self._entries, tenant))
