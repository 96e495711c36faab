"""What may follow an attempt at an effect, over every combination, against a table written down a second time here (I5, I7)."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.effect import (
    MAX_LOOKUPS,
    MAX_SENDS,
    Accepted,
    Ambiguous,
    AskProvider,
    Fail,
    Guarantee,
    Keyed,
    Lookup,
    LookupResult,
    NotFound,
    NotSent,
    Park,
    Rejected,
    Resend,
    SendResult,
    Step,
    Succeed,
    Unguarded,
    after_lookup,
    keyed,
    lookup_lag_ms,
    next_step,
    operation_key,
    payload_json,
)

TIMEOUT = 1_000
BACKOFF = 200
LAG = 5_000
WINDOW = 100_000
LAST_AGE = (
    80_000 - BACKOFF - TIMEOUT - 1
)  # the latest age at which another attempt ends within 80 % of the window

GUARANTEES: dict[str, Guarantee] = {
    "keyed": Keyed(WINDOW),
    "keyed+lookup": Keyed(WINDOW, LAG),
    "lookup": Lookup(LAG),
    "none": Unguarded(),
}
RESULTS: dict[str, SendResult] = {
    "accepted": Accepted("r-1"),
    "rejected": Rejected("bad", "no such customer"),
    "not sent": NotSent("refused", "connection refused"),
    "ambiguous": Ambiguous("timeout", "no answer"),
}
AGES = {"in window": (0, LAST_AGE), "window over": (LAST_AGE + 1, WINDOW, 10 * WINDOW)}
SENDS = {"below": (1, MAX_SENDS - 1), "at most": (MAX_SENDS, MAX_SENDS + 1)}

# guarantee: what follows an ambiguous attempt   (in window & below, otherwise)
AFTER_AMBIGUITY: dict[str, tuple[type[Step], type[Step]]] = {
    "keyed": (Resend, Park),
    "keyed+lookup": (Resend, AskProvider),
    "lookup": (AskProvider, AskProvider),
    "none": (Park, Park),
}


def expected(guarantee: str, result: str, window: str, sends: str, in_doubt: bool) -> type[Step]:
    may_send, may_not = AFTER_AMBIGUITY[guarantee]
    in_time = window == "in window" and sends == "below"
    if result == "accepted":
        return Succeed
    if result == "ambiguous":
        return may_send if in_time else may_not
    if result == "rejected":
        return may_not if in_doubt else Fail
    if in_doubt:
        return may_send if in_time else may_not
    return Resend if sends == "below" else Fail


def step_after(guarantee: Guarantee, result: SendResult, **changed: Any) -> Step:
    known = {"age_ms": 0, "sends": 1, "in_doubt": False, "timeout_ms": TIMEOUT, "backoff_ms": BACKOFF}
    return next_step(guarantee, result, **{**known, **changed})


def looked_up(guarantee: Guarantee, result: LookupResult, **changed: Any) -> Step:
    known = {
        "age_ms": 10 * LAG,
        "committed_ms": 0,
        "sends": 1,
        "lookups": 1,
        "timeout_ms": TIMEOUT,
        "backoff_ms": BACKOFF,
    }
    return after_lookup(guarantee, result, **{**known, **changed})


@pytest.mark.parametrize(
    ("guarantee", "result", "window", "sends", "in_doubt"),
    list(product(GUARANTEES, RESULTS, AGES, SENDS, (False, True))),
)
def test_what_follows_an_attempt_is_what_the_table_says(
    guarantee: str, result: str, window: str, sends: str, in_doubt: bool
) -> None:
    for age_ms, count in product(AGES[window], SENDS[sends]):
        step = step_after(
            GUARANTEES[guarantee], RESULTS[result], age_ms=age_ms, sends=count, in_doubt=in_doubt
        )
        assert type(step) is expected(guarantee, result, window, sends, in_doubt), step


guarantees = st.one_of(
    st.builds(Keyed, st.integers(0, 10**8), st.none() | st.integers(0, 10**6)),
    st.builds(Lookup, st.integers(0, 10**6)),
    st.just(Unguarded()),
)
results = st.one_of(
    st.sampled_from(list(RESULTS.values())),
    st.builds(NotSent, st.just("busy"), st.just("429"), st.none() | st.integers(0, 10**8)),
)
times = {
    "age_ms": st.integers(0, 10**9),
    "sends": st.integers(1, 20),
    "in_doubt": st.booleans(),
    "timeout_ms": st.integers(1, 10**5),
    "backoff_ms": st.integers(0, 10**5),
}


@given(guarantees, results, st.fixed_dictionaries(times))
def test_in_doubt_only_a_key_that_is_still_recognised_is_sent_again(
    guarantee: Guarantee, result: SendResult, given: dict[str, Any]
) -> None:
    step = next_step(guarantee, result, **given)
    if isinstance(step, Resend) and (given["in_doubt"] or isinstance(result, Ambiguous)):
        assert isinstance(guarantee, Keyed)
        assert given["age_ms"] + step.after_ms + given["timeout_ms"] < guarantee.window_ms


@given(guarantees, results, st.fixed_dictionaries(times))
def test_an_attempt_in_doubt_never_fails_and_an_accepted_one_always_succeeds(
    guarantee: Guarantee, result: SendResult, given: dict[str, Any]
) -> None:
    step = next_step(guarantee, result, **given)
    if given["in_doubt"] or isinstance(result, Ambiguous):
        assert not isinstance(step, Fail)
    assert isinstance(step, Succeed) is isinstance(result, Accepted)


@given(guarantees, results, st.fixed_dictionaries(times))
def test_only_a_provider_that_can_be_asked_is_asked_and_not_before_it_would_know(
    guarantee: Guarantee, result: SendResult, given: dict[str, Any]
) -> None:
    step = next_step(guarantee, result, **given)
    if isinstance(step, AskProvider):
        lag_ms = lookup_lag_ms(guarantee)
        assert lag_ms is not None
        assert step.after_ms >= given["timeout_ms"] + lag_ms


@given(guarantees, results, st.fixed_dictionaries(times))
def test_attempts_are_bounded(guarantee: Guarantee, result: SendResult, given: dict[str, Any]) -> None:
    if given["sends"] >= MAX_SENDS:
        assert not isinstance(next_step(guarantee, result, **given), Resend)


@pytest.mark.parametrize(
    ("retry_after_ms", "pause_ms"), [(None, BACKOFF), (0, BACKOFF), (50, BACKOFF), (9_000, 9_000)]
)
def test_a_provider_that_asks_for_a_pause_gets_it(retry_after_ms: int | None, pause_ms: int) -> None:
    step = step_after(Unguarded(), NotSent("busy", "429", retry_after_ms))
    assert step == Resend(pause_ms, "busy")


def test_a_pause_that_outlasts_the_window_is_no_pause_but_a_question() -> None:
    busy = NotSent("busy", "429", 90_000)
    assert isinstance(step_after(Keyed(WINDOW, LAG), busy, in_doubt=True), AskProvider)
    assert isinstance(step_after(Keyed(WINDOW), busy, in_doubt=True), Park)
    assert step_after(Keyed(WINDOW), busy) == Resend(90_000, "busy")


def test_the_reason_of_a_step_carries_what_the_provider_said() -> None:
    assert step_after(Unguarded(), RESULTS["rejected"]) == Fail("bad: no such customer")
    assert step_after(Unguarded(), RESULTS["ambiguous"]) == Park("timeout: no answer")
    assert step_after(Unguarded(), RESULTS["not sent"], sends=MAX_SENDS) == Fail(
        f"refused after {MAX_SENDS} attempts: connection refused"
    )
    parked = step_after(Unguarded(), RESULTS["rejected"], in_doubt=True)
    assert isinstance(parked, Park)
    assert "an earlier attempt may have been acted upon" in parked.reason
    assert "bad: no such customer" in parked.reason


ASKABLE = [Keyed(WINDOW, LAG), Lookup(LAG)]


@pytest.mark.parametrize("guarantee", list(GUARANTEES.values()), ids=list(GUARANTEES))
def test_what_the_provider_knows_under_our_key_has_succeeded(guarantee: Guarantee) -> None:
    for age_ms in (0, 10 * LAG):
        assert looked_up(guarantee, Accepted("r-1"), age_ms=age_ms, lookups=99) == Succeed("r-1")


@pytest.mark.parametrize("guarantee", ASKABLE, ids=["keyed+lookup", "lookup"])
def test_not_found_is_proof_only_after_the_longest_request_and_the_lag(guarantee: Guarantee) -> None:
    assert looked_up(guarantee, NotFound(), age_ms=TIMEOUT + LAG - 1) == AskProvider(
        1, "asked too early to be proof"
    )
    assert isinstance(looked_up(guarantee, NotFound(), age_ms=TIMEOUT + LAG), Resend)


def test_a_send_that_never_arrives_fails_after_so_many_attempts_though_it_could_be_asked_about() -> None:
    assert isinstance(looked_up(Lookup(LAG), NotFound(), sends=MAX_SENDS - 1), Resend)
    assert isinstance(looked_up(Lookup(LAG), NotFound(), sends=MAX_SENDS), Fail)


def test_not_found_is_no_proof_once_the_provider_may_have_forgotten_the_key() -> None:
    keyed_and_askable = Keyed(WINDOW, LAG)
    assert isinstance(looked_up(keyed_and_askable, NotFound(), committed_ms=WINDOW - 1), Resend)
    assert isinstance(looked_up(keyed_and_askable, NotFound(), committed_ms=WINDOW), Park)
    assert isinstance(looked_up(Lookup(LAG), NotFound(), committed_ms=WINDOW), Resend)


@given(guarantees, st.integers(0, 10**7), st.integers(1, 20), st.integers(1, 10**5), st.integers(0, 10**5))
def test_not_found_never_fails_and_is_asked_again_exactly_when_it_can_be_proof(
    guarantee: Guarantee, age_ms: int, lookups: int, timeout_ms: int, backoff_ms: int
) -> None:
    step = after_lookup(
        guarantee,
        NotFound(),
        age_ms=age_ms,
        committed_ms=0,
        sends=1,
        lookups=lookups,
        timeout_ms=timeout_ms,
        backoff_ms=backoff_ms,
    )
    lag_ms = lookup_lag_ms(guarantee)
    match step:
        case Resend():
            assert lag_ms is not None
            assert age_ms >= timeout_ms + lag_ms
        case AskProvider(after_ms):
            assert lag_ms is not None
            assert after_ms > 0
            assert age_ms + after_ms == timeout_ms + lag_ms
        case Park():
            assert lag_ms is None
        case _:
            raise AssertionError(step)


@pytest.mark.parametrize("guarantee", ASKABLE, ids=["keyed+lookup", "lookup"])
def test_a_provider_that_cannot_answer_is_asked_again_then_left_to_a_person(guarantee: Guarantee) -> None:
    silent = Ambiguous("timeout", "no answer")
    assert looked_up(guarantee, silent, lookups=MAX_LOOKUPS - 1) == AskProvider(BACKOFF, "timeout: no answer")
    assert looked_up(guarantee, silent, lookups=MAX_LOOKUPS) == Park(
        "the provider could not be asked: timeout: no answer"
    )


def test_only_some_guarantees_can_be_asked() -> None:
    assert [lookup_lag_ms(guarantee) for guarantee in GUARANTEES.values()] == [None, LAG, LAG, None]


def test_a_window_is_given_in_hours() -> None:
    assert keyed(hours=24) == Keyed(86_400_000)
    assert keyed(hours=0.5, lookup_lag=timedelta(seconds=2)) == Keyed(1_800_000, 2_000)


@pytest.mark.parametrize("guarantee", list(GUARANTEES.values()), ids=list(GUARANTEES))
def test_a_guarantee_is_read_back_from_what_is_stored(guarantee: Guarantee) -> None:
    assert msgspec.json.decode(msgspec.json.encode(guarantee), type=Guarantee) == guarantee


def test_the_key_is_a_function_of_the_decision_alone_and_differs_between_its_effects() -> None:
    assert operation_key("d-1", "send-quote", 0) == "d-1.send-quote.0"
    keys = {operation_key(d, e, n) for d, e, n in product(("d-1", "d-2"), ("a", "b"), range(3))}
    assert len(keys) == 12


def test_a_payload_is_read_as_the_json_it_is() -> None:
    assert payload_json(b'{"a":[1,null]}') == {"a": [1, None]}
