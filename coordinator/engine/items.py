"""From what a source answered to the typed item that the packet keeps; what cannot be kept becomes a typed failure."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from coordinator import telemetry
from coordinator.core.evidence import (
    Absent,
    Answer,
    Evidence,
    Failed,
    Found,
    Item,
    ItemError,
    State,
    Unchanged,
    clean_text,
)
from coordinator.core.fit import Misfit, fitted
from coordinator.core.money import Money
from coordinator.core.view import timestamp
from coordinator.engine.call import CUT_OFF
from coordinator.engine.run import Engine, Reading, Run
from coordinator.store.records import Locked


class Made(NamedTuple):
    """How a reading was made: ``began`` is when it was asked for, ``called`` when the call began that answered it, ``attempts`` how
    often it was begun. Ages count from ``called``: also where another decision's call answers that began earlier."""

    began: float
    called: float
    attempts: int
    how: str = "own"


def reading_of(
    engine: Engine,
    run: Run,
    declared: Evidence[Any, Any],
    answer: Answer[Any],
    made: Made,
    then: Item | None,
) -> Reading:
    if made.how != "own":
        telemetry.READINGS_SAVED.labels(declared.source.name, made.how).inc()
    began, called, attempts, how = made
    match answer:
        case Found() | Absent() | Failed() | Unchanged() if not _in_currency(run, answer.cost):
            error = ItemError(
                "wrong-currency", "the cost is in another currency than this decision type reserves"
            )
            return no_answer(declared, "failed", began, attempts, error)
        case Found():
            return _found(engine, declared, answer, made)
        case Absent(revision, cost):
            revision = revision and clean_text(revision)
            absent = no_answer(declared, "absent", began, attempts, revision=revision, cost=cost, how=how)
            return Reading(absent.item, called)
        case Unchanged() if then is not None:
            return Reading(then, called)
        case Unchanged():
            error = ItemError(
                "unexpected-unchanged",
                "the source answered 'unchanged' to a reading that was not conditional",
            )
            return no_answer(declared, "failed", began, attempts, error, how=how)
        case Failed(code, message):
            state: State = "timed_out" if answer is CUT_OFF else "failed"
            error = ItemError(clean_text(code), clean_text(message))
            return no_answer(declared, state, began, attempts, error, cost=answer.cost, how=how)


def _in_currency(run: Run, cost: Money | None) -> bool:
    return cost is None or not run.type.reserves or cost.currency == run.type.reserves[0].currency


def _found(engine: Engine, declared: Evidence[Any, Any], found: Found[Any], made: Made) -> Reading:
    began, called, attempts, how = made
    try:
        value = fitted(found.value, declared.source.returns)
    except Misfit as error:
        return no_answer(
            declared, "failed", began, attempts, ItemError("malformed-value", clean_text(str(error)))
        )
    if len(msgspec.json.encode(value)) > engine.settings.max_evidence_bytes:
        limit = engine.settings.max_evidence_bytes
        return no_answer(
            declared, "failed", began, attempts, ItemError("value-too-large", f"more than {limit} bytes")
        )
    item = item_of(
        declared,
        "found",
        began,
        attempts,
        value=value,
        revision=found.revision and clean_text(found.revision),
        cost=found.cost,
        confidence=found.confidence,
        interval=found.interval,
        reading=how,
    )
    return Reading(item, called - found.age_ms / 1000)


def reused(declared: Evidence[Any, Any], kept: Item, began: float) -> Reading:
    """What was found a while ago, when it was observed then, for another decision or another evidence. It costs this one nothing."""
    telemetry.READINGS.labels(declared.source.name, "found").inc()
    telemetry.READINGS_SAVED.labels(declared.source.name, "reused").inc()
    item = msgspec.structs.replace(
        kept,
        name=declared.name,
        freshness=declared.freshness.as_json(),
        elapsed_ms=0,
        attempts=0,
        cost=None,
        reading="reused",
    )
    return Reading(item, began)


def no_answer(
    declared: Evidence[Any, Any],
    state: State,
    began: float,
    attempts: int,
    error: ItemError | None = None,
    revision: str | None = None,
    cost: Money | None = None,
    how: str = "own",
) -> Reading:
    item = item_of(declared, state, began, attempts, error=error, revision=revision, cost=cost, reading=how)
    return Reading(item, began)


def item_of(declared: Evidence[Any, Any], state: State, began: float, attempts: int, **known: Any) -> Item:
    """An item that is made now, of a reading that was asked for when it ``began``."""
    telemetry.READINGS.labels(declared.source.name, state).inc()
    return Item(
        name=declared.name,
        source=declared.source.name,
        state=state,
        observed_at=timestamp(datetime.now(UTC)),
        freshness=declared.freshness.as_json(),
        elapsed_ms=round((time.monotonic() - began) * 1000),
        attempts=attempts,
        **known,
    )


def record_reading(
    engine: Engine, declared: Evidence[Any, Any], key: tuple[str, str], locked: Locked, began: float
) -> Reading:
    """The reading of a record whose version and data are known."""
    if locked.data is None:
        reading = no_answer(declared, "absent", began, 1, revision="0")
    else:
        found: Found[Any] = Found(msgspec.json.decode(locked.data), revision=str(locked.version))
        reading = _found(engine, declared, found, Made(began, began, 1))
    return Reading(reading.item, began, (key, locked))
