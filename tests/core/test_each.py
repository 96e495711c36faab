"""Evidence that is read for each of a list is found if enough of it is, and part of it never passes for all (I4)."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.each import Each, One, hopeless, member_by_member, state_of
from coordinator.core.evidence import Decisive, Item, State
from coordinator.core.fence import compare_items

STATES: list[State] = ["found", "absent", "failed", "timed_out"]
states = st.lists(st.sampled_from(STATES), max_size=5)
needs = st.none() | st.integers(0, 6)


@given(states, needs)
def test_it_is_found_if_all_are_or_as_many_as_are_needed(of: list[State], need: int | None) -> None:
    enough = of.count("found") >= (len(of) if need is None else need)
    assert (state_of(of, need) == "found") == enough


@given(states, st.integers(0, 3), needs)
def test_it_is_given_up_only_when_nothing_that_is_still_to_come_could_help(
    known: list[State], to_come: int, need: int | None
) -> None:
    total = len(known) + to_come
    possible = any(
        state_of([*known, *rest], need) == "found" for rest in itertools.product(STATES, repeat=to_come)
    )
    if need is None or need <= total:
        assert hopeless(known, total, need) == (not possible)
    else:
        assert not possible


@given(states.filter(lambda of: "found" not in of and len(of) > 0))
def test_what_is_missing_for_one_reason_is_missing_for_that_reason(of: list[State]) -> None:
    assert state_of(of, None) == (of[0] if len(set(of)) == 1 else "failed")


class Price(msgspec.Struct, frozen=True):
    cents: int | None
    note: str = ""


def of(*ones: tuple[str, State, Price | None]) -> Any:
    whole = Each(tuple(One(name, state, value) for name, state, value in ones))
    return msgspec.json.decode(msgspec.json.encode(whole))


def test_only_what_was_found_is_among_what_was_found() -> None:
    typed = msgspec.convert(of(("a", "found", Price(1)), ("b", "absent", None)), Each[Price])
    assert typed.found == [Price(1)]
    assert [(one.of, one.state) for one in typed.items] == [("a", "found"), ("b", "absent")]


def item(value: Any) -> Item:
    return Item(
        name="prices",
        source="s",
        state="found",
        value=value,
        observed_at="",
        freshness={},
        elapsed_ms=0,
        attempts=1,
    )


def held(then: Any, now: Any, *fields: str) -> bool:
    return all(check.held for check in compare_items(Decisive(*fields), item(then), item(now), each=True))


def test_a_decisive_field_counts_for_every_member() -> None:
    then = of(("a", "found", Price(1)), ("b", "found", Price(2)))
    assert held(then, of(("a", "found", Price(1, "other")), ("b", "found", Price(2))), "cents")
    assert not held(then, of(("a", "found", Price(1)), ("b", "found", Price(3))), "cents")
    assert not held(then, of(("a", "found", Price(2)), ("b", "found", Price(1))), "cents")
    assert not held(then, of(("a", "found", Price(1))), "cents")


def test_a_member_that_went_missing_is_not_one_whose_field_is_null() -> None:
    then = of(("a", "found", Price(None)))
    assert held(then, then, "cents")
    assert not held(then, of(("a", "absent", None)), "cents")
    assert member_by_member(None, ["cents"]) == {"cents": []}
