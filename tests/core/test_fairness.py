"""Slots go by reserve first, then by weight; nobody starves and nothing is overbooked (I15, I16)."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core.fairness import ClassLimits, ClassShares

DEFAULTS = {"urgent": (8, 8), "interactive": (4, 8), "bulk": (1, 0)}


def shares(slots: int, **classes: tuple[int, int]) -> ClassShares:
    """Classes as name=(weight, reserved)."""
    return ClassShares(
        {name: ClassLimits(weight, reserved, 100) for name, (weight, reserved) in classes.items()}, slots
    )


def start_all(made: ClassShares, waiting: dict[str, int]) -> list[str]:
    """Start as long as anything may, and say in which order."""
    started = []
    while (name := made.next(waiting)) is not None:
        made.start(name)
        waiting[name] -= 1
        started.append(name)
    return started


def flood(made: ClassShares, starts: int, *names: str) -> Counter[str]:
    """Every named class always has someone waiting; the longest running decision ends whenever no slot is free."""
    running: deque[str] = deque()
    counted: Counter[str] = Counter()
    while sum(counted.values()) < starts:
        name = made.next(dict.fromkeys(names, 1000))
        if name is None:
            made.finish(running.popleft())
            continue
        made.start(name)
        running.append(name)
        counted[name] += 1
    return counted


@pytest.mark.parametrize(
    "weights",
    [{"a": 8, "b": 4, "c": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 100}, {"z": 7, "y": 3, "x": 2, "w": 1}],
)
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_under_contention_starts_follow_the_weights_within_five_percent(
    weights: dict[str, int], slots: int
) -> None:
    made = shares(slots, **{name: (weight, 0) for name, weight in weights.items()})
    counted = flood(made, 5_000, *weights)
    total = sum(weights.values())
    for name, weight in weights.items():
        assert counted[name] == pytest.approx(5_000 * weight / total, rel=0.05, abs=2)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 50), min_size=2), st.integers(1, 8))
def test_shares_follow_any_weights(weights: dict[str, int], slots: int) -> None:
    made = shares(slots, **{name: (weight, 0) for name, weight in weights.items()})
    counted = flood(made, 1_000, *weights)
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(counted[name] - 1_000 * weight / total) <= len(weights)


def test_the_lightest_class_keeps_starting_under_a_flood_of_all_others() -> None:
    made = shares(256, **DEFAULTS)
    counted = flood(made, 10_000, *DEFAULTS)
    assert counted["bulk"] >= 10_000 / 13 * 0.9


def test_a_class_that_was_idle_does_not_catch_up_for_what_it_did_not_want() -> None:
    made = shares(1, a=(1, 0), b=(1, 0))
    flood(made, 1_000, "a")
    for name, count in made.running.items():
        for _ in range(count):
            made.finish(name)
    counted = flood(made, 100, "a", "b")
    assert counted["b"] == pytest.approx(50, abs=1)


def test_a_reserved_slot_is_there_when_its_class_comes_though_others_wait_for_it() -> None:
    made = shares(10, urgent=(8, 3), bulk=(1, 0))
    assert start_all(made, {"bulk": 100}) == ["bulk"] * 7
    assert start_all(made, {"bulk": 100, "urgent": 100}) == ["urgent"] * 3


def test_the_unused_reserves_of_others_stay_free_though_all_others_are_idle() -> None:
    made = shares(10, urgent=(8, 3), interactive=(4, 2), bulk=(1, 0))
    assert len(start_all(made, {"bulk": 100})) == 5
    assert not made.may_start("bulk")
    assert made.may_start("urgent")
    assert made.may_start("interactive")


def test_every_slot_that_nobody_reserved_is_used() -> None:
    made = shares(10, urgent=(8, 3), bulk=(1, 0))
    assert start_all(made, {"urgent": 100}) == ["urgent"] * 10
    made = shares(4, a=(1, 0), b=(1, 0))
    assert start_all(made, {"b": 100}) == ["b"] * 4


def test_a_reserve_in_use_is_kept_no_longer_for_its_class() -> None:
    made = shares(4, urgent=(8, 2), bulk=(1, 0))
    start_all(made, {"urgent": 2})
    assert start_all(made, {"bulk": 100}) == ["bulk"] * 2


def test_reserves_beyond_all_slots_neither_overbook_nor_block() -> None:
    made = shares(2, a=(1, 2), b=(1, 2))
    assert start_all(made, {"a": 5}) == ["a"] * 2
    assert start_all(made, {"a": 5, "b": 5}) == []
    made.finish("a")
    assert start_all(made, {"b": 5}) == ["b"]


def test_nothing_starts_where_nobody_waits() -> None:
    made = shares(4, a=(1, 0))
    assert made.next({}) is None
    assert made.next({"a": 0}) is None


@pytest.mark.parametrize("limits", [(0, 0, 1), (-1, 0, 1), (1, -1, 1), (1, 0, -1)])
def test_limits_without_a_meaning_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="weight must be at least 1"):
        ClassLimits(*limits)
    weight, reserved, queue_depth = limits
    text = msgspec.json.encode({"weight": weight, "reserved": reserved, "queue_depth": queue_depth})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ClassLimits)


class Slots(RuleBasedStateMachine):
    """Any order of arrivals, starts and ends keeps the books."""

    @initialize(
        spare=st.integers(1, 4),
        reserved=st.tuples(*[st.integers(0, 3)] * 3),
        weights=st.tuples(*[st.integers(1, 9)] * 3),
    )
    def begin(self, spare: int, reserved: tuple[int, ...], weights: tuple[int, ...]) -> None:
        classes = dict(zip("abc", zip(weights, reserved, strict=True), strict=True))
        self.made = shares(sum(reserved) + spare, **classes)
        self.waiting = dict.fromkeys("abc", 0)
        self.passed_over = dict.fromkeys("abc", 0)

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 5))
    def arrive(self, name: str, count: int) -> None:
        self.waiting[name] += count

    @rule()
    def start_next(self) -> None:
        able = {name for name, count in self.waiting.items() if count and self.made.may_start(name)}
        name = self.made.next(self.waiting)
        if name is None:
            assert not able
            return
        assert name in able
        self.made.start(name)
        self.waiting[name] -= 1
        for other in able - {name}:
            self.passed_over[other] += 1
        self.passed_over[name] = 0

    @precondition(lambda self: any(self.made.running.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = sorted(name for name, count in self.made.running.items() if count)
        self.made.finish(data.draw(st.sampled_from(running)))

    @invariant()
    def running_never_exceeds_slots(self) -> None:
        assert all(count >= 0 for count in self.made.running.values())
        assert sum(self.made.running.values()) <= self.made.slots

    @invariant()
    def whoever_is_within_its_reserve_may_start(self) -> None:
        for name, limits in self.made.classes.items():
            if self.made.running[name] < limits.reserved:
                assert self.made.may_start(name)

    @invariant()
    def whoever_may_start_is_passed_over_a_bounded_number_of_times(self) -> None:
        heaviest = sum(limits.weight for limits in self.made.classes.values())
        assert max(self.passed_over.values()) <= heaviest + len(self.made.classes)


TestAnyOrderOfArrivalsStartsAndEndsKeepsTheBooks = Slots.TestCase
TestAnyOrderOfArrivalsStartsAndEndsKeepsTheBooks.settings = settings(max_examples=50, stateful_step_count=40)
