"""Read: one reading of one source, under its deadline, inside its provider's limits.

A failure that says that a repeat may help is repeated, and the pause before it holds no slot. When the reading is cancelled, by its
deadline or from outside, the clean-ups that the source registered run, bounded in time. What comes back is always an item.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import anyio
import msgspec
import tenacity

from coordinator import telemetry
from coordinator.core.evidence import (
    MAX_UNITS,
    Absent,
    Answer,
    Evidence,
    Failed,
    Found,
    Item,
    ItemError,
    LocalSource,
    ReadRequest,
    Source,
    Unchanged,
    clean_text,
)
from coordinator.engine.items import no_answer, reading_of, record_reading
from coordinator.engine.parts import Parts
from coordinator.engine.run import Engine, Reading, Run
from coordinator.engine.tasks import NEVER_BEGUN, Asker
from coordinator.errors import RateLimited
from coordinator.logs import THEIR_FAULTS, description_of, traceback_of
from coordinator.store.records import Locked, read_records

log = logging.getLogger(__name__)
_JITTER = tenacity.wait_random_exponential(multiplier=0.05, max=5)
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
) -> Reading:
    """One reading under its deadline. ``then`` makes it a re-reading: conditional on that item's revision, and the source may
    answer that nothing changed."""
    began = time.monotonic()
    lacking = next((name for name in declared.after if have[name].item.state != "found"), None)
    if lacking is not None:
        return no_answer(
            declared, "skipped", began, 0, ItemError("dependency-missing", f"{lacking} is not there")
        )
    if run.left_out(declared.name):
        unpaid = ItemError("budget-exhausted", "no budget had room for what it may cost")
        return no_answer(declared, "skipped", began, 0, unpaid)
    cleanups = _Cleanups(declared.name, engine.settings.cleanup_ms / 1000)
    attempts = _Attempts(declared.attempts)
    limit = min(declared.deadline_ms / 1000, max(0.0, run.ends_at - began))
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
            emit=Parts(engine.settings, run.events, declared, lambda: attempts.count),
            reservation=str(run.held[reserved]) if run.held and reserved in run.held else None,
        )
        with anyio.move_on_after(limit):
            try:
                if declared.local is not None:
                    return await _read_record(engine, run, declared, declared.local, request, began)
                call = partial(_call, engine, run, declared, request)
                if declared.by_worker is not None:
                    call = partial(_by_worker, engine, run, declared, request, began + limit)
                answer = await attempts.run(call)
                return reading_of(engine, run, declared, answer, began, attempts.count, then)
            except anyio.get_cancelled_exc_class():
                await cleanups.run()
                raise
        return no_answer(declared, "timed_out", began, attempts.count)


async def _call(engine: Engine, run: Run, declared: Evidence[Any, Any], request: ReadRequest) -> Answer[Any]:
    """One call, inside its provider's slot. Whatever ends it, the run knows what it cost, or that this is not known. A call whose turn
    would come too late is not made, and costs nothing."""
    try:
        async with engine.providers.of(declared.remote.provider).slot(declared.units) as call:
            answer: Answer[Any] | None = None
            try:
                answer = await _answer(declared.remote, request)
                call.used(answer.units)
                return answer
            finally:
                run.bill(declared.name, answer.cost if answer else None)
    except RateLimited as error:
        return Failed(error.code, str(error))


async def _by_worker(
    engine: Engine, run: Run, declared: Evidence[Any, Any], request: ReadRequest, until: float
) -> Answer[Any]:
    """One task of a remote worker; its capacity is the limit, and no provider's slot is held. Where no worker ever had the task,
    nothing can have been spent."""
    assert declared.by_worker is not None
    asker = Asker(run.tenant, run.id, run.token, request.traceparent, until)
    answer: Answer[Any] | None = None
    try:
        answer = await engine.tasks.read(asker, declared, declared.by_worker, request)
        return answer
    finally:
        if not isinstance(answer, Failed) or answer.code not in NEVER_BEGUN:
            run.bill(declared.name, answer.cost if answer else None)


async def _answer(source: Source[Any], request: ReadRequest) -> Answer[Any]:
    """What the source said, or a typed failure where it raised or said something that is no answer."""
    try:
        return _well_formed(await source.read(request))
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        return Failed(
            "source-raised", "CancelledError: something inside the source was cancelled, not the reading"
        )
    except THEIR_FAULTS as error:  # the boundary to adapters; recorded as a typed failure
        return Failed("source-raised", description_of(error))


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_ABOUT: Any = Found[None]


def _well_formed(answer: object) -> Answer[Any]:
    """An adapter is not obliged to check its types; what it says beside the value is checked here, the value in `_found`."""
    try:
        match answer:
            case Found(age_ms=age_ms, confidence=confidence, interval=interval):
                msgspec.convert(msgspec.to_builtins(msgspec.structs.replace(answer, value=None)), _ABOUT)
                if (
                    age_ms < 0
                    or not 0 <= (confidence or 0) <= 1
                    or not all(map(math.isfinite, interval or ()))
                ):
                    return Failed("malformed-value", "age_ms, confidence or interval is out of range")
            case Absent() | Failed() | Unchanged():
                msgspec.convert(msgspec.to_builtins(answer), type(answer))
            case _:
                return Failed("malformed-answer", clean_text(f"not an answer of a source: {answer!r}"))
        if answer.cost is not None and answer.cost.amount_minor < 0:
            return Failed("malformed-answer", "the cost is negative")
        if not 0 <= (answer.units or 0) <= MAX_UNITS:
            return Failed("malformed-answer", f"units is not within 0..{MAX_UNITS}")
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        code = "malformed-value" if isinstance(answer, Found) else "malformed-answer"
        return Failed(code, clean_text(str(error)))
    return answer


class _Attempts:
    """Up to ``limit`` calls, while the answer is a failure that says a repeat may help. The pause between them holds no slot."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0

    async def run(self, call: Callable[[], Awaitable[Answer[Any]]]) -> Answer[Any]:
        answer = await self._once(call)
        if self.limit == 1 or not _worth_repeating(answer):
            return answer
        known = [answer]

        async def attempt() -> Answer[Any]:
            return known.pop() if known else await self._once(call)

        repeated = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_result(_worth_repeating),
            stop=tenacity.stop_after_attempt(self.limit),
            wait=_pause,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else answer,
        )
        last: Answer[Any] = await repeated(attempt)
        return last

    async def _once(self, call: Callable[[], Awaitable[Answer[Any]]]) -> Answer[Any]:
        self.count += 1
        return await call()


def _pause(state: tenacity.RetryCallState) -> float:
    """What the provider asked for, else exponential with full jitter; in seconds."""
    answer = state.outcome.result() if state.outcome else None
    if isinstance(answer, Failed) and answer.retry_after_ms:
        return answer.retry_after_ms / 1000
    return _JITTER(state)


def _worth_repeating(answer: Answer[Any]) -> bool:
    return isinstance(answer, Failed) and answer.retryable


class _Cleanups(list[Callable[[], Awaitable[None]]]):
    """What a source registered to be undone if its reading is cancelled. Bounded in time; a failing one is logged and the rest
    still run."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._name = name
        self._seconds = seconds

    async def run(self) -> None:
        with anyio.move_on_after(self._seconds, shield=True) as scope:
            for cleanup in reversed(self):
                try:
                    await cleanup()
                except THEIR_FAULTS as error:  # the boundary to adapters; logged
                    log.error("a clean-up of evidence %s failed: %s", self._name, traceback_of(error))
        if scope.cancelled_caught:
            log.error(
                "a clean-up of evidence %s took longer than %s s and was cancelled", self._name, self._seconds
            )


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
