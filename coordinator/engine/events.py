"""The events of one run, in memory, and the cursors of those who follow it in this process.

Appending costs a list entry; nothing is encoded before somebody reads it. A follower is a cursor: what it has not been sent yet is
in the log anyway, so a slow one holds no buffer of its own. One that lags behind by more than `stream_buffer` events holds back
whoever streams parts (`parts`), for a while; nothing else ever waits for a follower. One that lags for too long is cut: it can come
back with the number of the last event it saw, and has lost nothing.

    followed   somebody has been told numbers of this log, or may be: its events are stored when the decision rests
    sealed     the rest is being committed. Who comes now waits: if the log was not followed until then, it will not be stored, and
               its numbers must not become known
    closed     the run is over; what follows is told from the database
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from coordinator import telemetry
from coordinator.core.events import AT_REST, Event, first_of

BATCH, BATCH_BYTES = 64, 262_144
_encode = msgspec.json.Encoder().encode


class Follower:
    """The cursor of one subscriber. ``position`` is how many entries it was sent."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.cut = False
        self.news = asyncio.Event()

    async def changed(self, within_s: float) -> bool:
        """Wait until there is something new, at most so long; whether there is."""
        try:
            async with asyncio.timeout(within_s):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        return True


class EventLog:
    """Written by the task that walks the run's path, and by its readings."""

    __slots__ = ("_entries", "_first", "_followers", "_moved", "closed", "followed", "sealed", "stored")

    def __init__(self, token: int) -> None:
        self._first = first_of(token)
        self._entries: list[tuple[str, object]] = []
        self._followers: set[Follower] = set()
        self._moved: asyncio.Event | None = None
        self.followed = self.sealed = self.closed = False
        self.stored = 0
        """How many entries are in the database."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether a run has no numbers left for further parts."""
        return len(self._entries) >= AT_REST // 2

    def add(self, kind: str, what: object) -> None:
        """``what`` is encoded when it is read: it must not change any more. What comes after the last word of the run (a call that
        goes on for others, a worker that still talks) is not told."""
        if self.sealed or self.closed:
            return
        self._entries.append((kind, what))
        for follower in self._followers:
            follower.news.set()

    def events(self, position: int, limit: int = BATCH) -> list[Event]:
        """Those from this position on, as many as make a batch."""
        batch: list[Event] = []
        size = 0
        for kind, what in self._entries[position : position + limit]:
            batch.append(Event(self._first + position + len(batch), kind, _encode(what)))
            size += len(batch[-1].data)
            if size > BATCH_BYTES:
                break
        return batch

    def read(self, follower: Follower) -> list[Event]:
        """What this follower has not been sent yet, or some of it. From now on the log counts as followed."""
        if (self.sealed or self.closed) and not self.followed:
            return []
        self.followed = True
        return self.events(follower.position)

    def unstored(self, limit: int) -> Sequence[Event]:
        """What the database does not have yet, or some of it; nothing if nobody follows."""
        if not self.followed:
            return ()
        return self.events(self.stored, limit)

    def seal(self) -> Sequence[Event]:
        """The decision comes to rest: what has to be stored with it."""
        self.sealed = True
        events: list[Event] = []
        while batch := self.events(self.stored + len(events)) if self.followed else ():
            events += batch
        return events

    def unseal(self) -> None:
        """It does not come to rest yet."""
        self.sealed = False
        self._wake()

    def close(self) -> None:
        """The run is over in this process."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        for follower in self._followers:
            follower.news.set()

    @contextmanager
    def follow(self, after: int) -> Iterator[Follower]:
        """A cursor behind event number ``after``, which is counted from now on."""
        follower = Follower(min(max(after - self._first + 1, 0), len(self._entries)))
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)
            self._went_on()

    def sent(self, follower: Follower, count: int) -> None:
        """The follower has been sent so many more."""
        follower.position += count
        self._went_on()

    def _went_on(self) -> None:
        if self._moved is not None:
            self._moved.set()

    def _lagging(self, bound: int) -> list[Follower]:
        return [each for each in self._followers if len(self._entries) - each.position > bound]

    async def room(self, bound: int, patience_s: float) -> float:
        """Wait until no follower lags by more than ``bound``, and at most so long: then those who still do are cut. How long it
        took, in seconds."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while lagging := self._lagging(bound):
            left = began + patience_s - loop.time()
            if left <= 0:
                self._cut(lagging)
                break
            self._moved = self._moved or asyncio.Event()
            self._moved.clear()
            try:
                async with asyncio.timeout(left):
                    await self._moved.wait()
            except TimeoutError:
                continue
        return loop.time() - began

    def _cut(self, lagging: Sequence[Follower]) -> None:
        for follower in lagging:
            self._followers.discard(follower)
            follower.cut = True
            follower.news.set()
            telemetry.STREAMS_CUT.labels("lagging").inc()
