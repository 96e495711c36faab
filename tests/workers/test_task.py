"""A task as its handler sees it: what it is told, typed where it asks for that, and how long it has."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.core.task import TaskGiven
from coordinator.worker.task import Task


class Topic(msgspec.Struct):
    topic: str


def task(request: bytes, remaining_ms: int = 60_000) -> Task:
    given = TaskGiven(
        id="t-1",
        fencing_token=1,
        source="research",
        capability="research",
        request=msgspec.Raw(request),
        deadline="2026-01-01T00:00:00Z",
        remaining_ms=remaining_ms,
        attempt=2,
        traceparent="",
    )
    return Task(given, lambda lines: None)


TOLD = b'{"input":{"topic":"steel"},"evidence":{"site":{"hours":3}},"record":{"kind":"proposal","id":"p-1"}}'


def test_a_handler_is_told_input_evidence_and_record() -> None:
    told = task(TOLD)
    assert told.input == {"topic": "steel"}
    assert told.evidence == {"site": {"hours": 3}}
    assert told.record == {"kind": "proposal", "id": "p-1"}
    assert (told.attempt, told.request) == (2, TOLD)


def test_the_input_comes_as_a_struct_if_it_fits_one() -> None:
    assert task(TOLD).input_as(Topic) == Topic("steel")
    with pytest.raises(msgspec.ValidationError):
        task(b'{"input":{"topic":7},"evidence":{},"record":null}').input_as(Topic)


def test_a_deadline_that_has_passed_leaves_no_time_and_can_be_put_off() -> None:
    late = task(TOLD, remaining_ms=-5_000)
    assert late.remaining_s() == 0.0
    late.put_off(60_000)
    assert 0.0 < late.remaining_s() <= 60.0
