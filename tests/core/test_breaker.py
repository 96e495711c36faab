"""A provider that fails again and again is left alone for a while, then tried with one call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.breaker import Breaker

PAUSE = 100


def opened(threshold: int = 3) -> Breaker:
    """Opened at time 0."""
    made = Breaker(threshold=threshold, pause_ms=PAUSE, longest_ms=350)
    for _ in range(threshold):
        made.failed(0)
    return made


def test_failures_below_the_threshold_change_nothing() -> None:
    made = Breaker(threshold=3)
    made.failed(0)
    made.failed(0)
    assert made.state(0) == "closed"
    assert made.wait_ms(0) == 0


def test_a_success_starts_the_count_again() -> None:
    made = Breaker(threshold=2)
    for _ in range(10):
        made.failed(0)
        made.succeeded()
    assert made.state(0) == "closed"


def test_an_open_breaker_says_how_long_to_wait() -> None:
    made = opened()
    assert (made.state(0), made.wait_ms(0)) == ("open", PAUSE)
    assert (made.state(99), made.wait_ms(99)) == ("open", 1)


def test_after_the_pause_exactly_one_call_passes() -> None:
    made = opened()
    assert made.state(PAUSE) == "half-open"
    assert made.wait_ms(PAUSE) == 0
    assert made.wait_ms(PAUSE) > 0
    assert made.wait_ms(10 * PAUSE) > 0


def test_the_one_calls_success_closes_the_breaker() -> None:
    made = opened()
    made.wait_ms(PAUSE)
    made.succeeded()
    assert made.state(PAUSE) == "closed"
    assert [made.wait_ms(PAUSE) for _ in range(3)] == [0, 0, 0]


def test_each_failed_try_doubles_the_pause_up_to_the_longest() -> None:
    made, now = opened(), PAUSE
    for pause in (200, 350, 350):
        assert made.wait_ms(now) == 0
        made.failed(now)
        assert made.wait_ms(now) == pause
        now += pause
    made.wait_ms(now)
    made.succeeded()
    for _ in range(3):
        made.failed(now)
    assert made.wait_ms(now) == PAUSE


def test_a_try_that_said_nothing_of_the_provider_lets_the_next_one_try() -> None:
    made = opened()
    assert made.wait_ms(PAUSE) == 0
    made.dropped()
    assert made.wait_ms(PAUSE) == 0


@pytest.mark.parametrize("threshold", [1, 5])
def test_the_threshold_is_the_number_of_failures_in_a_row(threshold: int) -> None:
    made = Breaker(threshold=threshold)
    states = []
    for _ in range(threshold):
        states.append(made.state(0))
        made.failed(0)
    assert states == ["closed"] * threshold
    assert made.state(0) == "open"


@given(st.lists(st.sampled_from(["ask", "succeeded", "failed", "dropped", "later"]), max_size=60))
def test_whatever_happens_a_caller_is_never_told_to_wait_longer_than_the_longest_pause(
    events: list[str],
) -> None:
    made, now = Breaker(threshold=2, pause_ms=PAUSE, longest_ms=350), 0
    for event in events:
        match event:
            case "ask":
                assert 0 <= made.wait_ms(now) <= 350
            case "failed":
                made.failed(now)
            case "later":
                now += 70
            case "succeeded":
                made.succeeded()
            case _:
                made.dropped()
