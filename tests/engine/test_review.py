"""Reviews: what a person is shown, what an approval commits, and what becomes of it when the world has moved meanwhile."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from coordinator import Commit, Decisive, Effect, Evidence, MaxAge, Record, Review
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.engine.service import Rested
from tests.engine.harness import PROPOSAL, Ask, Fact, Number, Sent, running, service_of

RECORD = {"kind": "proposal", "id": "p-1"}
LIMIT = Evidence("limit", Fact("limits", 7), deadline_ms=1_000, freshness=Decisive("value"))
RATE = Evidence("rate", Fact("rates", 3), deadline_ms=1_000, freshness=MaxAge(timedelta(hours=1)))


def ask_a_person(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    total = ask.value + packet[LIMIT].value
    commit = Commit(
        {"total": total},
        changes=[record.becomes(Number(total))],
        effects=[Effect("send", {"total": total}, compensation=Effect("send", {"undo": total}))],
    )
    return Review("above the limit", proposal=commit)


async def test_the_review_packet_holds_everything_a_person_needs(database_url: str) -> None:
    sink = Sent()
    coordinator = service_of(LIMIT, RATE, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
    review = decision["review"]
    assert (decision["status"], review["reason"], review["code"]) == ("in_review", "above the limit", None)
    assert review["proposal"] == {
        "terms": {"total": 7},
        "changes": [{"kind": "proposal", "id": "p-1", "version": 1, "data": {"note": "", "value": 7}}],
        "effects": [
            {
                "effect": "send",
                "key": f"{decision['id']}.send.0",
                "payload": {"total": 7},
                "payload_hash": review["proposal"]["effects"][0]["payload_hash"],
                "after": [],
                "compensation": {
                    "effect": "send",
                    "key": f"{decision['id']}.send.1000",
                    "payload": {"undo": 7},
                    "payload_hash": review["proposal"]["effects"][0]["compensation"]["payload_hash"],
                    "after": [],
                    "compensation": None,
                },
            }
        ],
        "on_failure": "keep",
    }
    assert review["requested_by"] == str(service.caller.id)
    assert set(review["evidence_age_ms"]) == {"limit", "rate"}
    waits = datetime.fromisoformat(review["expires_at"]) - datetime.fromisoformat(review["since"])
    assert waits == timedelta(days=7)
    assert sink.sends == []


async def test_the_ages_of_the_evidence_grow_and_a_replay_of_the_key_does_not(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        first = await service.post(record=RECORD)
        assert isinstance(first, Rested)
        decision = json.loads(first.body)
        later = (await service.shown(first.id))["review"]
        again = await service.post(record=RECORD)
    assert isinstance(again, Rested)
    assert again.body == first.body
    assert later["as_of"] > decision["review"]["as_of"]
    assert later["evidence_age_ms"]["limit"] >= decision["review"]["evidence_age_ms"]["limit"]
    assert later["etag"] == decision["review"]["etag"] == "1"


async def test_what_never_needed_a_person_has_no_review(database_url: str) -> None:
    async with running(service_of(record=PROPOSAL), database_url) as service:
        assert "review" not in await service.decided(record=RECORD)
