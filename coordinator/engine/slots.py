"""Slots: how many decisions run at once, shared between classes.

They are claimed and released in pairs, on every way out of a block, cancellation included. The number of waiters is bounded per
class: beyond it a request is refused at once, with an estimate of when to come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from coordinator import telemetry
from coordinator.core.fairness import ClassLimits, ClassShares
from coordinator.errors import MalformedRequest, QueueFull
from coordinator.store.records import Locked


class Ticket:
    """A place in a class: running, or waiting for ``turn``."""

    def __init__(self, class_: str) -> None:
        self.class_ = class_
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def runs(self) -> bool:
        return self.turn.done() and not self.turn.cancelled()


class ClassSlots:
    """The slots of one process. `take` never waits: it starts the ticket or queues it, or refuses."""

    def __init__(self, classes: Mapping[str, ClassLimits], slots: int) -> None:
        self.shares = ClassShares(classes, slots)
        self.waiting: dict[str, deque[Ticket]] = {name: deque() for name in classes}
        self._started = dict.fromkeys(classes, 0)
        self._since = time.monotonic()

    def take(self, class_: str, *, bounded: bool = True) -> Ticket:
        """Raises `QueueFull` if the class's queue is at its depth (unless ``bounded`` is false: work already promised)."""
        limits = self.shares.classes.get(class_)
        if limits is None:
            known = ", ".join(self.shares.classes)
            raise MalformedRequest(f"there is no class {class_!r}", [("/class", f"must be one of {known}")])
        ticket = Ticket(class_)
        if not self.waiting[class_] and self.shares.may_start(class_):
            self._start(ticket)
        elif bounded and len(self.waiting[class_]) >= limits.queue_depth:
            raise QueueFull(
                f"class {class_!r} has {limits.queue_depth} waiting", retry_after_ms=self.estimate_ms(class_)
            )
        else:
            self.waiting[class_].append(ticket)
            self._measure(class_)
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        if ticket.runs():
            self.shares.finish(ticket.class_)
        else:
            self.waiting[ticket.class_].remove(ticket)
        self._measure(ticket.class_)
        self._start_waiting()

    def position(self, ticket: Ticket) -> int:
        """How many of its class are before it; 0 when it runs."""
        return 0 if ticket.runs() else self.waiting[ticket.class_].index(ticket) + 1

    def estimate_ms(self, class_: str, position: int | None = None) -> int:
        """When the last of the queue (or ``position``) will start, at the rate of starts seen so far; at least 100 ms."""
        ahead = len(self.waiting[class_]) if position is None else position
        rate = self._started[class_] / max(time.monotonic() - self._since, 0.001)
        return min(60_000, max(100, int(1000 * ahead / max(rate, 0.1))))

    def _start_waiting(self) -> None:
        while (
            class_ := self.shares.next({name: len(queue) for name, queue in self.waiting.items()})
        ) is not None:
            self._start(self.waiting[class_].popleft())

    def _start(self, ticket: Ticket) -> None:
        self.shares.start(ticket.class_)
        self._started[ticket.class_] += 1
        ticket.turn.set_result(None)
        self._measure(ticket.class_)

    def _measure(self, class_: str) -> None:
        telemetry.RUNNING.labels(class_).set(self.shares.running[class_])
        telemetry.QUEUED.labels(class_).set(len(self.waiting[class_]))


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
