"""The arithmetic of budgets, by its properties: nothing beyond the ceiling without an overage (I9), each reservation closes once (I10)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from coordinator.core.budget import (
    DECISION,
    Change,
    Closing,
    Need,
    Room,
    Short,
    change,
    close,
    left_of,
    lowered,
    per_period,
    reserve,
)
from coordinator.core.money import Money

START = datetime(2026, 11, 29, tzinfo=UTC)
amounts = st.integers(0, 1_000)
costs = st.lists(amounts, max_size=4)
needs = st.lists(
    st.builds(
        lambda n, provider, amount, currency, optional: Need(
            "evidence", f"e-{n}", provider, Money(amount, currency), optional
        ),
        st.integers(),
        st.sampled_from(["oracle", "crm"]),
        st.integers(1, 1_000),
        st.sampled_from(["SGD", "SGD", "JPY"]),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda need: need.item,
)


def room(name: str, ceiling: int, used: int = 0, **more: Any) -> Room:
    facts: dict[str, Any] = {"currency": "SGD", "provider": None, "starts_at": START, "resets_at": None}
    return Room(budget=name, ceiling_minor=ceiling, used_minor=used, **facts | more)


rooms = st.tuples(amounts, amounts, amounts, amounts).map(
    lambda sizes: [
        room("all", sizes[0], sizes[3]),
        room("oracle", sizes[1], provider="oracle"),
        room("yen", sizes[2], currency="JPY"),
    ]
)


def need(amount: int, item: str = "cost", *, optional: bool = False) -> Need:
    return Need("evidence", item, "oracle", Money(amount, "SGD"), optional)


def drawn(budget: Room, taken: tuple[Need, ...]) -> int:
    return sum(each.amount.amount_minor for each in taken if budget.drawn_by(each))


@given(rooms, st.lists(needs, max_size=8), st.booleans())
def test_no_sequence_of_decisions_takes_more_than_any_ceiling(
    budgets: list[Room], decisions: list[list[Need]], reduce: bool
) -> None:
    left = left_of(budgets)
    taken: list[Need] = []
    for asked in decisions:
        before = dict(left)
        got = reserve(budgets, left, asked, reduce=reduce)
        if isinstance(got, Short):
            assert left == before
        else:
            taken += got
    for budget in budgets:
        total = drawn(budget, tuple(taken))
        assert total == 0 or budget.used_minor + total <= budget.ceiling_minor
        assert left[budget.budget] == budget.ceiling_minor - budget.used_minor - total


@given(rooms, needs)
def test_all_or_nothing_and_what_is_refused_would_not_have_fitted(
    budgets: list[Room], asked: list[Need]
) -> None:
    left = left_of(budgets)
    got = reserve(budgets, dict(left), asked)
    if isinstance(got, Short):
        tight = next(budget for budget in budgets if budget.budget == got.budget)
        assert drawn(tight, tuple(asked)) == got.needed.amount_minor > got.available.amount_minor
        assert got.available.amount_minor == max(0, left[got.budget])
    else:
        assert got == tuple(asked)


@given(rooms, needs)
def test_with_reduce_everything_required_is_there_and_nothing_that_fits_is_left_out(
    budgets: list[Room], asked: list[Need]
) -> None:
    left = left_of(budgets)
    got = reserve(budgets, left, asked, reduce=True)
    if isinstance(got, Short):
        return
    assert [each for each in asked if not each.optional] == [each for each in got if not each.optional]
    for each in set(asked) - set(got):
        assert each.optional
        assert isinstance(reserve(budgets, dict(left), [each]), Short)


def test_the_decisions_own_ceiling_is_one_more_budget() -> None:
    left = left_of([room("all", 100)])
    got = reserve([room("all", 100)], left, [need(60)], ceiling=Money(50, "SGD"))
    assert got == Short(DECISION, Money(60, "SGD"), Money(50, "SGD"), None)
    wishes = [need(40), need(20, "nice", optional=True)]
    kept = reserve([room("all", 100)], left, wishes, ceiling=Money(50, "SGD"), reduce=True)
    assert kept == (need(40),)
    assert left == {"all": 60}


def test_nothing_is_available_where_a_bill_was_bigger_than_what_was_left() -> None:
    budgets = [room("all", 100, 130)]
    assert reserve(budgets, left_of(budgets), [need(1)]) == Short(
        "all", Money(1, "SGD"), Money(0, "SGD"), None
    )
    assert reserve(budgets, left_of(budgets), []) == ()


@given(amounts, costs, st.booleans())
def test_what_closes_counts_in_full_and_the_excess_is_an_overage(
    held: int, spent: list[int], silent: bool
) -> None:
    closing = close(held, spent, silent=silent)
    assert closing.drawn_minor >= sum(spent)
    assert closing.excess_minor == max(0, closing.drawn_minor - held)
    assert closing.state == ("uncertain" if silent else "settled" if spent else "released")
    if silent:
        assert closing.drawn_minor >= held


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What may happen to one budget's period, in any order."""
    event = st.one_of(
        st.tuples(st.just("reserve"), amounts),
        st.tuples(st.just("close"), st.tuples(st.integers(0, 20), costs, st.booleans())),
        st.tuples(st.just("late"), st.tuples(st.integers(0, 20), st.integers(1, 500))),
        st.tuples(st.just("ceiling"), amounts),
    )
    return draw(st.lists(event, max_size=30))


@given(amounts, histories())
def test_at_every_moment_the_period_keeps_to_its_ceiling_but_for_overages(
    ceiling: int, history: list[tuple[str, Any]]
) -> None:
    period = Change()
    reservations: list[tuple[str, int]] = []
    closed: set[int] = set()
    for event, what in history:
        used = period.held + period.uncertain + period.settled
        match event:
            case "reserve":
                budgets = [room("all", ceiling, used)]
                if not isinstance(reserve(budgets, left_of(budgets), [need(what)]), Short):
                    assert used + what <= ceiling or what == 0
                    reservations.append(("held", what))
                    period += Change(held=what)
            case "close" if what[0] < len(reservations) and what[0] not in closed:
                n, spent, silent = what
                state, drawn_minor = reservations[n]
                closing = close(drawn_minor, spent, silent=silent)
                period += change(state, drawn_minor, closing)  # type: ignore[arg-type]  # one of the states
                reservations[n] = (closing.state, closing.drawn_minor)
                closed |= {n} if closing.state != "uncertain" else set()
            case "late" if what[0] in closed:
                n, cost = what
                state, drawn_minor = reservations[n]
                late = Closing(state, drawn_minor + cost, cost)  # type: ignore[arg-type]  # as it closed
                period += change(state, drawn_minor, late)  # type: ignore[arg-type]  # as it closed
                reservations[n] = (state, drawn_minor + cost)
            case "ceiling":
                ceiling = what
                period += Change(overage=lowered(ceiling, used, period.overage))
        for state in ("held", "uncertain"):
            assert getattr(period, state) == sum(amount for s, amount in reservations if s == state)
        assert period.settled == sum(amount for s, amount in reservations if s in ("settled", "released"))
        assert period.overage >= 0
        assert period.held + period.uncertain + period.settled <= ceiling + period.overage


def test_changes_of_one_period_are_added_up() -> None:
    summed = per_period([(["a", "b"], Change(held=1)), (["b"], Change(held=2, overage=3))])
    assert summed == {"a": Change(held=1), "b": Change(held=3, overage=3)}
