"""A decision is shown, stored and read back as the same bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest

from coordinator.core.fence import Check
from coordinator.core.money import Money
from coordinator.core.packet import Packet
from coordinator.core.view import (
    BudgetView,
    DecisionView,
    FenceView,
    OperationView,
    OutcomeView,
    RecordView,
    Stage,
    decode_view,
    encode_view,
    timestamp,
)
from tests.core.declaring import item


def view(packet: Packet) -> DecisionView:
    return DecisionView(
        id="d-1",
        type="quote",
        policy_version="3",
        status="committed",
        class_="interactive",
        input={"site": "north"},
        record=RecordView(kind="quote", id="q-1", base_version=8, committed_version=9),
        outcome=OutcomeView(kind="commit", terms={"price": 5}),
        packet_digest=packet.digest,
        evidence=msgspec.Raw(packet.bytes),
        fence=FenceView(rounds=1, checks=[Check(evidence="e", field="x", then=[1], now=None, held=False)]),
        operations=[OperationView(id="o-1", effect="send", state="ready")],
        budget=BudgetView(reserved=Money(40, "SGD")),
        timeline=[Stage(at="2026-03-01T08:00:00.000000Z", stage="gather", ms=3)],
        trace_id="0" * 32,
        created_at="2026-03-01T08:00:00.000000Z",
        finished_at=None,
    )


def test_a_view_is_read_back_and_shown_again_byte_for_byte() -> None:
    shown = encode_view(view(Packet([item("capacity", {"hours": 1.0})], {})))
    assert encode_view(decode_view(shown)) == shown


def test_the_evidence_shown_is_what_the_digest_stands_for() -> None:
    packet = Packet([item("capacity", {"hours": 0.5, "é": "€"})], {})
    assert packet.bytes in encode_view(view(packet))
    assert bytes(decode_view(encode_view(view(packet))).evidence) == packet.bytes


def test_the_members_are_those_of_the_contract() -> None:
    plain = msgspec.json.decode(encode_view(view(Packet([], {}))))
    assert list(plain) == [
        *("id", "type", "policy_version", "status", "class", "input", "record", "outcome", "packet_digest"),
        *("evidence", "fence", "operations", "budget", "timeline", "trace_id", "created_at", "finished_at"),
    ]
    assert plain["outcome"] == {"kind": "commit", "terms": {"price": 5}}
    assert plain["budget"] == {
        "reserved": {"amount_minor": 40, "currency": "SGD"},
        "settled": None,
        "uncertain": None,
    }


@pytest.mark.parametrize(
    "at",
    [
        datetime(2026, 3, 1, 8, tzinfo=UTC),
        datetime(2026, 3, 1, 16, tzinfo=timezone(timedelta(hours=8))),
    ],
)
def test_a_time_is_rfc3339_in_utc_to_the_microsecond(at: datetime) -> None:
    assert timestamp(at) == "2026-03-01T08:00:00.000000Z"
    assert datetime.fromisoformat(timestamp(at)) == at
