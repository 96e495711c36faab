"""Read: one reading of one source, under its deadline, inside its provider's limits.

    kept        `MaxAge` evidence may be answered by what was found a short while ago (`kept.py`)       reading: "reused"
    in flight   what another decision asks right now is asked once (`flights.py`)                       reading: "shared"
    own         else a call of its own (`call.py`), repeated where that may help (`attempts.py`)        reading: "own"

Only a call of one's own costs anything. A reading that confirms an earlier one joins no flight that began before that one had
ended, and takes nothing that was kept: a confirmation is a real one. What comes back is always an item.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.canonical import JsonValue
from coordinator.core.evidence import (
    EACH,
    Answer,
    Evidence,
    Failed,
    Item,
    ItemError,
    LocalSource,
    MaxAge,
    ReadRequest,
    clean_text,
)
from coordinator.engine.attempts import Attempts
from coordinator.engine.call import call
from coordinator.engine.cleanups import Cleanups
from coordinator.engine.condition import why_not
from coordinator.engine.each import read_each
from coordinator.engine.flights import CALLED_OFF, Flight
from coordinator.engine.items import Made, no_answer, reading_of, record_reading, reused
from coordinator.engine.parts import Audience, Parts
from coordinator.engine.run import Engine, Reading, Run
from coordinator.errors import RateLimited
from coordinator.store.records import Locked, read_records

BEYOND_CEILING = Failed("cost-limit", "what it may cost does not fit in the decision's ceiling any more")
GRACE_S = 1.0
"""A source's own limit comes this much later than our deadline, so that running out of time is one thing: `timed_out`."""


async def read(
    engine: Engine,
    run: Run,
    declared: Evidence[Any, Any],
    have: Mapping[str, Reading],
    *,
    traceparent: str,
    then: Reading | None = None,
    not_before: float = 0.0,
    reuse: bool = False,
) -> Reading:
    """One reading under its deadline. ``then`` makes it a re-reading: conditional on that one's revision, and the source may
    answer that nothing changed. A call that is shared has to begin after ``not_before``, on this process's monotonic clock.
    ``reuse`` allows for what was kept."""
    began = time.monotonic()
    if (skipped := why_not(run, declared, have)) is not None:
        return no_answer(declared, skipped[0], began, 0, skipped[1])
    limit = min(declared.deadline_ms / 1000, max(0.0, run.ends_at - began))
    evidence = {name: have[name].item.value for name in declared.after}
    with telemetry.span("coordinator.read", traceparent, evidence_name=declared.name) as inside:
        reader = _Reader(engine, run, declared, inside, began, limit, not_before, reuse)
        if declared.for_each is None:
            return await reader.read(evidence, then.item if then else None)
        if not run.affords(declared.reserves):
            return beyond_ceiling(run, declared, began, 0)

        async def read_one(member: JsonValue, known: Item | None) -> Reading:
            one = _Reader(engine, run, declared, inside, began, limit, not_before, reuse)
            one.paid = True  # what the whole may cost is known to fit
            return await one.read({**evidence, EACH: member}, known)

        request = reader.request(evidence, None)
        return await read_each(engine, declared, request, read_one, then)


def beyond_ceiling(run: Run, declared: Evidence[Any, Any], began: float, attempts: int) -> Reading:
    run.cost_limited = True
    error = ItemError(BEYOND_CEILING.code, BEYOND_CEILING.message)
    return no_answer(declared, "skipped", began, attempts, error)


class _Reader:
    """One who asks a source, and may find that somebody else has asked or is asking the same."""

    __slots__ = (
        "asked",
        "attempts",
        "audience",
        "began",
        "called",
        "calls",
        "cleanups",
        "declared",
        "engine",
        "flown",
        "inside",
        "limit",
        "not_before",
        "paid",
        "parts",
        "question",
        "reuse",
        "run",
        "shared",
        "told",
        "until",
    )

    def __init__(
        self,
        engine: Engine,
        run: Run,
        declared: Evidence[Any, Any],
        inside: str,
        began: float,
        limit: float,
        not_before: float,
        reuse: bool,
    ) -> None:
        self.engine = engine
        self.run = run
        self.declared = declared
        self.inside = inside
        self.began = began
        self.limit = limit
        self.until = began + limit
        self.not_before = not_before
        self.reuse = reuse
        self.cleanups = Cleanups(declared.name, engine.settings.cleanup_ms / 1000)
        self.attempts = Attempts(declared.attempts, self.until)
        self.flown: dict[int, Flight] = {}
        """The flight that answered each attempt, or was to."""
        self.shared = False
        self.audience = Audience(engine.settings, declared.source.name)
        self.parts = Parts(engine.settings, run.events, declared, lambda: self.attempts.count)
        self.paid = False
        """Whether what its first call may cost was found to fit."""
        self.calls = 0
        self.called = began
        """When the call began that gave the last answer."""

    def request(self, evidence: Mapping[str, JsonValue], then: Item | None) -> ReadRequest:
        run, reserved = self.run, ("evidence", self.declared.name)
        return ReadRequest(
            tenant=str(run.tenant),
            input=run.input,
            evidence=evidence,
            record_kind=run.record_key[0] if run.record_key else "",
            record_id=run.record_key[1] if run.record_key else "",
            if_revision=then.revision if then else None,
            timeout_s=self.limit + GRACE_S,
            traceparent=self.inside,
            on_cancel=self.cleanups.append,
            emit=self.audience,
            reservation=str(run.held[reserved]) if run.held and reserved in run.held else None,
        )

    async def read(self, evidence: Mapping[str, JsonValue], then: Item | None) -> Reading:
        self.told = self.request(evidence, then)
        if self.declared.local is not None:
            with anyio.move_on_after(self.limit):
                return await _read_record(
                    self.engine, self.run, self.declared, self.declared.local, self.told
                )
            return no_answer(self.declared, "timed_out", self.began, 1)
        self.question = self.run.type.questions[self.declared.name](self.told)
        asked = (self.question, self.told.if_revision, self.declared.attempt_ms)
        self.asked = None if self.question is None else asked
        if self.reuse and (known := self._known()) is not None:
            return known
        return await self._called(then)

    def _known(self) -> Reading | None:
        """What is kept, without asking anybody."""
        freshness = self.declared.freshness
        if not isinstance(freshness, MaxAge):
            return None
        kept = self.engine.kept.fresh(self.question, freshness.max_age_ms)
        return None if kept is None else reused(self.declared, *kept)

    async def _called(self, then: Item | None) -> Reading:
        answer = await self.attempts.run(self._ask)
        if answer is None or (answer is CALLED_OFF and time.monotonic() >= self.until):
            return no_answer(self.declared, "timed_out", self.began, self._begun())
        if answer is BEYOND_CEILING:
            return beyond_ceiling(self.run, self.declared, self.began, self._begun())
        if self.shared and answer.cost is not None:
            answer = msgspec.structs.replace(answer, cost=None)
        made = Made(self.began, self.called, self._begun(), "shared" if self.shared else "own")
        reading = reading_of(self.engine, self.run, self.declared, answer, made, then)
        if isinstance(self.declared.freshness, MaxAge):
            self.engine.kept.keep(self.question, reading.item, reading.began)
        return reading

    def _begun(self) -> int:
        """How often what was asked for was begun, over all attempts."""
        return sum(flight.begun for flight in self.flown.values())

    async def _ask(self) -> Answer[Any]:
        """An answer from whoever asks already, or of one's own. What fails only because the limit of whoever began it was shorter
        than ours, is asked again."""
        flights = self.engine.flights
        while True:
            flight = flights.latest(self.asked, self.not_before)
            self.shared = flight is not None
            if flight is None and not (self.paid or self.run.affords(self.declared.reserves)):
                return BEYOND_CEILING
            flight = flight or Flight(self.asked, self.until, self._audience())
            self.flown[self.attempts.count] = flight
            flight.audience.join(self.parts)
            try:
                if self.shared:
                    answer = await flights.join(flight, self.until)
                else:
                    answer = await flights.lead(flight, self._call(flight))
            finally:
                flight.audience.leave(self.parts)
            self.called = min(flight.began, time.monotonic())
            if not (self.shared and self._cut_short(flight, answer)):
                return answer

    def _cut_short(self, flight: Flight, answer: Answer[Any]) -> bool:
        """Whether it failed for want of time, and there is some left here."""
        now = time.monotonic()
        limited = now >= flight.until or (isinstance(answer, Failed) and answer.code == RateLimited.code)
        return isinstance(answer, Failed) and limited and flight.until < self.until and now < self.until

    def _audience(self) -> Audience:
        """Each call has one of its own; that of the first came with the request."""
        if self.calls > 0:
            self.audience = Audience(self.engine.settings, self.declared.source.name)
            self.told = dataclasses.replace(self.told, emit=self.audience)
        return self.audience

    def _call(self, flight: Flight) -> Coroutine[Any, Any, Answer[Any]]:
        self.calls += 1
        self.paid = True
        self.run.calls[self.declared.name] += 1
        self.cleanups.clear()
        return call(self.engine, self.run, self.declared, self.told, self.cleanups, flight)


async def _read_record(
    engine: Engine, run: Run, declared: Evidence[Any, Any], source: LocalSource[Any], request: ReadRequest
) -> Reading:
    began = time.monotonic()
    try:
        key = (source.record_kind, source.record_id(request))
    except ValueError as error:
        return no_answer(declared, "failed", began, 1, ItemError("no-address", clean_text(str(error))))
    async with engine.boundary.database.transaction(run.tenant) as connection:
        locked = (await read_records(connection, run.tenant, {key})).get(key, Locked(0, None))
    return record_reading(engine, declared, key, locked, began)
