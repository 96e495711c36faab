"""Call: one call of a source, inside its provider's slot; or one task of a remote worker, whose capacity is the limit there.

Whatever ends it (its answer, what it raised, its own ceiling, a cancellation) the run that pays for it knows what it cost or that
this is not known, the slot is given back, and the clean-ups have run if it was cut off. What the source says is checked: an adapter
is not obliged to check its types.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.evidence import (
    MAX_UNITS,
    Absent,
    Answer,
    Evidence,
    Failed,
    Found,
    ReadRequest,
    Source,
    Unchanged,
    clean_text,
)
from coordinator.engine.cleanups import Cleanups
from coordinator.engine.flights import Flight
from coordinator.engine.run import Engine, Run
from coordinator.engine.tasks import Asker
from coordinator.errors import RateLimited
from coordinator.logs import THEIR_FAULTS, description_of

CUT_OFF = Failed("call-too-long", "the call took longer than attempt_ms and was cancelled", retryable=True)


async def call(
    engine: Engine,
    run: Run,
    declared: Evidence[Any, Any],
    request: ReadRequest,
    cleanups: Cleanups,
    flight: Flight,
) -> Answer[Any]:
    """One call, at the cost of ``run``, which counted it when it asked for it. The wait for the slot does not count against the
    call's own ceiling; a call that never got its slot, or whose turn would come too late, never began, and is not counted."""
    try:
        if declared.child is not None:
            flight.began = time.monotonic()
            child = partial(engine.children.read, run, declared, declared.child, request, flight.until)
            return await _under_ceiling(run, declared, child, cleanups)
        if declared.by_worker is not None:
            flight.began = time.monotonic()
            had_before = partial(run.bill_others, declared.name)
            asker = Asker(run.tenant, run.id, run.token, request.traceparent, flight.until, had_before)
            ask = partial(engine.tasks.read, asker, declared, declared.by_worker, request)
            try:
                return await _under_ceiling(run, declared, ask, cleanups, lambda: not asker.begun)
            finally:
                flight.begun = asker.begun
        async with engine.providers.of(declared.remote.provider).slot(
            declared.units, until=flight.until
        ) as slot:
            flight.began = time.monotonic()
            answer = await _under_ceiling(run, declared, partial(_answer, declared.remote, request), cleanups)
            if answer is CUT_OFF:
                slot.give_up()
            else:
                slot.used(answer.units)
            return answer
    except RateLimited as error:
        return Failed(error.code, str(error))
    finally:
        if flight.began == math.inf:
            run.calls[declared.name] -= 1


async def _under_ceiling(
    run: Run,
    declared: Evidence[Any, Any],
    ask: Callable[[], Awaitable[Answer[Any]]],
    cleanups: Cleanups,
    never_begun: Callable[[], bool] = lambda: False,
) -> Answer[Any]:
    """``never_begun``, once it is over: no worker ever had the task, so that nothing can have been spent."""
    answer: Answer[Any] | None = None
    try:
        if declared.attempt_ms is None:
            answer = await ask()
        else:
            with anyio.move_on_after(declared.attempt_ms / 1000):
                answer = await ask()
    except anyio.get_cancelled_exc_class():
        await cleanups.run()
        raise
    finally:
        if never_begun():
            run.calls[declared.name] -= 1
        else:
            run.bill(declared.name, answer.cost if answer else None)
    if answer is not None:
        return answer
    telemetry.CALLS_CUT_OFF.labels(declared.source.name).inc()
    await cleanups.run()
    return CUT_OFF


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
