"""A wrong declaration is an error when the module loads, and names the user's line to mend."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import (
    Coordinator,
    DecisionType,
    Evidence,
    Outcome,
    Packet,
    Record,
    RecordKind,
    decision_type,
)
from coordinator.core.decision import RESTING, Closable, Status
from coordinator.core.dependencies import MAX_EVIDENCE
from coordinator.core.evidence import Optional, Required
from coordinator.core.money import Money
from coordinator.errors import DeclarationError
from tests.core.declaring import (
    Capacity,
    FixedSink,
    FixedSource,
    Request,
    capacity_source,
    optional,
    promise_nothing,
    required,
)

HERE = Path(__file__).name


def declare(
    name: str = "quote", evidence: list[Evidence[Any, Any]] | None = None, **other: Any
) -> DecisionType[Any, Any]:
    known = {"request": Request, "policy": promise_nothing, "policy_version": "1", **other}
    return decision_type(name, evidence=evidence or [], **known)


def mistake(declaring: Callable[[], object], line: int | None = None, file: str = HERE) -> str:
    """The message of the error, once its place is checked: the lambda's own line unless another is given."""
    with pytest.raises(DeclarationError) as wrong:
        declaring()
    where = f"{file}:{line or declaring.__code__.co_firstlineno}"
    assert wrong.value.where == where
    assert str(wrong.value).startswith(f"{where}: ")
    return str(wrong.value).removeprefix(f"{where}: ")


def line_of(evidence: Evidence[Any, Any]) -> int:
    return int(evidence.where.rpartition(":")[2])


async def fetch(request: Request, packet: Packet, record: Record[Any]) -> Outcome:
    raise AssertionError("never runs")


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"request": dict}, "request must be a msgspec.Struct"),
    ({"request": int | str}, "request must be a msgspec.Struct"),
    ({"policy": fetch}, "policy must be a plain function"),
    ({"policy": functools.partial(fetch)}, "policy must be a plain function"),
    ({"policy_version": ""}, "policy_version is empty"),
    ({"time_limit_ms": 0}, "time_limit_ms must be within"),
    ({"time_limit_ms": 3_600_001}, "time_limit_ms must be within"),
    ({"max_rounds": 0}, "max_rounds must be within"),
    ({"max_rounds": 101}, "max_rounds must be within"),
    ({"effects": [FixedSink("send"), FixedSink("send")]}, "effect 'send' is declared twice"),
    ({"effects": [FixedSink("Send quote")]}, "effect 'Send quote': a name is"),
]
BAD_NAMES = ["", "Quote", "1st", "-a", "a_b", "a b", "a/b", "a.b", "é", "a" * 64, "a\n"]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_a_wrong_argument_of_a_decision_type_names_the_line_of_the_call(
    arguments: dict[str, Any], message: str
) -> None:
    known: dict[str, Any] = {
        "request": Request,
        "policy": promise_nothing,
        "policy_version": "1",
        **arguments,
    }
    assert message in mistake(lambda: decision_type("quote", evidence=[], **known))


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_fits_no_url_is_refused_for_whatever_has_a_name(name: str) -> None:
    unnamed, kind = required_here(name), RecordKind(name, Capacity)
    kind_line = line_here() - 1
    assert "a name is" in mistake(
        lambda: decision_type(name, request=Request, policy=promise_nothing, policy_version="1", evidence=[])
    )
    assert "a name is" in mistake(lambda: declare(evidence=[unnamed]), line_of(unnamed))
    assert "a name is" in mistake(lambda: Coordinator([declare()], records=[kind]), kind_line)


def required_here(name: str, **other: Any) -> Evidence[Any, Any]:
    """Declared in this file, as a user would in theirs."""
    return Evidence(name, capacity_source, deadline_ms=other.pop("deadline_ms", 500), **other)


def line_here() -> int:
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("name", ["a", "a1", "send-quote", "a" * 63])
def test_a_short_lower_case_name_is_accepted(name: str) -> None:
    assert declare(name).name == name


def test_evidence_without_a_deadline_is_refused() -> None:
    assert "add deadline_ms" in mistake(lambda: Evidence("capacity", capacity_source))


@pytest.mark.parametrize("deadline_ms", [0, -1, 3_600_001, 10**12])
def test_a_deadline_is_neither_zero_nor_unbounded(deadline_ms: int) -> None:
    assert "deadline_ms must be within 1..3600000" in mistake(
        lambda: Evidence("capacity", capacity_source, deadline_ms=deadline_ms)
    )


@pytest.mark.parametrize("attempts", [0, 11])
def test_attempts_are_neither_zero_nor_unbounded(attempts: int) -> None:
    assert "attempts must be within 1..10" in mistake(
        lambda: Evidence("capacity", capacity_source, deadline_ms=5, attempts=attempts)
    )


def test_on_demand_evidence_cannot_be_required() -> None:
    wrong: dict[str, Any] = {"on_demand": True}
    assert "must be required=False" in mistake(
        lambda: Evidence("capacity", capacity_source, deadline_ms=5, **wrong)
    )


@pytest.mark.parametrize("returns", [dict, int, str | None, Capacity | None, list[Capacity]])
def test_a_source_that_returns_no_struct_is_refused(returns: Any) -> None:
    source: FixedSource[Any] = FixedSource(returns)
    assert "must be a msgspec.Struct" in mistake(lambda: Evidence("capacity", source, deadline_ms=5))


def test_evidence_after_something_unknown_names_its_own_line() -> None:
    late = required("late", after=["early"])
    message = mistake(lambda: declare(evidence=[required("capacity"), late]), line_of(late), "declaring.py")
    assert message == "evidence 'late' comes after 'early', which is not declared here"


def test_a_single_name_instead_of_a_list_of_names_is_refused() -> None:
    late = required_here("late", after="capacity")
    assert "comes after 'c'" in mistake(lambda: declare(evidence=[required("capacity"), late]), line_of(late))


def test_evidence_declared_twice_names_the_second_line() -> None:
    first = required_here("capacity")
    second = required_here("capacity")
    assert "declared twice" in mistake(lambda: declare(evidence=[first, second]), line_of(second))


def test_evidence_that_comes_after_itself_is_refused() -> None:
    alone = required_here("alone", after=["alone"])
    message = mistake(lambda: declare(evidence=[required("other"), alone]), line_of(alone))
    assert message == "evidence depends on itself: alone after alone"


def test_a_cycle_is_named_by_its_members_and_not_by_what_merely_waits_for_it() -> None:
    waits = Evidence("waits", capacity_source, deadline_ms=5, after=["a"])
    a = Evidence("a", capacity_source, deadline_ms=5, after=["start", "c"])
    b = Evidence("b", capacity_source, deadline_ms=5, after=["a"])
    c = Evidence("c", capacity_source, deadline_ms=5, after=["b"])
    start = Evidence("start", capacity_source, deadline_ms=5)
    message = mistake(lambda: declare(evidence=[waits, a, b, c, start]), line_of(a))
    assert message == "evidence depends on itself: a after c after b after a"


def test_evidence_that_is_always_read_cannot_come_after_what_may_not_be() -> None:
    eager = required_here("eager", after=["maybe"])
    assert "make both on_demand" in mistake(
        lambda: declare(evidence=[optional("maybe", on_demand=True), eager]), line_of(eager)
    )
    declare(evidence=[optional("maybe", on_demand=True), optional("then", ["maybe"], on_demand=True)])


def test_the_number_of_pieces_of_evidence_is_bounded() -> None:
    some: list[Evidence[Any, Any]] = [required(f"e{number}") for number in range(MAX_EVIDENCE + 1)]
    known: dict[str, Any] = {"request": Request, "policy": promise_nothing, "policy_version": "1"}
    assert "at most 64" in mistake(lambda: decision_type("quote", evidence=some, **known))
    assert len(declare(evidence=some[:-1]).evidence) == MAX_EVIDENCE


def test_evidence_that_reserves_in_two_currencies_is_refused() -> None:
    some: list[Evidence[Any, Any]] = [
        required("a", reserves=Money(1, "SGD")),
        required("b", reserves=Money(1, "JPY")),
    ]
    known: dict[str, Any] = {"request": Request, "policy": promise_nothing, "policy_version": "1"}
    assert "more than one currency" in mistake(lambda: decision_type("quote", evidence=some, **known))


def test_a_type_declared_twice_names_the_second_line() -> None:
    first, second = declare(), quote_of_this_file()
    line = int(second.where.rpartition(":")[2])
    assert "decision type 'quote' is declared twice" in mistake(lambda: Coordinator([first, second]), line)


def quote_of_this_file(record: RecordKind[Any] | None = None) -> DecisionType[Request, Any]:
    return decision_type(
        "quote", request=Request, policy=promise_nothing, policy_version="1", evidence=[], record=record
    )


def test_a_coordinator_without_types_is_refused() -> None:
    assert "at least one decision type" in mistake(lambda: Coordinator([]))


@pytest.mark.parametrize("given_in", ["records", "types", "both"])
def test_a_record_kind_declared_twice_names_the_second_line(given_in: str) -> None:
    first, second = RecordKind("stock", Capacity), RecordKind("stock", Capacity)
    line = line_here() - 1
    types = [declare("other", record=first if given_in == "types" else None)]
    types.append(declare("quote", record=None if given_in == "records" else second))
    records = {"records": [first, second], "types": [], "both": [first]}[given_in]
    assert "record kind 'stock' is declared twice" in mistake(
        lambda: Coordinator(types, records=records), line
    )


def test_one_record_kind_may_serve_many_types() -> None:
    kind = RecordKind("stock", Capacity)
    made = Coordinator([declare("a", record=kind), declare("b", record=kind)], records=[kind])
    assert made.record_kinds == {"stock": kind}


def test_a_record_kind_holds_structs() -> None:
    wrong: Any = dict
    assert "data must be a msgspec.Struct" in mistake(lambda: RecordKind("stock", wrong))


def test_the_effects_of_each_type_are_its_own() -> None:
    one, two = FixedSink("send"), FixedSink("send")
    made = Coordinator([declare("a", effects=[one]), declare("b", effects=[two])])
    assert made.sinks == {("a", "send"): one, ("b", "send"): two}


def test_what_holds_something_open_is_found_among_sources_and_sinks() -> None:
    class OpenSink(FixedSink):
        async def aclose(self) -> None: ...

    class OpenSource(FixedSource[Capacity]):
        async def aclose(self) -> None: ...

    source, sink = OpenSource(Capacity), OpenSink("send")
    declared = declare(
        evidence=[Evidence("a", source, deadline_ms=5), required("b")], effects=[sink, FixedSink("other")]
    )
    found: list[Closable] = Coordinator([declared]).closables()
    assert found == [source, sink]


def test_resting_states_are_all_states_but_two() -> None:
    assert set(get_args(Status)) - RESTING == {"queued", "running"}
    assert set(get_args(Status)) > RESTING


def test_a_type_knows_what_each_piece_of_evidence_is_decoded_as() -> None:
    declared = declare(evidence=[required("capacity")])
    assert declared.types == {"capacity": Capacity}
    assert re.fullmatch(rf"{HERE}:\d+", declared.where)


def test_a_request_may_be_one_of_several_structs() -> None:
    class A(msgspec.Struct, tag=True):
        x: int

    class B(msgspec.Struct, tag=True):
        y: int

    assert declare(request=A | B).name == "quote"


@st.composite
def graphs(draw: st.DrawFn) -> list[Evidence[Capacity, Required] | Evidence[Capacity, Optional]]:
    """Evidence without a cycle, declared in any order."""
    count = draw(st.integers(1, 12))
    made = [
        required(
            f"e{n}", draw(st.lists(st.sampled_from([f"e{m}" for m in range(n)]), unique=True)) if n else []
        )
        for n in range(count)
    ]
    return list(draw(st.permutations(made)))


@given(graphs())
def test_evidence_is_put_into_an_order_in_which_each_follows_what_it_comes_after(
    some: list[Evidence[Any, Any]],
) -> None:
    ordered = list(declare(evidence=some).evidence)
    assert sorted(ordered) == sorted(each.name for each in some)
    for each in some:
        for before in each.after:
            assert ordered.index(before) < ordered.index(each.name)


@given(graphs(), st.data())
def test_any_edge_against_the_order_is_found_as_a_cycle(
    some: list[Evidence[Any, Any]], data: st.DataObject
) -> None:
    ordered = declare(evidence=some).evidence
    last = data.draw(st.sampled_from(sorted(ordered)))
    first = {last}
    for name in reversed(list(ordered)):
        if any(name in ordered[later].after for later in first):
            first.add(name)
    closing = data.draw(st.sampled_from(sorted(first)))
    looped = [required(each.name, [*each.after, last]) if each.name == closing else each for each in some]
    with pytest.raises(DeclarationError, match="evidence depends on itself") as wrong:
        declare(evidence=looped)
    *names, again = str(wrong.value).rpartition(": ")[2].split(" after ")
    by_name = {each.name: each for each in looped}
    assert names[0] == again
    for name, before in zip(names, [*names[1:], again], strict=True):
        assert before in by_name[name].after


class AddressedSource(FixedSource[Capacity]):
    """Its address is made of these."""

    def __init__(self, *asks_for: str) -> None:
        super().__init__(Capacity)
        self.asks_for = asks_for


@pytest.mark.parametrize(
    ("path", "says"),
    [("input.nope", "the request has no 'nope'"), ("evidence.other.crew", "add after=['other']")],
)
def test_an_address_made_of_what_is_not_there_is_refused(path: str, says: str) -> None:
    addressed = Evidence("one", AddressedSource(path), deadline_ms=1)
    assert says in mistake(lambda: declare(evidence=[addressed]), line_of(addressed))


def test_a_policy_of_another_arity_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"must take \(request, packet, record\)"):
        declare(policy=lambda request: None)
