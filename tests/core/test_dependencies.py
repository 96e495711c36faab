"""What comes after what is checked when it is declared, and the message names the line to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import Commit, Evidence, decision_type
from coordinator.core.dependencies import closure
from coordinator.errors import DeclarationError
from tests.core.declaring import Capacity, FixedSource


class Request(msgspec.Struct, frozen=True):
    site: str
    sites: list[str]


class Addressed(FixedSource[Capacity]):
    def __init__(self, *paths: str) -> None:
        super().__init__(Capacity)
        self.asks_for = paths


def declare(*evidence: Evidence[Any, Any]) -> Any:
    return decision_type(
        "quote", request=Request, policy=lambda *_: Commit({}), policy_version="1", evidence=evidence
    )


def for_each(path: str, source: Any = None, after: Sequence[str] = (), **more: Any) -> Evidence[Any, Any]:
    return Evidence(
        "each-site", source or FixedSource(Capacity), deadline_ms=10, for_each=path, after=after, **more
    )


def plain(name: str) -> Evidence[Any, Any]:
    return Evidence(name, FixedSource(Capacity), deadline_ms=10)


def test_a_list_of_the_request_or_of_earlier_evidence_is_read_for_each() -> None:
    declare(for_each("input.sites"))
    declare(plain("order"), for_each("evidence.order.lines", after=["order"]))
    declare(for_each("input.sites", Addressed("each", "each.id", "input.site")))


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("input.nothing", "has no 'nothing'"),
        ("evidence.order.lines", "add after="),
        ("evidence.order", "must be a path"),
        ("sites", "must be a path"),
        ("input", "must be a path"),
        ("record.id", "must be a path"),
        ("", "must be a path"),
    ],
)
def test_a_list_that_will_not_be_there_is_refused(path: str, what: str) -> None:
    with pytest.raises(DeclarationError, match=what) as wrong:
        declare(for_each(path))
    assert "test_dependencies.py:" in str(wrong.value)


def test_one_of_a_list_can_only_be_asked_for_where_there_is_a_list() -> None:
    with pytest.raises(DeclarationError, match="for_each"):
        declare(Evidence("a", Addressed("each.id"), deadline_ms=10))


def test_the_name_of_one_of_a_list_is_taken() -> None:
    with pytest.raises(DeclarationError, match="what for_each calls"):
        declare(plain("each"))


@pytest.mark.parametrize(
    "more",
    [{"max_items": 0}, {"max_items": 1001}, {"max_items": True}, {"need": -1}, {"need": 6, "max_items": 5}],
)
def test_a_list_is_bounded(more: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match="max_items"):
        for_each("input.sites", **more)


def test_conditional_evidence_cannot_be_required() -> None:
    with pytest.raises(DeclarationError, match="conditional evidence must be required=False"):
        Evidence("a", FixedSource(Capacity), deadline_ms=10, when=lambda *_: True)  # type: ignore[call-overload]  # what the message is for


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    names = [f"e{n}" for n in range(draw(st.integers(0, 8)))]
    return {
        name: draw(st.lists(st.sampled_from(names[:n]), unique=True)) if n else []
        for n, name in enumerate(names)
    }


@given(graphs())
def test_what_comes_before_includes_what_comes_before_that(after: dict[str, list[str]]) -> None:
    before = closure(after)
    for name, direct in after.items():
        assert set(before[name]) == set(direct).union(*(before[each] for each in direct))
        assert [each for each in after if each in before[name]] == list(before[name])
