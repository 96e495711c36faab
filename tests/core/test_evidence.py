"""What a decision type may ask of a source, and texts that can be stored anywhere."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar, Union

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.evidence import (
    Decisive,
    Evidence,
    Freshness,
    Item,
    LocalSource,
    MaxAge,
    ReadRequest,
    Snapshot,
    clean_text,
    is_struct,
)
from coordinator.core.money import money
from coordinator.errors import DeclarationError
from tests.core.declaring import Capacity, Cost, FixedSource, capacity_source, item, optional, required

T = TypeVar("T")


class Renamed(msgspec.Struct, rename="camel"):
    available_hours: int


class Boxed(msgspec.Struct, Generic[T]):
    inside: T


class North(msgspec.Struct, tag=True):
    hours: int


class South(msgspec.Struct, tag=True):
    crew: int


def evidence_of(returns: Any, freshness: Freshness) -> Evidence[Any, Any]:
    return Evidence("capacity", FixedSource(returns), deadline_ms=5, freshness=freshness)


def test_the_defaults_are_required_recorded_once_and_tried_twice() -> None:
    declared = required("capacity")
    assert declared.required
    assert not declared.on_demand
    assert (declared.after, declared.attempts, declared.reserves) == ((), 2, None)
    assert declared.freshness.as_json() == {"kind": "snapshot"}


def test_what_is_declared_is_kept() -> None:
    declared = Evidence(
        "cost",
        capacity_source,
        deadline_ms=2_000,
        after=["capacity"],
        freshness=Decisive(),
        reserves=money("0.40 SGD"),
        attempts=1,
    )
    assert (declared.deadline_ms, declared.after, declared.attempts) == (2_000, ("capacity",), 1)
    assert declared.reserves == money("0.40 SGD")
    assert declared.remote is capacity_source
    assert declared.local is None
    assert optional("tone", on_demand=True).on_demand


def test_a_source_of_our_own_records_is_recognised_by_its_shape() -> None:
    class RecordSource:
        name = "stock"
        returns = Capacity
        record_kind = "stock"

        def record_id(self, request: ReadRequest) -> str:
            return "s-1"

    source: LocalSource[Capacity] = RecordSource()
    assert Evidence("stock", source, deadline_ms=5).local is source


@pytest.mark.parametrize(
    ("freshness", "shown"),
    [
        (Decisive("a", "b"), {"kind": "decisive", "fields": ["a", "b"]}),
        (Decisive(), {"kind": "decisive", "fields": []}),
        (MaxAge(timedelta(minutes=1)), {"kind": "max-age", "max_age_ms": 60_000}),
        (Snapshot(), {"kind": "snapshot"}),
    ],
)
def test_freshness_is_shown_with_its_limits(freshness: Freshness, shown: object) -> None:
    assert freshness.as_json() == shown


@pytest.mark.parametrize("age", [timedelta(0), timedelta(seconds=-1)])
def test_an_age_that_nothing_can_have_is_refused_at_its_line(age: timedelta) -> None:
    with pytest.raises(DeclarationError, match=rf"^{Path(__file__).name}:\d+: MaxAge must be positive"):
        MaxAge(age)


@pytest.mark.parametrize(
    ("returns", "field"),
    [
        (Capacity, "available_hours"),
        (Renamed, "availableHours"),
        (Boxed[int], "inside"),
        (North | South, "hours"),
        (North | South, "crew"),
        (Union[Boxed[int], South], "inside"),  # noqa: UP007  # what the operator makes of a generic struct
    ],
)
def test_a_decisive_field_is_named_as_it_is_in_json(returns: Any, field: str) -> None:
    assert evidence_of(returns, Decisive(field)).freshness.as_json()["fields"] == [field]
    assert evidence_of(returns, Decisive()).freshness.as_json()["fields"] == []


@pytest.mark.parametrize(
    ("returns", "field"),
    [
        (Capacity, "hours"),
        (Capacity, ""),
        (Capacity, "available_hours.x"),
        (Renamed, "available_hours"),
        (North | South, "site"),
    ],
)
def test_a_decisive_field_that_the_source_does_not_have_is_refused(returns: Any, field: str) -> None:
    with pytest.raises(DeclarationError, match="is not one of") as wrong:
        evidence_of(returns, Decisive(field))
    assert wrong.value.where.startswith(Path(__file__).name)


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [
        (Capacity, True),
        (Capacity | Cost, True),
        (Boxed[int], True),
        (Boxed[int] | Cost, True),
        (Capacity | None, False),
        (Boxed[int] | None, False),
        (dict[str, int], False),
        (int, False),
        (None, False),
        ("Capacity", False),
        (Capacity(1.0), False),
        (Any, False),
    ],
)
def test_a_struct_is_a_struct_or_a_union_of_them(kind: Any, is_one: bool) -> None:
    assert is_struct(kind) is is_one


def test_an_item_is_read_back_from_its_json() -> None:
    one = item("capacity", {"a": 1}, cost=money("1 SGD"), interval=(0.0, 2.0), confidence=0.5)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Item) == one


@given(st.text(alphabet=st.characters(exclude_categories=())), st.integers(0, 50))
def test_a_cleaned_text_can_be_stored_and_shown_anywhere(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit)
    assert len(cleaned) <= limit
    assert all(char.isprintable() for char in cleaned)
    cleaned.encode("utf-8")


def test_a_cleaned_text_keeps_what_is_readable_and_marks_what_is_not() -> None:
    assert clean_text("Größe 3 €, 寸法") == "Größe 3 €, 寸法"
    assert clean_text("a\x00b\nc\ud800") == "a�b�c?"
    assert clean_text("x" * 10_000) == "x" * 500
