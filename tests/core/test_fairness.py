"""Slots go by reserve first, then by weight; nobody starves and nothing is overbooked (I15, I16)."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core.fairness import ClassLimits, ClassShares, TenantTurns

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


def test_an_idle_reserve_is_lent_its_owner_starts_at_once_and_the_next_free_slots_make_up_for_it() -> None:
    made = shares(10, urgent=(8, 3), bulk=(1, 0))
    assert start_all(made, {"bulk": 100}) == ["bulk"] * 10
    assert start_all(made, {"bulk": 100, "urgent": 5}) == ["urgent"] * 3
    for _ in range(3):
        assert start_all(made, {"bulk": 100}) == []
        made.finish("bulk")
    assert start_all(made, {"bulk": 100}) == []
    made.finish("bulk")
    assert start_all(made, {"bulk": 100}) == ["bulk"]


def test_a_reserve_comes_before_any_weight_and_beyond_it_the_weights_count() -> None:
    made = shares(4, heavy=(100, 0), light=(1, 2))
    assert start_all(made, {"heavy": 9, "light": 9}) == ["light", "light", "heavy", "heavy"]


def test_every_slot_is_used_whoever_waits() -> None:
    for name in ("urgent", "bulk"):
        made = shares(10, urgent=(8, 3), bulk=(1, 0))
        assert start_all(made, {name: 100}) == [name] * 10


def test_reserves_beyond_all_slots_neither_overbook_nor_block() -> None:
    made = shares(2, a=(1, 2), b=(1, 2))
    assert start_all(made, {"a": 5}) == ["a"] * 2
    assert start_all(made, {"a": 5, "b": 5}) == ["b"] * 2
    assert start_all(made, {"a": 5, "b": 5}) == []
    made.finish("a")
    assert start_all(made, {"b": 5}) == []
    assert start_all(made, {"a": 5}) == ["a"]


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
        waits = {name for name, count in self.waiting.items() if count}
        owed = {name for name in waits if self.made.running[name] < self.made.classes[name].reserved}
        name = self.made.next(self.waiting)
        if name is None:
            assert not waits or (self.made.busy >= self.made.slots and not owed)
            return
        assert name in (owed or waits)
        self.made.start(name)
        self.waiting[name] -= 1
        for other in waits - owed - {name} if not owed else ():
            self.passed_over[other] += 1
        self.passed_over[name] = 0

    @precondition(lambda self: any(self.made.running.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = sorted(name for name, count in self.made.running.items() if count)
        self.made.finish(data.draw(st.sampled_from(running)))

    @invariant()
    def running_never_exceeds_slots_and_reserves(self) -> None:
        assert all(count >= 0 for count in self.made.running.values())
        reserves = sum(limits.reserved for limits in self.made.classes.values())
        assert sum(self.made.running.values()) == self.made.busy <= self.made.slots + reserves

    @invariant()
    def whoever_waits_is_passed_over_a_bounded_number_of_times_but_for_reserves(self) -> None:
        heaviest = sum(limits.weight for limits in self.made.classes.values())
        assert max(self.passed_over.values()) <= heaviest + len(self.made.classes)


TestAnyOrderOfArrivalsStartsAndEndsKeepsTheBooks = Slots.TestCase
TestAnyOrderOfArrivalsStartsAndEndsKeepsTheBooks.settings = settings(max_examples=50, stateful_step_count=40)


# Tenants ---------------------------------------------------------------------------------------------------------------------


def backlog(**counts: int) -> TenantTurns[str]:
    turns: TenantTurns[str] = TenantTurns()
    for tenant, count in counts.items():
        turns.set(tenant, count)
    return turns


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 10), min_size=2))
def test_tenants_that_all_wait_get_equal_shares_of_cost_within_five_percent(costs: dict[str, int]) -> None:
    turns = backlog(**dict.fromkeys(costs, 10_000))
    spent: Counter[str] = Counter()
    while sum(spent.values()) < 400 * len(costs):
        tenant = turns.pick()
        assert tenant is not None
        turns.charge(tenant, costs[tenant])
        spent[tenant] += costs[tenant]
    fair = sum(spent.values()) / len(costs)
    for tenant in costs:
        assert abs(spent[tenant] - fair) <= max(0.05 * fair, 2 * max(costs.values()))


def test_a_flood_delays_only_its_own_tenant() -> None:
    turns = backlog(flood=10_000)
    for _ in range(500):
        assert turns.pick() == "flood"
    turns.set("small", 3)
    assert [turns.pick() for _ in range(6)].count("small") == 3


def test_who_was_idle_does_not_catch_up() -> None:
    turns = backlog(a=10_000, b=1)
    for _ in range(1_000):
        turns.pick()
    turns.set("b", 10_000)
    counted = Counter(turns.pick() for _ in range(100))
    assert abs(counted["a"] - counted["b"]) <= 2


class Turns(RuleBasedStateMachine):
    """Whoever waits gets its turn before any other gets two more than its part; nobody is picked who does not wait."""

    @initialize()
    def begin(self) -> None:
        self.turns: TenantTurns[int] = TenantTurns()
        self.waiting: Counter[int] = Counter()
        self.since: dict[int, Counter[int]] = {}

    @rule(tenant=st.integers(0, 5), count=st.integers(1, 6))
    def arrive(self, tenant: int, count: int) -> None:
        self.waiting[tenant] += count
        self.turns.set(tenant, self.waiting[tenant])
        self.since.setdefault(tenant, Counter())

    @rule(tenant=st.integers(0, 5))
    def go_away(self, tenant: int) -> None:
        self.waiting[tenant] = 0
        self.turns.set(tenant, 0)
        self.since.pop(tenant, None)

    @rule()
    def pick(self) -> None:
        tenant = self.turns.pick()
        if tenant is None:
            assert not +self.waiting
            return
        assert self.waiting[tenant] > 0
        self.waiting[tenant] -= 1
        for other, picked in self.since.items():
            if other != tenant:
                picked[tenant] += 1
        self.since.pop(tenant)
        if self.waiting[tenant]:
            self.since[tenant] = Counter()

    @invariant()
    def nobody_is_passed_over_twice_by_the_same_tenant(self) -> None:
        assert all(count <= 2 for picked in self.since.values() for count in picked.values())

    @invariant()
    def the_books_are_kept(self) -> None:
        assert self.turns.total == sum(self.waiting.values())
        assert self.turns.waiting == {tenant: count for tenant, count in self.waiting.items() if count}


TestAnyOrderOfArrivalsGivesEveryoneATurn = Turns.TestCase
TestAnyOrderOfArrivalsGivesEveryoneATurn.settings = settings(max_examples=80, stateful_step_count=50)


def test_a_pick_among_many_tenants_touches_few_of_them() -> None:
    """O(log n): comparisons are counted, not seconds."""

    class Counting(float):
        compared = 0

        def __lt__(self, other: object) -> bool:
            Counting.compared += 1
            return float(self) < float(other)  # type: ignore[arg-type]  # only numbers are compared

    def comparisons(tenants: int) -> float:
        turns: TenantTurns[int] = TenantTurns()
        for tenant in range(tenants):
            turns.set(tenant, 50)
        turns._turns = [(Counting(at), n, tenant) for at, n, tenant in turns._turns]
        turns._virtual = {tenant: Counting(at) for tenant, at in turns._virtual.items()}
        Counting.compared = 0
        for _ in range(200):
            turns.pick()
        return Counting.compared / 200

    assert comparisons(8_192) <= 4 * 13
    assert comparisons(8_192) <= 4 * comparisons(64)


def test_there_is_room_up_to_the_tenants_depth_and_in_a_full_class_up_to_its_part() -> None:
    limits = ClassLimits(1, 0, queue_depth=10, total_depth=20)
    assert limits.room(9, 9, 1)
    assert not limits.room(10, 10, 1)
    assert limits.room(4, 20, 4), "the class is full, but not with this tenant's"
    assert not limits.room(5, 20, 4)
    assert ClassLimits(1, 0, queue_depth=10).room(9, 79, 1)
    assert not ClassLimits(1, 0, queue_depth=10).room(9, 80, 9)
