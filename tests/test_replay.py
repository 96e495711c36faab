"""A replay compares packet, outcome and receipt, and sees what is not the same (I18)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from adapters.function import FunctionSource
from coordinator import (
    Commit,
    Decline,
    Effect,
    Evidence,
    Outcome,
    Packet,
    Record,
    RecordKind,
    decision_type,
    keyed,
)
from coordinator.core.decision import DecisionType
from coordinator.core.evidence import Item
from coordinator.core.view import BudgetView, DecisionView, FenceView, OutcomeView, RecordView
from coordinator.engine.decide import outcome_digest
from coordinator.engine.replay import Replay, Stored, replay


class Ask(msgspec.Struct, frozen=True):
    hours: int


class Capacity(msgspec.Struct, frozen=True):
    free: int


class Job(msgspec.Struct, frozen=True):
    price: int


class Sink:
    """Declared, never called: a replay sends nothing."""

    name = "send"
    provider = "nobody"
    guarantee = keyed(hours=1)
    timeout_ms = 1000

    async def perform(self, operation: object) -> Any:
        raise AssertionError("a replay sends nothing")

    lookup = perform


Policy = Callable[[Ask, Packet, Record[Job]], Outcome]
capacity = Evidence(
    "capacity", FunctionSource("planner", lambda *_: Capacity(0), returns=Capacity), deadline_ms=100
)
JOB = RecordKind("job", Job)


def quote(request: Ask, packet: Packet, record: Record[Job]) -> Outcome:
    last = record.data.price if record.data else 0
    price = last + request.hours * packet[capacity].free
    return Commit({"price": price}, changes=[record.becomes(Job(price))], effects=[Effect("send", price)])


def declared(policy: Policy) -> DecisionType[Ask, Any]:
    return decision_type(
        "quote",
        request=Ask,
        policy=policy,
        policy_version="1",
        evidence=[capacity],
        effects=[Sink()],
        record=JOB,
    )


def item(**changes: Any) -> Item:
    known = {"name": "capacity", "source": "planner", "state": "found", "value": {"free": 3}}
    return Item(
        **known | changes,
        observed_at="2026-01-01T00:00:00.000000Z",
        freshness={"kind": "snapshot"},
        elapsed_ms=1,
        attempts=1,
    )


def stored(policy: Policy = quote, **changes: Any) -> Stored:
    """A decision of ``policy`` at version 2 of its record, and then ``changes`` of what is shown."""
    types = declared(policy)
    packet = Packet([item()], types.types)
    outcome = types.policy(Ask(2), packet, Record("job", "j-1", 2, Job(100)))
    assert isinstance(outcome, Commit)
    view = DecisionView(
        id="d-1",
        type="quote",
        policy_version="1",
        status="committed",
        class_="bulk",
        input={"hours": 2},
        record=RecordView(kind="job", id="j-1", base_version=2, committed_version=3),
        outcome=OutcomeView(kind="commit", terms=outcome.terms),
        packet_digest=packet.digest,
        evidence=msgspec.Raw(packet.bytes),
        fence=FenceView(rounds=1, checks=[]),
        operations=[],
        budget=BudgetView(),
        timeline=[],
        trace_id="",
        created_at="",
        finished_at=None,
    )
    for name, value in changes.items():
        setattr(view, name, value)
    return Stored(view=view, record_data={"price": 100}, outcome_digest=outcome_digest(outcome))


def differing(result: Replay) -> list[str]:
    return [difference.what for difference in result.differences]


def test_the_same_policy_on_the_same_packet_and_record_agrees() -> None:
    result = replay(declared(quote), stored())
    assert result.agrees
    assert result.compared == ["packet_digest", "outcome", "3 runs", "outcome_digest"]


def test_evidence_that_was_edited_is_seen_by_its_digest() -> None:
    edited = msgspec.Raw(bytes(stored().view.evidence).replace(b'"free":3', b'"free":4'))
    assert differing(replay(declared(quote), stored(evidence=edited))) == [
        "packet_digest",
        "outcome",
        "outcome_digest",
    ]


def test_a_member_that_no_reading_has_is_seen_by_its_digest() -> None:
    edited = msgspec.Raw(bytes(stored().view.evidence).replace(b'"free":3', b'"fee":1,"free":3'))
    assert "packet_digest" in differing(replay(declared(quote), stored(evidence=edited)))
    added = msgspec.Raw(
        bytes(stored().view.evidence).replace(b'"attempts":1', b'"approved":true,"attempts":1')
    )
    assert differing(replay(declared(quote), stored(evidence=added))) == ["packet_digest"]


def test_evidence_spelled_otherwise_is_the_same_evidence() -> None:
    spaced = msgspec.Raw(msgspec.json.format(bytes(stored().view.evidence), indent=2))
    assert replay(declared(quote), stored(evidence=spaced)).agrees


def test_other_terms_are_shown_beside_the_stored_ones() -> None:
    result = replay(declared(lambda *_: Decline("no")), stored())
    assert differing(result) == ["outcome", "outcome_digest"]
    assert result.differences[0].stored == {"kind": "commit", "terms": {"price": 106}}
    assert result.differences[0].now == {"kind": "decline", "reason": "no"}


def test_another_payload_under_the_same_terms_is_seen_by_the_receipts_digest() -> None:
    def other(request: Ask, packet: Packet, record: Record[Job]) -> Outcome:
        same = quote(request, packet, record)
        assert isinstance(same, Commit)
        return msgspec.structs.replace(same, effects=[Effect("send", "something else")])

    assert differing(replay(declared(other), stored())) == ["outcome_digest"]


def test_a_policy_that_counts_its_runs_is_not_deterministic() -> None:
    count = itertools.count()

    def counts(request: Ask, packet: Packet, record: Record[Job]) -> Outcome:
        return Commit({"n": next(count)})

    (difference,) = (d for d in replay(declared(counts), stored()).differences if "run" in d.what)
    assert difference.what == "run 2 of the policy, which is not deterministic"
    assert (difference.stored, difference.now) == (
        {"kind": "commit", "terms": {"n": 0}},
        {"kind": "commit", "terms": {"n": 1}},
    )


def test_the_policy_is_given_the_record_as_it_was() -> None:
    first = Stored(view=stored().view, record_data=None, outcome_digest=None)
    assert replay(declared(quote), first).differences[0].now == {"kind": "commit", "terms": {"price": 6}}


def test_a_decision_that_ended_without_its_policy_has_only_its_packet_to_compare() -> None:
    unresolved = stored(
        status="unresolved", outcome=OutcomeView(kind="unresolved", code="evidence-missing", reason="")
    )
    result = replay(declared(lambda *_: Decline("never asked")), unresolved)
    assert (result.agrees, result.compared) == (True, ["packet_digest"])
    early = stored(status="cancelled", packet_digest=None, evidence=msgspec.Raw(b"[]"))
    assert replay(declared(quote), early).compared == []


def test_a_policy_that_raised_has_to_raise_again() -> None:
    failed = stored(
        status="failed", outcome=OutcomeView(kind="failed", code="policy-raised", reason="line 1")
    )
    failed = msgspec.structs.replace(failed, outcome_digest=None)

    def raises(*_: object) -> Outcome:
        raise ValueError("another line")

    assert replay(declared(raises), failed).agrees
    assert differing(replay(declared(quote), failed)) == ["outcome"]


def test_a_request_that_no_longer_fits_the_declaration_is_a_difference() -> None:
    assert "outcome" in differing(replay(declared(quote), stored(input={"hours": "many"})))
