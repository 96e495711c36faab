"""From what a source answered to the typed item that the packet keeps; what cannot be kept becomes a typed failure."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from coordinator import telemetry
from coordinator.core.canonical import InvalidJson, JsonValue, check
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
from coordinator.core.money import Money
from coordinator.core.view import timestamp
from coordinator.engine.run import Engine, Reading, Run
from coordinator.store.records import Locked


def reading_of(
    engine: Engine,
    run: Run,
    declared: Evidence[Any, Any],
    answer: Answer[Any],
    began: float,
    attempts: int,
    then: Item | None,
) -> Reading:
    match answer:
        case Found() | Absent() | Failed() | Unchanged() if not _in_currency(run, answer.cost):
            error = ItemError(
                "wrong-currency", "the cost is in another currency than this decision type reserves"
            )
            return no_answer(declared, "failed", began, attempts, error)
        case Found():
            return _found(engine, declared, answer, began, attempts)
        case Absent(revision, cost):
            revision = revision and clean_text(revision)
            return no_answer(declared, "absent", began, attempts, revision=revision, cost=cost)
        case Unchanged() if then is not None:
            return Reading(then, began)
        case Unchanged():
            error = ItemError(
                "unexpected-unchanged",
                "the source answered 'unchanged' to a reading that was not conditional",
            )
            return no_answer(declared, "failed", began, attempts, error)
        case Failed(code, message):
            error = ItemError(clean_text(code), clean_text(message))
            return no_answer(declared, "failed", began, attempts, error, cost=answer.cost)


def _in_currency(run: Run, cost: Money | None) -> bool:
    return cost is None or not run.type.reserves or cost.currency == run.type.reserves[0].currency


def _found(
    engine: Engine, declared: Evidence[Any, Any], found: Found[Any], began: float, attempts: int
) -> Reading:
    try:
        value: JsonValue = msgspec.to_builtins(found.value, str_keys=True)
        check(value)
        msgspec.convert(value, declared.source.returns)
    except (
        InvalidJson,
        msgspec.ValidationError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        return no_answer(
            declared, "failed", began, attempts, ItemError("malformed-value", clean_text(str(error)))
        )
    if len(msgspec.json.encode(value)) > engine.settings.max_evidence_bytes:
        limit = engine.settings.max_evidence_bytes
        return no_answer(
            declared, "failed", began, attempts, ItemError("value-too-large", f"more than {limit} bytes")
        )
    item = _item(
        declared,
        "found",
        began,
        attempts,
        value=value,
        revision=found.revision and clean_text(found.revision),
        cost=found.cost,
        confidence=found.confidence,
        interval=found.interval,
    )
    return Reading(item, began - found.age_ms / 1000)


def no_answer(
    declared: Evidence[Any, Any],
    state: State,
    began: float,
    attempts: int,
    error: ItemError | None = None,
    revision: str | None = None,
    cost: Money | None = None,
) -> Reading:
    item = _item(declared, state, began, attempts, error=error, revision=revision, cost=cost)
    return Reading(item, began)


def _item(declared: Evidence[Any, Any], state: State, began: float, attempts: int, **known: Any) -> Item:
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
        reading = _found(engine, declared, found, began, 1)
    return Reading(reading.item, began, (key, locked))
