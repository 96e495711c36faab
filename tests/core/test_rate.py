"""The limit per minute holds in every 60 seconds as the provider counts them, and little of it is wasted (pure arithmetic)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.core.pool import Limits
from coordinator.core.rate import ARRIVES_WITHIN_S, KEPT_S, Correction, Granted, Rates, Window, burst

MINUTE_MS = 60_000
LATEST_MS = round(ARRIVES_WITHIN_S * 1000)


def most_in_a_minute(arrivals: Iterable[tuple[int, int]]) -> int:
    """The largest sum of amounts in any 60 s, of pairs of a time in ms and an amount."""
    there = sorted(arrivals)
    return max(
        (sum(n for at, n in there if begin <= at < begin + MINUTE_MS) for begin, _ in there), default=0
    )


Call = tuple[int, int, bool, int]
"""Its estimate, how many ms late it arrives, whether it is given up before it is sent, and how much less than estimated it used."""
edges = st.sampled_from(
    [0, 1, 999, 1_000, 15_000, 29_999, 30_000, 30_001, 58_000, 59_000, 59_999, 60_000, 60_001, 61_000, 61_999]
)
"""Where a minute, a second's end, or a grant's time to arrive might be off by one."""
anywhere = st.integers(0, 20_000)
late = st.sampled_from([0, 1, LATEST_MS - 1, LATEST_MS])
calls = st.lists(st.tuples(st.integers(0, 40), late, st.booleans(), st.integers(0, 40)), max_size=6)


def asks(passed: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, list[Call]]]]:
    """Claims of whatever processes, in the database's order, each so many ms after the last."""
    return st.lists(st.tuples(passed, calls), max_size=40)


@given(
    st.one_of(asks(edges), asks(anywhere), asks(edges | anywhere)), st.integers(1, 12), st.integers(40, 90)
)
@settings(max_examples=200)
def test_no_minute_at_the_provider_is_above_the_limit(
    asked: list[tuple[int, list[Call]]], requests: int, units: int
) -> None:
    rates, limits = Rates(), Limits(requests_per_min=requests, units_per_min=units)
    now_ms, arrived, used = 1_700_000_000_999, [], []
    corrections: list[Correction] = []
    for passed, calls in asked:
        now_ms += passed
        granted = rates.claim(limits, now_ms / 1000, [estimate for estimate, *_ in calls], corrections)
        corrections = []
        for estimate, late, given_up, less in calls[: granted.count]:
            if given_up:
                corrections.append(Correction(granted.second, -1, -estimate))
            else:
                saved = min(less, estimate)
                arrived.append((now_ms + late, 1))
                used.append((now_ms + late, estimate - saved))
                corrections.append(Correction(granted.second, 0, -saved))
        rates = msgspec.json.decode(msgspec.json.encode(rates), type=Rates)
    assert most_in_a_minute(arrived) <= requests
    assert most_in_a_minute(used) <= units


@given(
    st.integers(1, 3), st.lists(st.tuples(edges | st.integers(0, 3_000), late, st.booleans()), max_size=30)
)
@example(1, [(0, 1_000, False), (60_001, 0, False)])
@settings(max_examples=300)
def test_nor_would_it_be_without_the_pace(limit: int, asked: list[tuple[int, int, bool]]) -> None:
    rates, limits = Rates(), Limits(requests_per_min=limit)
    now_ms, arrived = 1_700_000_000_999, []
    corrections: list[Correction] = []
    for passed, late, given_up in asked:
        now_ms += passed
        rates.requests.level = math.inf
        granted = rates.claim(limits, now_ms / 1000, [0], corrections)
        corrections = []
        if granted.count and given_up:
            corrections = [Correction(granted.second, -1)]
        elif granted.count:
            arrived.append((now_ms + late, 1))
    assert most_in_a_minute(arrived) <= limit


@pytest.mark.parametrize("limit", [1, 7, 60, 600, 6_000])
def test_whoever_always_asks_gets_nearly_all_of_it_and_soon_at_an_even_pace(limit: int) -> None:
    rates, limits = Rates(), Limits(requests_per_min=limit)
    granted: list[tuple[float, int]] = []
    now = 1_000_000.0
    while now < 1_000_000 + 20 * KEPT_S:
        count = rates.claim(limits, now, [0] * (limit + 1)).count
        if count:
            granted.append((now, count))
        now += 0.05
    begun = [at for at, _ in granted]
    assert sum(count for _, count in granted) >= 0.99 * 20 * limit
    later = [after - before for before, after in pairwise(begun) if before > begun[0] + KEPT_S]
    assert max(later) <= KEPT_S / limit + 1


def test_a_quarter_of_an_idle_minute_goes_at_once() -> None:
    rates, limits = Rates(), Limits(requests_per_min=60)
    granted = rates.claim(limits, 1_000.0, [0] * 60)
    assert granted.count == burst(60) == 15
    assert granted.wait_s == pytest.approx(KEPT_S / 60)


def test_no_more_than_one_call_is_saved_up_while_the_window_is_full() -> None:
    window = Window()
    window.advance(1_000.0, 60)
    window.take(1)
    window.used[0] += 59
    window.advance(1_000.0 + KEPT_S - 1, 60)
    assert (window.fits(1, 60), window.level) == (False, 1)
    window.advance(1_000.0 + KEPT_S, 60)
    assert window.fits(1, 60)
    assert window.level == pytest.approx(1 + 60 / KEPT_S)


@given(st.integers(1, 100), st.integers(1, 100), st.floats(0, 61.9))
def test_what_is_told_to_wait_fits_then_and_not_before(limit: int, amount: int, passed: float) -> None:
    window = Window()
    window.advance(1_000.0, limit)
    window.take(min(limit, burst(limit)))
    window.advance(1_000.0 + passed, limit)
    wait_s = window.wait_s(amount, limit)
    assert math.isinf(wait_s) == (amount > limit)
    assert (wait_s == 0) == window.fits(amount, limit)
    if 0 < wait_s < math.inf:
        window.advance(window.at + wait_s + 1e-3, limit)
        assert window.fits(amount, limit)


def test_a_debt_delays_what_follows_and_a_credit_makes_room() -> None:
    rates, limits = Rates(), Limits(units_per_min=100)
    first = rates.claim(limits, 1_000.0, [20])
    assert rates.claim(limits, 1_010.0, [], [Correction(first.second, units=70)]).count == 0
    assert rates.units.left(100) == 10
    blocked = rates.claim(limits, 1_020.0, [20])
    assert (blocked.count, blocked.wait_s) == (0, pytest.approx(42.0))
    assert rates.claim(limits, 1_021.0, [20], [Correction(first.second, units=-20)]).count == 1


def test_a_call_that_would_need_more_than_a_minute_has_never_fits() -> None:
    granted = Rates().claim(Limits(units_per_min=100), 1_000.0, [101])
    assert granted == Granted(0, 1_000, math.inf)


def test_both_limits_have_to_have_room() -> None:
    rates, limits = Rates(), Limits(requests_per_min=1_000, units_per_min=100)
    assert rates.claim(limits, 1_000.0, [10] * 5).count == 2
    assert rates.requests.left(1_000) == 998


def test_a_clock_that_runs_backwards_stands_still() -> None:
    rates, limits = Rates(), Limits(requests_per_min=4)
    assert rates.claim(limits, 1_000.0, [0]).count == 1
    assert rates.claim(limits, 900.0, [0]).count == 0
    assert rates.requests.at == 1_000.0


def test_it_says_when_all_of_it_is_there_again() -> None:
    window = Window()
    window.advance(1_000.5, 60)
    assert window.resets_in_s() == 0
    window.take(1)
    window.advance(1_010.5, 60)
    assert window.resets_in_s() == pytest.approx(KEPT_S - 10.5)
