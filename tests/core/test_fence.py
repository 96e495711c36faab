"""The fence holds as long as the decisive fields do, whatever else moved (I3)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.evidence import Decisive, Evidence, Required, State
from coordinator.core.fence import (
    Check,
    ReadCheck,
    all_hold,
    compare_fields,
    compare_items,
    moved,
    with_dependants,
)
from tests.core.declaring import Capacity, item, required

THEN = item("capacity", {"available_hours": 40, "crew": 3}, revision='"3"')

members = st.sampled_from([None, True, False, 0, 1, "", "1", [1], [True], {"a": 1}, {"a": True}])
values = st.dictionaries(st.sampled_from(["a", "b", "c"]), members)


def held(checks: list[Check]) -> dict[str, bool]:
    return {check.field: check.held for check in checks}


def test_unchanged_fields_hold_though_the_revision_and_other_fields_moved() -> None:
    now = item("capacity", {"available_hours": 40, "crew": 2}, revision='"4"', elapsed_ms=99)
    checks = compare_items(Decisive("available_hours"), THEN, now)
    assert checks == [Check(evidence="capacity", field="available_hours", then=40, now=40, held=True)]


def test_a_moved_field_is_shown_with_both_values() -> None:
    now = item("capacity", {"available_hours": 16, "crew": 3}, revision='"3"')
    checks = compare_items(Decisive("available_hours", "crew"), THEN, now)
    assert checks == [
        Check(evidence="capacity", field="available_hours", then=40, now=16, held=False),
        Check(evidence="capacity", field="crew", then=3, now=3, held=True),
    ]


def test_without_fields_the_whole_value_is_decisive() -> None:
    same = item("capacity", {"crew": 3, "available_hours": 40.0}, revision='"9"')
    other = item("capacity", {"available_hours": 40, "crew": 2}, revision='"3"')
    assert held(compare_items(Decisive(), THEN, same)) == {"": True}
    assert held(compare_items(Decisive(), THEN, other)) == {"": False}


@pytest.mark.parametrize(
    ("then", "now", "holds"),
    [
        ("absent", "absent", True),
        ("absent", "found", False),
        ("found", "absent", False),
        ("found", "failed", False),
        ("found", "timed_out", False),
        ("absent", "failed", False),
    ],
)
def test_a_missing_reading_is_compared_by_its_state(then: State, now: State, holds: bool) -> None:
    checks = compare_items(
        Decisive("crew"), item("e", {"crew": 3}, state=then), item("e", {"crew": 3}, state=now)
    )
    assert checks == [Check(evidence="e", field="", then=then, now=now, held=holds)]


@pytest.mark.parametrize(
    ("then", "now"),
    [(1, True), (0, False), ([1], [True]), ({"a": 0}, {"a": False}), (None, 0), (None, False), ("1", 1)],
)
def test_values_of_another_json_type_are_not_the_same(then: JsonValue, now: JsonValue) -> None:
    assert held(compare_fields("e", ["x"], {"x": then}, {"x": now})) == {"x": False}
    assert held(compare_items(Decisive(), item("e", {"x": then}), item("e", {"x": now}))) == {"": False}


def test_a_whole_number_is_the_same_however_it_is_spelled() -> None:
    assert all_hold(compare_fields("e", ["x"], {"x": 1}, {"x": 1.0}))


@given(values, values, st.lists(st.sampled_from(["a", "b", "c"]), unique=True))
def test_fields_hold_exactly_when_their_canonical_json_is_the_same(
    then: dict[str, Any], now: dict[str, Any], fields: list[str]
) -> None:
    checks = compare_fields("e", fields, then, now)
    assert [check.field for check in checks] == fields
    assert [check.held for check in checks] == [
        canonical(then.get(field)) == canonical(now.get(field)) for field in fields
    ]


@given(values)
def test_whatever_is_decisive_a_reading_holds_against_itself(value: dict[str, Any]) -> None:
    for freshness in (Decisive(), Decisive("a"), Decisive("a", "b", "c")):
        assert all_hold(compare_items(freshness, item("e", value), item("e", value)))


def test_a_record_is_compared_by_its_version() -> None:
    read = ReadCheck("record", "quote", "q-1", 8, {"price": 5})
    assert read.compare(8, None) == [Check(evidence="record", field="version", then=8, now=8, held=True)]
    assert read.compare(9, {"price": 5}) == [
        Check(evidence="record", field="version", then=8, now=9, held=False)
    ]


def test_a_record_with_decisive_fields_is_compared_by_these_alone() -> None:
    read = ReadCheck("rates", "rate", "r-1", 8, {"price": 5, "note": "a"}, ("price",))
    assert held(read.compare(12, {"price": 5, "note": "b"})) == {"price": True}
    assert held(read.compare(9, {"price": 6, "note": "a"})) == {"price": False}


@pytest.mark.parametrize("data", [{}, {"price": None}, {"price": 5}])
def test_a_record_that_was_absent_has_moved_as_soon_as_it_exists(data: JsonValue) -> None:
    absent = ReadCheck("rates", "rate", "r-1", 0, None, ("price",))
    assert absent.compare(0, None) == [
        Check(evidence="rates", field="", then="absent", now="absent", held=True)
    ]
    assert absent.compare(1, data) == [
        Check(evidence="rates", field="", then="absent", now="found", held=False)
    ]


def test_what_moved_is_named_once() -> None:
    checks = [
        Check(evidence="a", field="x", then=1, now=2, held=False),
        Check(evidence="a", field="y", then=1, now=2, held=False),
        Check(evidence="b", field="", then=1, now=1, held=True),
    ]
    assert moved(checks) == {"a"}
    assert not all_hold(checks)
    assert all_hold(checks[2:])
    assert all_hold([])


def test_what_was_read_after_something_stale_is_stale_however_indirectly() -> None:
    evidence = {
        "a": required("a"),
        "b": required("b", after=["a"]),
        "c": required("c", after=["b"]),
        "d": required("d"),
        "e": required("e", after=["d", "c"]),
    }
    assert with_dependants({"a"}, evidence) == {"a", "b", "c", "e"}
    assert with_dependants({"d"}, evidence) == {"d", "e"}
    assert with_dependants({"e"}, evidence) == {"e"}
    assert with_dependants(set(), evidence) == set()


def test_asking_for_dependants_leaves_the_question_as_it_was() -> None:
    names = {"a"}
    with_dependants(names, {"a": required("a"), "b": required("b", after=["a"])})
    assert names == {"a"}


@given(st.data())
def test_the_stale_set_is_closed_and_has_nothing_that_does_not_depend_on_it(data: st.DataObject) -> None:
    evidence: dict[str, Evidence[Capacity, Required]] = {}
    for number in range(data.draw(st.integers(1, 8))):
        before = data.draw(st.lists(st.sampled_from(sorted(evidence)), unique=True)) if evidence else []
        evidence[f"e{number}"] = required(f"e{number}", after=before)
    names = set(data.draw(st.lists(st.sampled_from(sorted(evidence)), unique=True)))
    stale = with_dependants(names, evidence)
    for name, declared in evidence.items():
        assert (name in stale) == (name in names or any(before in stale for before in declared.after))
