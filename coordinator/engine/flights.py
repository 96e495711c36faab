"""Flights: identical readings in flight are shared (single flight).

    latest   the flight of a question that may be joined: one that began, or will begin, after a given moment
    lead     take off, under the question: a task of its own until it has landed; and wait for its answer
    join     wait for the answer of one that is in flight
    aclose   cancel all and wait for their end: no flight outlives its service

Whoever waits leaves when it is cancelled, or when its own time is over; the last to leave cancels the flight.

A flight belongs to nobody who waits for it: the one who began it may leave, and it flies on for the others. When the last has
left it is cancelled, its clean-ups run, and whoever left last waits for that, bounded in time. A flight that has landed or was
cancelled is joined by nobody. One that begins later takes the place of an earlier one under the same question; who waits for
that goes on waiting. They are plain tasks and no task group: a tenth of a decision's time would go into that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any

import anyio

from coordinator.core.evidence import Answer, Failed
from coordinator.core.likeness import Question
from coordinator.engine.parts import Audience

log = logging.getLogger(__name__)
CALLED_OFF = Failed("called-off", "it was not waited for any longer")


class Flight:
    """``began`` is when its call began, on this process's monotonic clock; infinite while it waits for its provider's slot.
    ``until`` is when the time of whoever began it is over, and with it the source's own limit.
    ``begun`` is how often what it asks for was begun: once, but for a task that several workers had, or none.
    ``audience`` is told what the source streams."""

    __slots__ = (
        "audience",
        "began",
        "begun",
        "landed",
        "leader",
        "question",
        "scope",
        "task",
        "until",
        "waiting",
    )

    def __init__(self, question: Question | None, until: float, audience: Audience) -> None:
        self.question = question
        self.until = until
        self.audience = audience
        self.began = math.inf
        self.begun = 1
        self.landed = asyncio.Event()
        self.leader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scope = anyio.CancelScope()
        self.waiting = 0
        self.task: asyncio.Task[Answer[Any]] | None = None

    async def fly(self, call: Coroutine[Any, Any, Answer[Any]]) -> Answer[Any]:
        with self.scope:  # and no plain cancellation: what is shielded inside stays shielded
            return await call
        return CALLED_OFF

    def release_leader(self) -> None:
        if not self.leader.done():
            self.leader.set_result(None)

    def answer(self) -> Answer[Any]:
        """Raises what went wrong inside the engine; what a source does wrong is an answer."""
        if self.task is None or not self.landed.is_set() or self.task.cancelled():
            return CALLED_OFF
        return self.task.result()


class Flights:
    """All of one process. ``patience_s`` is how long the last to leave waits for a cancelled one to end."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._latest: dict[Question, Flight] = {}
        self._all: set[Flight] = set()

    def __len__(self) -> int:
        """How many are under way, those that were cancelled and have not ended included."""
        return len(self._all)

    def latest(self, question: Question | None, not_before: float) -> Flight | None:
        flight = self._latest.get(question) if question is not None else None
        if flight is None or flight.scope.cancel_called or flight.began < not_before:
            return None
        return flight

    async def lead(self, flight: Flight, call: Coroutine[Any, Any, Answer[Any]]) -> Answer[Any]:
        """Its answer, or `CALLED_OFF` when ``flight.until`` has come before that."""
        if flight.question is not None:
            self._latest[flight.question] = flight
        self._all.add(flight)
        flight.task = asyncio.create_task(flight.fly(call))
        flight.task.add_done_callback(lambda _: self._land(flight))
        over = asyncio.get_running_loop().call_at(flight.until, flight.release_leader)
        flight.waiting += 1
        try:
            await flight.leader
        finally:
            over.cancel()
            await self._leave(flight)
        return flight.answer()

    async def join(self, flight: Flight, until: float) -> Answer[Any]:
        """Its answer, or `CALLED_OFF` when ``until`` has come before that."""
        flight.waiting += 1
        try:
            with anyio.move_on_after(until - time.monotonic()):
                await flight.landed.wait()
        finally:
            await self._leave(flight)
        return flight.answer()

    async def _leave(self, flight: Flight) -> None:
        flight.waiting -= 1
        if not flight.waiting and not flight.landed.is_set():
            await self._call_off(flight)

    def _land(self, flight: Flight) -> None:
        self._all.discard(flight)
        self._close(flight)
        flight.landed.set()
        flight.release_leader()

    def _close(self, flight: Flight) -> None:
        if flight.question is not None and self._latest.get(flight.question) is flight:
            del self._latest[flight.question]

    async def _call_off(self, *flights: Flight) -> None:
        for flight in flights:
            self._close(flight)
            flight.scope.cancel()
        with anyio.move_on_after(self._patience_s, shield=True) as patience:
            for flight in flights:
                await flight.landed.wait()
        if patience.cancelled_caught:
            log.error("a reading did not end within %s s of being cancelled", self._patience_s)

    async def aclose(self) -> None:
        await self._call_off(*self._all)
