"""When two readings are the same question: exactly when the source cannot tell their requests apart, and never for two tenants."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.evidence import ReadRequest
from coordinator.core.likeness import asker


class Ask(msgspec.Struct, frozen=True):
    site: Any = None
    hours: Any = 0


class Other(msgspec.Struct, frozen=True):
    site: Any = None
    hours: Any = 0


class Whole:
    """Sees all of a request."""


class Addressed:
    def __init__(self, *paths: str) -> None:
        self.asks_for = paths


class Alone(Whole):
    shares = False


async def _never(_: object) -> None: ...


def request(
    input: object = Ask(), evidence: dict[str, Any] | None = None, id: str = "r-1", tenant: str = "one"
) -> ReadRequest:
    return ReadRequest(
        tenant=tenant,
        input=input,
        evidence=evidence or {},
        record_kind="proposal",
        record_id=id,
        if_revision=None,
        timeout_s=1.0,
        traceparent="",
        on_cancel=lambda _: None,
    )


plain = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0]) | st.text("ab", max_size=2)
)
evidence = st.dictionaries(st.sampled_from("xy"), plain, max_size=2)


def shape(value: object) -> object:
    """Equal for the same JSON only: Python's True == 1 == 1.0 is not that."""
    if isinstance(value, dict):
        return frozenset((key, shape(member)) for key, member in value.items())
    return (type(value).__name__, value)


@given(plain, plain, plain, plain, evidence, evidence, st.sampled_from(["r-1", "r-2"]))
def test_a_source_that_sees_everything_is_asked_the_same_only_by_equal_requests(
    site: Any, hours: Any, other_site: Any, other_hours: Any, seen: Any, other_seen: Any, id: str
) -> None:
    ask = asker(Whole())
    one, two = request(Ask(site, hours), seen), request(Ask(other_site, other_hours), other_seen, id)
    equal = (shape(site), shape(hours), shape(seen), "r-1") == (
        shape(other_site),
        shape(other_hours),
        shape(other_seen),
        id,
    )
    assert (ask(one) == ask(two)) == equal


@given(plain, plain, plain, plain, evidence)
def test_a_source_with_an_address_is_asked_the_same_by_whoever_names_that_address(
    site: Any, hours: Any, other_site: Any, other_hours: Any, seen: Any
) -> None:
    ask = asker(Addressed("input.site"))
    one, two = request(Ask(site, hours)), request(Ask(other_site, other_hours), seen, "another")
    assert (ask(one) == ask(two)) == (shape(site) == shape(other_site))


@pytest.mark.parametrize(
    ("path", "different"),
    [
        ("input.site", request(Ask("b"), {"cost": {"amount": 1}})),
        ("evidence.cost.amount", request(Ask("a"), {"cost": {"amount": 2}})),
        ("record.id", request(Ask("a"), {"cost": {"amount": 1}}, id="r-2")),
    ],
)
def test_each_part_of_an_address_counts(path: str, different: ReadRequest) -> None:
    ask = asker(Addressed(path))
    same = request(Ask("a"), {"cost": {"amount": 1}})
    assert ask(same) == ask(same) != ask(different)


@given(st.sampled_from([Whole(), Addressed("input.site"), Addressed("tenant"), Addressed()]))
def test_two_tenants_never_ask_the_same(source: object) -> None:
    ask = asker(source)
    assert ask(request(tenant="one")) != ask(request(tenant="two"))


def test_two_sources_are_never_asked_the_same() -> None:
    assert asker(Addressed("input.site"))(request()) != asker(Addressed("input.site"))(request())


def test_two_request_types_with_equal_fields_are_not_the_same_to_a_source_that_sees_them() -> None:
    ask = asker(Whole())
    assert ask(request(Ask("a"))) != ask(request(Other("a")))


def test_a_long_question_is_kept_short() -> None:
    question = asker(Whole())(request(Ask("x" * 100_000)))
    assert question is not None
    assert len(repr(question)) < 500
    assert question != asker(Whole())(request(Ask("x" * 100_001)))


def test_a_source_that_is_read_for_one_decision_alone_and_a_request_that_is_no_json_share_with_nobody() -> (
    None
):
    assert asker(Alone())(request()) is None
    assert asker(Whole())(request(Ask(object()))) is None
