"""What follows for an operation from the state of its siblings (I7, I12)."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.effect import OperationState
from coordinator.core.saga import (
    COMPENSATION_ORDINALS,
    NEVER,
    Cancel,
    Compensate,
    Compensated,
    Link,
    Release,
    Uncompensated,
    consequences,
)


def op(ordinal: int, state: OperationState = "succeeded", **other: Any) -> Link:
    return Link(ordinal=ordinal, effect=f"e{ordinal}", state=state, **other)


def waiting(ordinal: int, *after: int, **other: Any) -> Link:
    return op(ordinal, "ready", after=after, waiting=True, **other)


def undo(ordinal: int, state: OperationState, **other: Any) -> Link:
    """The compensation of an operation."""
    return op(ordinal + COMPENSATION_ORDINALS, state, compensates=ordinal, **other)


def test_what_waits_is_released_once_all_it_waits_for_has_succeeded() -> None:
    assert consequences([op(0), op(1, "dispatching"), waiting(2, 0, 1)]) == []
    assert consequences([op(0), op(1), waiting(2, 0, 1)]) == [Release(2)]


@pytest.mark.parametrize("state", NEVER)
def test_what_waits_for_something_that_never_will_is_cancelled_and_so_is_what_waits_for_it(
    state: OperationState,
) -> None:
    assert consequences([op(0, state), waiting(1, 0), waiting(2, 1), waiting(3)]) == [
        Cancel(1, f"effect e0 is {state}"),
        Cancel(2, "effect e1 is cancelled"),
        Release(3),
    ]


@pytest.mark.parametrize("state", ["ready", "dispatching", "uncertain"])
def test_what_may_still_succeed_is_waited_for(state: OperationState) -> None:
    assert consequences([op(0, state), waiting(1, 0)]) == []


def test_a_failure_undoes_what_happened_where_the_outcome_says_so_and_it_can_be_undone() -> None:
    links = [
        op(0, has_compensation=True, on_failure="compensate"),
        op(1, on_failure="compensate"),
        op(2, "failed", on_failure="compensate"),
    ]
    assert consequences(links) == [Compensate(0, "effect e2 failed")]


def test_a_failure_leaves_the_others_alone_unless_the_outcome_says_otherwise() -> None:
    assert consequences([op(0, has_compensation=True), op(1, "failed")]) == []


def test_an_uncertain_sibling_undoes_nothing() -> None:
    assert consequences([op(0, has_compensation=True, on_failure="compensate"), op(1, "uncertain")]) == []


def test_nothing_is_sent_after_something_that_is_being_undone_whatever_the_order_of_the_rows() -> None:
    links = [
        waiting(2, 0, on_failure="compensate"),
        op(0, has_compensation=True, on_failure="compensate"),
        op(1, "failed", on_failure="compensate"),
    ]
    assert consequences(links) == [
        Compensate(0, "effect e1 failed"),
        Cancel(2, "effect e1 is failed"),
    ]


def test_asking_to_cancel_undoes_what_can_be_undone() -> None:
    links = [op(0, has_compensation=True, cancel_requested=True), op(1, cancel_requested=True)]
    assert consequences(links) == [Compensate(0, "cancelling was asked for")]


@pytest.mark.parametrize("state", ["ready", "dispatching", "uncertain"])
def test_a_compensation_under_way_decides_nothing(state: OperationState) -> None:
    assert consequences([op(0, "compensating", has_compensation=True), undo(0, state)]) == []


def test_what_a_compensation_undid_is_compensated() -> None:
    assert consequences([op(0, "compensating"), undo(0, "succeeded")]) == [Compensated(0)]


def test_what_could_not_be_undone_did_happen_and_is_not_tried_again() -> None:
    links = [
        op(0, "compensating", has_compensation=True, cancel_requested=True, on_failure="compensate"),
        undo(0, "failed", reason="gone: no such order"),
        op(1, "failed", on_failure="compensate"),
    ]
    assert consequences(links) == [Uncompensated(0, "its compensation e1000 failed: gone: no such order")]


def test_a_failed_compensation_is_no_failed_effect() -> None:
    links = [
        op(0, "succeeded", reason="its compensation failed", on_failure="compensate"),
        undo(0, "failed"),
        op(1, has_compensation=True, on_failure="compensate"),
    ]
    assert consequences(links) == []


@st.composite
def decisions(draw: st.DrawFn) -> list[Link]:
    states = st.sampled_from(get_args(OperationState))
    policy = draw(st.sampled_from(["keep", "compensate"]))
    links = []
    for ordinal in range(draw(st.integers(1, 6))):
        waits = draw(st.booleans())
        has_compensation = draw(st.booleans())
        link = op(
            ordinal,
            "ready" if waits else draw(states),
            waiting=waits,
            after=draw(st.lists(st.sampled_from(range(ordinal)), unique=True)) if ordinal else [],
            has_compensation=has_compensation,
            on_failure=policy,
            cancel_requested=draw(st.booleans()),
        )
        links.append(link)
        if has_compensation and link.state == "compensating":
            links.append(undo(ordinal, draw(states)))
    return list(draw(st.permutations(links)))


@given(decisions())
def test_consequences_touch_each_operation_once_and_leave_the_question_as_it_was(
    links: list[Link],
) -> None:
    before = repr(links)
    found = consequences(links)
    assert repr(links) == before
    assert consequences(reversed(links)) == found
    for link in links:
        assert [step.ordinal for step in found].count(link.ordinal) <= 1


@given(decisions())
def test_nothing_is_released_whose_predecessors_do_not_stand(links: list[Link]) -> None:
    found = consequences(links)
    undone = {step.ordinal for step in found if isinstance(step, Compensate | Cancel)}
    states = {link.ordinal: link.state for link in links}
    restored = {step.ordinal for step in found if isinstance(step, Uncompensated)}
    for step in found:
        if isinstance(step, Release):
            (link,) = (each for each in links if each.ordinal == step.ordinal)
            for before in link.after:
                assert before not in undone
                assert states[before] == "succeeded" or before in restored
