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
from collections.abc import Mapping
from typing import Any

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.evidence import (
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
    then: Item | None = None,
    not_before: float = 0.0,
    reuse: bool = False,
) -> Reading:
    """One reading under its deadline. ``then`` makes it a re-reading: conditional on that item's revision, and the source may
    answer that nothing changed. A call that is shared has to begin after ``not_before``, on this process's monotonic clock. ``reuse``
    allows for what was kept."""
    began = time.monotonic()
    lacking = next((name for name in declared.after if have[name].item.state != "found"), None)
    if lacking is not None:
        return no_answer(
            declared, "skipped", began, 0, ItemError("dependency-missing", f"{lacking} is not there")
        )
    if run.left_out(declared.name):
        unpaid = ItemError("budget-exhausted", "no budget had room for what it may cost")
        return no_answer(declared, "skipped", began, 0, unpaid)
    limit = min(declared.deadline_ms / 1000, max(0.0, run.ends_at - began))
    cleanups = Cleanups(declared.name, engine.settings.cleanup_ms / 1000)
    audience = Audience(engine.settings, declared.source.name)
    reserved = ("evidence", declared.name)
    with telemetry.span("coordinator.read", traceparent, evidence_name=declared.name) as inside:
        request = ReadRequest(
            tenant=str(run.tenant),
            input=run.input,
            evidence={name: have[name].item.value for name in declared.after},
            record_kind=run.record_key[0] if run.record_key else "",
            record_id=run.record_key[1] if run.record_key else "",
            if_revision=then.revision if then else None,
            timeout_s=limit + GRACE_S,
            traceparent=inside,
            on_cancel=cleanups.append,
            emit=audience,
            reservation=str(run.held[reserved]) if run.held and reserved in run.held else None,
        )
        if declared.local is not None:
            with anyio.move_on_after(limit):
                return await _read_record(engine, run, declared, declared.local, request, began)
            return no_answer(declared, "timed_out", began, 1)
        reader = _Reader(engine, run, declared, request, cleanups, audience, began, began + limit, not_before)
        if reuse and (known := reader.known()) is not None:
            return known
        with anyio.move_on_after(limit):
            return await reader.read(then)
        return no_answer(declared, "timed_out", began, reader.attempts.count)


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
        "not_before",
        "parts",
        "question",
        "request",
        "run",
        "shared",
        "until",
    )

    def __init__(
        self,
        engine: Engine,
        run: Run,
        declared: Evidence[Any, Any],
        request: ReadRequest,
        cleanups: Cleanups,
        audience: Audience,
        began: float,
        until: float,
        not_before: float,
    ) -> None:
        self.engine = engine
        self.run = run
        self.declared = declared
        self.request = request
        self.cleanups = cleanups
        self.audience = audience
        self.began = began
        self.until = until
        self.not_before = not_before
        self.attempts = Attempts(declared.attempts)
        self.parts = Parts(engine.settings, run.events, declared, lambda: self.attempts.count)
        self.question = run.type.questions[declared.name](request)
        asked = (self.question, request.if_revision, declared.attempt_ms)
        self.asked = None if self.question is None else asked
        self.shared = False
        self.calls = 0
        """Begun by this reader, and paid by its decision."""
        self.called = began
        """When the call began that gave the last answer."""

    def known(self) -> Reading | None:
        """What is kept, without asking anybody."""
        freshness = self.declared.freshness
        if not isinstance(freshness, MaxAge):
            return None
        kept = self.engine.kept.fresh(self.question, freshness.max_age_ms)
        return None if kept is None else reused(self.declared, *kept)

    async def read(self, then: Item | None) -> Reading:
        answer = await self.attempts.run(self._ask)
        if answer is CALLED_OFF and time.monotonic() >= self.until:
            return no_answer(self.declared, "timed_out", self.began, self.attempts.count)
        if answer is BEYOND_CEILING:
            self.run.cost_limited = True
            error = ItemError(BEYOND_CEILING.code, BEYOND_CEILING.message)
            return no_answer(self.declared, "skipped", self.began, self.attempts.count - 1, error)
        if self.shared and answer.cost is not None:
            answer = msgspec.structs.replace(answer, cost=None)
        made = Made(self.began, self.called, self.attempts.count, "shared" if self.shared else "own")
        reading = reading_of(self.engine, self.run, self.declared, answer, made, then)
        if isinstance(self.declared.freshness, MaxAge):
            self.engine.kept.keep(self.question, reading.item, reading.began)
        return reading

    async def _ask(self) -> Answer[Any]:
        """An answer from whoever asks already, or of one's own. What fails only because the limit of whoever began it was shorter
        than ours, is asked again."""
        flights = self.engine.flights
        while True:
            flight = flights.latest(self.asked, self.not_before)
            self.shared = flight is not None
            if flight is None and self.calls == 0 and not self.run.affords(self.declared.reserves):
                return BEYOND_CEILING
            flight = flight or self._begin()
            flight.audience.join(self.parts)
            try:
                answer = await flights.landing(flight, self.until)
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
        if self.calls > 1:
            audience = Audience(self.engine.settings, self.declared.source.name)
            self.request = dataclasses.replace(self.request, emit=audience)
            return audience
        return self.audience

    def _begin(self) -> Flight:
        self.calls += 1
        self.run.calls[self.declared.name] += 1
        self.cleanups.clear()
        flight = Flight(self.asked, self.until, self._audience())
        asked = call(self.engine, self.run, self.declared, self.request, self.cleanups, flight)
        self.engine.flights.begin(flight, asked)
        return flight


async def _read_record(
    engine: Engine,
    run: Run,
    declared: Evidence[Any, Any],
    source: LocalSource[Any],
    request: ReadRequest,
    began: float,
) -> Reading:
    try:
        key = (source.record_kind, source.record_id(request))
    except ValueError as error:
        return no_answer(declared, "failed", began, 1, ItemError("no-address", clean_text(str(error))))
    async with engine.boundary.database.transaction(run.tenant) as connection:
        locked = (await read_records(connection, run.tenant, {key})).get(key, Locked(0, None))
    return record_reading(engine, declared, key, locked, began)
