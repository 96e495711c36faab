"""The packet is frozen: its digest stands for its content, and the policy reads what is stored, not what was in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.canonical import canonical, digest, parse
from coordinator.core.evidence import Evidence, Item, ItemError, State
from coordinator.core.money import Money
from coordinator.core.packet import Missing, MissingEvidence, Packet, Present
from tests.core.declaring import Capacity, FixedSource, item, optional, required

CAPACITY = required("capacity")
TONE = optional("tone")
TYPES: dict[str, Any] = {"capacity": Capacity, "tone": Capacity}
NOT_FOUND = [state for state in get_args(State) if state != "found"]

WHOLE = item(
    "capacity",
    {"available_hours": 40.5, "crew": None},
    revision='"3"',
    cost=Money(40, "SGD"),
    confidence=0.9,
    interval=(38.0, 42.5),
    error=None,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
items = st.builds(
    Item,
    name=st.sampled_from(["capacity", "tone"]),
    source=st.sampled_from(["planner", "writer"]),
    state=st.sampled_from(get_args(State)),
    value=values,
    revision=st.none() | st.text(max_size=3),
    observed_at=st.just("2026-03-01T08:00:00.000000Z"),
    freshness=st.sampled_from([{"kind": "snapshot"}, {"kind": "decisive", "fields": ["crew"]}]),
    elapsed_ms=st.integers(0, 3),
    attempts=st.integers(0, 2),
    error=st.none() | st.builds(ItemError, code=st.just("gone"), message=st.text(max_size=3)),
    cost=st.none() | st.builds(Money, amount_minor=st.integers(0, 3), currency=st.just("SGD")),
    confidence=st.none() | st.floats(0, 1),
    interval=st.none() | st.tuples(st.floats(0, 1), st.floats(1, 2)),
    reading=st.sampled_from(["own", "shared"]),
)


def test_the_bytes_are_the_canonical_json_of_the_items() -> None:
    packet = Packet([WHOLE, item("tone", state="absent")], TYPES)
    shown = msgspec.json.encode([msgspec.to_builtins(each) for each in packet.items])
    assert packet.bytes == canonical(parse(shown))
    assert packet.digest == digest(packet.bytes)


@given(st.lists(items, max_size=3))
def test_a_packet_decoded_from_its_bytes_is_the_same_packet(some: list[Item]) -> None:
    packet = Packet(some, TYPES)
    again = Packet(msgspec.json.decode(packet.bytes, type=list[Item]), TYPES)
    assert again.items == packet.items
    assert (again.bytes, again.digest) == (packet.bytes, packet.digest)


@given(st.lists(items, max_size=2), st.lists(items, max_size=2))
def test_two_packets_have_one_digest_only_if_they_have_one_content(one: list[Item], two: list[Item]) -> None:
    same = canonical(one) == canonical(two)
    assert (Packet(one, TYPES).digest == Packet(two, TYPES).digest) is same


@pytest.mark.parametrize(
    "change",
    [
        {"name": "tone"},
        {"source": "elsewhere"},
        {"state": "absent"},
        {"value": {"available_hours": 40.5, "crew": 0}},
        {"value": {"available_hours": 40.5}},
        {"value": None},
        {"revision": None},
        {"observed_at": "2026-03-01T08:00:00.000001Z"},
        {"freshness": {"kind": "max-age", "max_age_ms": 5}},
        {"elapsed_ms": 13},
        {"attempts": 2},
        {"error": ItemError("late", "too late")},
        {"cost": Money(41, "SGD")},
        {"confidence": None},
        {"interval": (38.0, 42.0)},
        {"reading": "shared"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_any_member_changes_the_digest(change: dict[str, Any]) -> None:
    assert Packet([msgspec.structs.replace(WHOLE, **change)], TYPES).digest != Packet([WHOLE], TYPES).digest


def test_every_member_of_an_item_is_among_the_changes_tried() -> None:
    marks = test_a_change_of_any_member_changes_the_digest.pytestmark
    tried = {name for change in marks[0].args[1] for name in change}
    assert tried == set(Item.__struct_fields__)


def test_the_order_of_the_items_is_part_of_the_content() -> None:
    one, two = item("capacity", {}), item("tone", {})
    assert Packet([one, two], TYPES).digest != Packet([two, one], TYPES).digest


def test_another_spelling_of_the_same_value_has_the_same_digest() -> None:
    one, two = item("capacity", {"a": 1, "b": 2.0}), item("capacity", {"b": 2, "a": 1.0})
    assert Packet([one], TYPES).digest == Packet([two], TYPES).digest


def test_required_evidence_is_its_plain_typed_value() -> None:
    packet = Packet([item("capacity", {"available_hours": 40})], TYPES)
    assert packet[CAPACITY] == Capacity(40.0)
    assert packet.item("capacity").value == {"available_hours": 40}


def test_optional_evidence_is_present_with_its_value() -> None:
    packet = Packet([item("tone", {"available_hours": 1})], TYPES)
    assert packet[TONE] == Present(Capacity(1.0))
    assert packet[TONE].or_else(None) == Capacity(1.0)


@pytest.mark.parametrize("state", NOT_FOUND)
def test_optional_evidence_that_is_not_there_says_why_and_has_no_value(state: State) -> None:
    error = ItemError("unreachable", "connection refused") if state == "failed" else None
    missing = Packet([item("tone", state=state, error=error)], TYPES)[TONE]
    assert missing == Missing(state, "unreachable" if error else None)
    assert missing.or_else("none") == "none"
    assert not hasattr(missing, "value")


@pytest.mark.parametrize("state", NOT_FOUND)
def test_required_evidence_that_is_not_there_is_never_a_value(state: State) -> None:
    packet = Packet([item("capacity", {"available_hours": 0}, state=state)], TYPES)
    with pytest.raises(MissingEvidence, match=f"capacity is {state}"):
        packet[CAPACITY]


def test_evidence_that_was_not_declared_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Packet([], TYPES).item("capacity")


class Wide(msgspec.Struct, frozen=True):
    at: datetime
    data: bytes
    anything: Any
    pair: tuple[int, ...]
    kind: str | int


def test_typed_values_come_from_the_stored_json_whatever_the_type() -> None:
    wide = Wide(datetime(2026, 3, 1, 8, tzinfo=UTC), b"\x00\xff", {"a": [1]}, (1, 2), 3)
    evidence = Evidence("wide", FixedSource(Wide), deadline_ms=1)
    assert Packet([item("wide", msgspec.to_builtins(wide))], {"wide": Wide})[evidence] == wide


@pytest.mark.parametrize("value", [1.0, -0.0, 1e3, [2.0], {"x": -0.0}])
def test_a_replay_from_the_stored_bytes_sees_the_very_same_values(value: object) -> None:
    class Open(msgspec.Struct, frozen=True):
        anything: Any

    evidence = Evidence("open", FixedSource(Open), deadline_ms=1)
    first = Packet([item("open", {"anything": value})], {"open": Open})
    replayed = Packet(msgspec.json.decode(first.bytes, type=list[Item]), {"open": Open})
    assert repr(first[evidence]) == repr(replayed[evidence])


def test_what_a_policy_does_to_a_value_does_not_reach_the_packet() -> None:
    class Loose(msgspec.Struct):
        hours: dict[str, int]

    evidence = Evidence("loose", FixedSource(Loose), deadline_ms=1)
    packet = Packet([item("loose", {"hours": {"mon": 8}})], {"loose": Loose})
    packet[evidence].hours["mon"] = 0
    assert packet.item("loose").value == {"hours": {"mon": 8}}
    assert packet.digest == digest(canonical(packet.items))
