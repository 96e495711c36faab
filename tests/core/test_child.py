"""Decisions that ask for each other are found when they are declared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.decision import DecisionSource
from adapters.template import NoValue
from coordinator import Commit, Coordinator, Evidence, decision_type, money
from coordinator.core.child import ChildAsk, ChildSource, circle
from coordinator.core.evidence import ReadRequest
from coordinator.errors import DeclarationError


class Ask(msgspec.Struct, frozen=True):
    value: int = 0
    name: str = "n"


class Terms(msgspec.Struct, frozen=True):
    total: int


@st.composite
def asking(draw: st.DrawFn) -> dict[str, list[str]]:
    names = [f"t{n}" for n in range(draw(st.integers(1, 6)))]
    return {name: draw(st.lists(st.sampled_from(names), max_size=3)) for name in names}


def reachable(asks: dict[str, list[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(asks[start])
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += asks[name]
    return seen


@given(asking())
def test_a_circle_is_found_if_there_is_one_and_is_one(asks: dict[str, list[str]]) -> None:
    found = circle(asks)
    assert bool(found) == any(name in reachable(asks, name) for name in asks)
    for asker, asked in zip(found, found[1:] + found[:1], strict=True):
        assert asked in asks[asker]


def declared(name: str, *asks: str) -> Any:
    evidence = [
        Evidence(f"from-{other}", DecisionSource("d", type=other, terms=Terms), deadline_ms=100)
        for other in asks
    ]
    return decision_type(
        name, request=Ask, policy=lambda *_: Commit({}), policy_version="1", evidence=evidence
    )


def test_types_that_ask_for_each_other_do_not_load() -> None:
    Coordinator([declared("a", "b", "c"), declared("b", "c"), declared("c")])
    with pytest.raises(DeclarationError, match="wait for each other: a asks for b asks for a") as wrong:
        Coordinator([declared("a", "b"), declared("b", "a")])
    assert "test_child.py:" in str(wrong.value)


def test_a_type_that_nobody_declares_cannot_be_asked_for() -> None:
    with pytest.raises(DeclarationError, match="of type 'nothing'; there are a"):
        Coordinator([declared("a", "nothing")])


def test_a_child_reserves_for_itself() -> None:
    source = DecisionSource("d", type="b", terms=Terms)
    with pytest.raises(DeclarationError, match="reserves for itself"):
        Evidence("a", source, deadline_ms=100, reserves=money("1 SGD"))


@pytest.mark.parametrize(
    "more", [{"type": "B!"}, {"terms": int}, {"key": "{nothing}"}, {"input": {"value": "{input}{"}}]
)
def test_what_cannot_be_asked_does_not_load(more: dict[str, Any]) -> None:
    limits: dict[str, Any] = {"type": "b", "terms": Terms}
    with pytest.raises(DeclarationError):
        DecisionSource("d", **limits | more)


def request(**evidence: Any) -> ReadRequest:
    return ReadRequest(
        tenant="t",
        input=Ask(7, "a b"),
        evidence=evidence,
        record_kind="proposal",
        record_id="p-1",
        if_revision=None,
        timeout_s=1.0,
        traceparent="",
        on_cancel=lambda _: None,
    )


def test_a_placeholder_alone_stands_for_the_value_as_it_is() -> None:
    source = DecisionSource(
        "d",
        type="b",
        terms=Terms,
        input={
            "n": "{input.value}",
            "text": "no. {input.value}",
            "list": [1],
            "of": "{evidence.order.lines}",
        },
        record=("proposal", "{record.id}"),
        key="{input.name}",
    )
    assert isinstance(source, ChildSource)
    assert source.ask_child(request(order={"lines": [1, 2]})) == ChildAsk(
        {"n": 7, "text": "no. 7", "list": [1], "of": [1, 2]}, ("proposal", "p-1"), "a%20b"
    )
    assert set(source.asks_for) == {"input.value", "evidence.order.lines", "record.id", "input.name"}
    with pytest.raises(NoValue):
        source.ask_child(request(order={}))


def test_a_child_is_asked_what_a_function_makes_of_the_request_or_what_the_parent_was_asked() -> None:
    by_function = DecisionSource(
        "d", type="b", terms=Terms, input=lambda ask, seen: Ask(ask.value + 1, str(seen["x"]))
    )
    assert by_function.ask_child(request(x="y")).input == {"value": 8, "name": "y"}
    assert DecisionSource("d", type="b", terms=Terms).ask_child(request()).input == {
        "value": 7,
        "name": "a b",
    }


@pytest.mark.parametrize("junk", [object(), 5, [1], {"a": float("nan")}])
def test_a_function_that_makes_no_json_object_asks_for_nothing(junk: object) -> None:
    source = DecisionSource("d", type="b", terms=Terms, input=lambda ask, seen: junk)
    with pytest.raises(ValueError, match="of a b"):
        source.ask_child(request())
