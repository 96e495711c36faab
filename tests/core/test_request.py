"""Requests are checked as they are decoded; their fingerprint follows the meaning, not the spelling (I11)."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.canonical import canonical, parse
from coordinator.core.money import Money
from coordinator.core.request import DecisionRequest, RecordRef, fingerprint

WHOLE = {
    "type": "quote",
    "input": {"site": "north"},
    "record": {"kind": "quote", "id": "q-1", "expected_version": 8},
    "class": "urgent",
    "ceiling": {"amount_minor": 400, "currency": "SGD"},
    "time_limit_ms": 8000,
}
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=3)
bodies = st.dictionaries(texts, st.integers(-9, 9) | st.floats(-9, 9) | texts | st.none(), max_size=4)


def decode(body: object) -> DecisionRequest:
    return msgspec.convert(body, DecisionRequest)


def test_a_whole_request_is_decoded() -> None:
    assert decode(WHOLE) == DecisionRequest(
        type="quote",
        input={"site": "north"},
        record=RecordRef(kind="quote", id="q-1", expected_version=8),
        class_="urgent",
        ceiling=Money(400, "SGD"),
        time_limit_ms=8000,
    )


def test_what_is_optional_has_its_default() -> None:
    request = decode({"type": "quote", "input": {}})
    assert (request.record, request.class_, request.ceiling, request.time_limit_ms) == (
        None,
        "interactive",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": 1}, r"\$.type"),
        ({"input": []}, r"\$.input"),
        ({"input": None}, r"\$.input"),
        ({"extra": 1}, "unknown field"),
        ({"class_": "bulk"}, "unknown field"),
        ({"record": {"kind": "quote"}}, "id"),
        ({"record": {"kind": "", "id": "q-1"}}, r"length >= 1 - at `\$.record.kind`"),
        ({"record": {"kind": "quote", "id": "x" * 256}}, r"length <= 255 - at `\$.record.id`"),
        (
            {"record": {"kind": "quote", "id": "q", "expected_version": -1}},
            r"`int` >= 0 - at `\$.record.expected_version`",
        ),
        ({"record": {"kind": "quote", "id": "q", "version": 1}}, "unknown field"),
        ({"ceiling": {"amount_minor": 1, "currency": "XAU"}}, "no minor unit"),
        ({"ceiling": {"amount_minor": 0.5, "currency": "SGD"}}, r"\$.ceiling"),
        ({"time_limit_ms": 0}, r"`int` >= 1 - at `\$.time_limit_ms`"),
        ({"time_limit_ms": 3_600_001}, r"`int` <= 3600000 - at `\$.time_limit_ms`"),
    ],
)
def test_a_request_out_of_its_limits_is_refused_with_the_place(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        decode({**WHOLE, **change})


def test_version_zero_means_a_record_that_does_not_exist_yet() -> None:
    assert RecordRef(kind="quote", id="q-1", expected_version=0).expected_version == 0


@given(bodies)
def test_another_spelling_is_the_same_request(body: dict[str, object]) -> None:
    spelled = json.dumps(dict(reversed(body.items())), indent=2).encode()
    assert fingerprint("POST", "/v1/decisions", parse(spelled)) == fingerprint(
        "POST", "/v1/decisions", parse(canonical(body))
    )


@given(bodies, bodies)
def test_another_meaning_is_another_request(one: dict[str, object], two: dict[str, object]) -> None:
    first, second = parse(canonical(one)), parse(canonical(two))
    same = fingerprint("POST", "/v1/decisions", first) == fingerprint("POST", "/v1/decisions", second)
    assert same is (canonical(one) == canonical(two))


def test_method_route_and_every_member_are_part_of_the_fingerprint() -> None:
    whole = parse(canonical(WHOLE))
    prints = {fingerprint("POST", "/v1/decisions", whole), fingerprint("PUT", "/v1/decisions", whole)}
    prints.add(fingerprint("POST", "/v1/records", whole))
    prints.update(
        fingerprint("POST", "/v1/decisions", parse(canonical({**WHOLE, name: None}))) for name in WHOLE
    )
    assert len(prints) == 3 + len(WHOLE)
    assert all(len(each) == 32 for each in prints)
