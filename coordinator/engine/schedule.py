"""Schedule: the slots of this process, and which waiting decision takes one next.

Queued decisions are rows in the database that nobody holds. Every process knows how many wait, by class and tenant: from its own
admissions at once, of the others' from a look at the `queues` table every `queue_poll_ms`. When a slot comes free, the class and then
the tenant whose turn it is are chosen (`core/fairness.py`), and that tenant's oldest decision of the class is claimed with SKIP
LOCKED; claims of one tenant share a transaction. If another process was faster, the slot is given back.

A request is started at once, without waiting, only if nobody of its class waits and a slot is free, or its class's reserve is lent. A
slot is taken and given back in pairs by whoever holds it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from coordinator import telemetry
from coordinator.core.fairness import ClassLimits, ClassShares, TenantTurns
from coordinator.errors import MalformedRequest, QueueFull

SHORTEST_RETRY_MS, LONGEST_RETRY_MS = 100, 60_000
RATE_OVER_S = 10.0
"""Rates and durations are averages that forget the past at this pace."""


@dataclass(slots=True, eq=False)
class Slot:
    """The right to run one decision of a class. While it is lent (`Schedule.lent`), ``turn`` says when it is back."""

    class_: str
    tenant: UUID
    taken_at: float
    turn: asyncio.Future[None] | None = None


class Pace:
    """Starts per second and how long a run takes, as averages in which the past fades."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._starts = 0.0
        self._runs = 0.0
        self._seconds = 0.0

    def _fade(self) -> None:
        now = time.monotonic()
        kept = 0.5 ** ((now - self._at) / RATE_OVER_S)
        self._at = now
        self._starts *= kept
        self._runs *= kept
        self._seconds *= kept

    def started(self) -> None:
        self._fade()
        self._starts += 1

    def ended(self, seconds: float) -> None:
        self._fade()
        self._runs += 1
        self._seconds += seconds

    def starts_per_s(self) -> float:
        self._fade()
        return self._starts * 0.6931 / RATE_OVER_S

    def mean_run_s(self) -> float:
        """A second, while nothing has been seen."""
        return self._seconds / self._runs if self._runs > 0.01 else 1.0


class Schedule:
    """``claim(slot)`` is called for each choice; it has to give the slot back in the end."""

    def __init__(self, classes: Mapping[str, ClassLimits], slots: int, claim: Callable[[Slot], None]) -> None:
        self.shares = ClassShares(classes, slots)
        self.turns: dict[str, TenantTurns[UUID]] = {name: TenantTurns() for name in classes}
        self.pace = {name: Pace() for name in classes}
        self._of_all = Pace()
        self.processes = 1
        """How many serve this database, as far as is known."""
        self._oldest: dict[str, float] = dict.fromkeys(classes, 0.0)
        self._returning: dict[str, deque[asyncio.Future[None]]] = {name: deque() for name in classes}
        self._touched: set[tuple[str, UUID]] = set()
        self._open = True
        self._claim = claim

    # Asking -----------------------------------------------------------------------------------------------------------------

    def limits(self, class_: str) -> ClassLimits:
        """Raises `MalformedRequest` if there is no such class."""
        limits = self.shares.classes.get(class_)
        if limits is None:
            known = ", ".join(self.shares.classes)
            raise MalformedRequest(f"there is no class {class_!r}", [("/class", f"must be one of {known}")])
        return limits

    def try_start(self, class_: str, tenant: UUID) -> Slot | None:
        """A slot, or None if the decision has to be queued. Raises `QueueFull` if it is known that it may not even be that."""
        limits, turns, returning = self.limits(class_), self.turns[class_], self._returning[class_]
        if not turns.total and not returning and self.shares.may_start(class_):
            return self._start(class_, tenant)
        if not limits.room(turns.waiting.get(tenant, 0), turns.total, self._tenants(class_, tenant)):
            raise self.full(class_, tenant)
        return None

    def full(self, class_: str, tenant: UUID) -> QueueFull:
        """The refusal, with when a tenth of what waits will have started."""
        telemetry.REFUSED.labels(class_).inc()
        waiting = self.turns[class_].waiting.get(tenant, 0)
        wait_ms = self.estimate_ms(class_, tenant, max(1, waiting // 10))
        return QueueFull(
            f"class {class_!r} has no room for another decision: {waiting} of yours wait; come back later, or send fewer at a time",
            retry_after_ms=min(LONGEST_RETRY_MS, max(SHORTEST_RETRY_MS, wait_ms)),
        )

    def position(self, class_: str, tenant: UUID) -> int:
        """The place of a decision that comes now among its tenant's of the class; 1 is the next."""
        return self.turns[class_].waiting.get(tenant, 0) + 1

    def estimate_ms(self, class_: str, tenant: UUID, position: int) -> int:
        """When the tenant's decision at ``position`` will start, by Little's law: all slots of all processes end runs at the rate
        slots / mean duration; the class gets its share of that by weight, the tenant its part of the class."""
        weights = {name: limits.weight for name, limits in self.shares.classes.items()}
        rivals = [name for name, turns in self.turns.items() if turns.total or name == class_]
        part = weights[class_] / sum(weights[name] for name in rivals) / self._tenants(class_, tenant)
        return round(1000 * position / (self.capacity_per_s() * part))

    def capacity_per_s(self) -> float:
        """How many starts all processes together can make, of any class."""
        return self.processes * self.shares.slots / max(self._of_all.mean_run_s(), 0.001)

    def _tenants(self, class_: str, tenant: UUID) -> int:
        """That wait in the class, this one among them."""
        waiting = self.turns[class_].waiting
        return len(waiting) + (tenant not in waiting)

    def oldest_age_ms(self, class_: str) -> int:
        """How long the class's oldest decision has waited, of all tenants; 0 if none waits."""
        since = self._oldest[class_]
        return round((time.monotonic() - since) * 1000) if since and self.turns[class_].total else 0

    # What waits -------------------------------------------------------------------------------------------------------------

    def queued(self, class_: str, tenant: UUID) -> None:
        """A decision was queued by this process."""
        self._touched.add((class_, tenant))
        self.turns[class_].add(tenant)
        self._oldest[class_] = self._oldest[class_] or time.monotonic()
        self.pump()

    def nothing_there(self, slot: Slot) -> None:
        """The claim found nothing: other processes were faster. What waits really, the next look will tell."""
        self._touched.add((slot.class_, slot.tenant))
        self.turns[slot.class_].set(slot.tenant, 0)

    def looking(self) -> None:
        """A look at the database begins: what changes here from now on, it may not see."""
        self._touched.clear()

    def seen(self, waiting: Mapping[tuple[str, UUID], int], oldest_ms: Mapping[str, float]) -> None:
        """What the look saw."""
        now = time.monotonic()
        for class_, turns in self.turns.items():
            known = {tenant for tenant in turns.waiting if (class_, tenant) not in self._touched}
            there = {tenant: count for (name, tenant), count in waiting.items() if name == class_}
            for tenant in known - there.keys():
                turns.set(tenant, 0)
            for tenant, count in there.items():
                if (class_, tenant) not in self._touched:
                    turns.set(tenant, count)
            self._oldest[class_] = now - oldest_ms[class_] / 1000 if class_ in oldest_ms else 0.0
            telemetry.QUEUED.labels(class_).set(turns.total)
            telemetry.OLDEST_QUEUED.labels(class_).set(self.oldest_age_ms(class_) / 1000)
        self.pump()

    # Slots ------------------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Choose nothing new any more; what runs has its slot again when it needs it."""
        self._open = False

    def pump(self) -> None:
        """Give every free slot to whose turn it is."""
        for slot in self._choices():
            self._claim(slot)

    def _choices(self) -> Iterator[Slot]:
        while True:
            waiting = {
                name: len(self._returning[name]) + (turns.total if self._open else 0)
                for name, turns in self.turns.items()
            }
            class_ = self.shares.next(waiting)
            if class_ is None:
                return
            if self._returning[class_]:
                self.shares.start(class_)
                self._measure(class_)
                self._returning[class_].popleft().set_result(None)
            elif (tenant := self.turns[class_].pick()) is not None:
                self._touched.add((class_, tenant))
                yield self._start(class_, tenant)

    def _start(self, class_: str, tenant: UUID) -> Slot:
        self.shares.start(class_)
        self._measure(class_)
        return Slot(class_, tenant, time.monotonic())

    def runs(self, slot: Slot, cost: float, waited_ms: int) -> None:
        """The slot is used by a decision that costs this much and has waited so long."""
        self.pace[slot.class_].started()
        self.turns[slot.class_].charge(slot.tenant, cost)
        telemetry.START_SECONDS.labels(slot.class_).observe(waited_ms / 1000)
        if waited_ms > self.shares.classes[slot.class_].start_objective_ms:
            telemetry.LATE_STARTS.labels(slot.class_).inc()

    def ended(self, slot: Slot) -> None:
        """A run is over; its slot is given back separately."""
        self._of_all.ended(time.monotonic() - slot.taken_at)

    def give_back(self, slot: Slot) -> None:
        if slot.turn is not None and not slot.turn.done():
            self._returning[slot.class_].remove(slot.turn)
            return
        self.shares.finish(slot.class_)
        self._measure(slot.class_)
        self.pump()

    @asynccontextmanager
    async def lent(self, slot: Slot) -> AsyncIterator[None]:
        """Give the slot back while the block waits for something else; at its end, wait for the next one of the class. Whoever is
        cancelled meanwhile holds a slot whose turn has not come, and gives that back."""
        self.give_back(slot)
        try:
            yield
        finally:
            slot.turn = asyncio.get_running_loop().create_future()
            self._returning[slot.class_].append(slot.turn)
            self.pump()
        await asyncio.wait([slot.turn])

    def _measure(self, class_: str) -> None:
        telemetry.RUNNING.labels(class_).set(self.shares.running[class_])
