"""Replay: the policy, run again on what was stored, arrives at the same bytes (I18), and one that cannot is found out."""

from __future__ import annotations

import itertools
from typing import Any

import asyncpg
import msgspec
import pytest

from coordinator import Commit, Decisive, Decline, Effect, Evidence, Record, Review
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.core.view import DecisionView
from coordinator.engine.replay import Replay, Stored, replay
from tests.engine.harness import PROPOSAL, Ask, Fact, Number, Sent, running, service_of, values


def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    """Every kind of outcome, and everything a policy may look at."""
    price = Evidence("price", Fact("price"), deadline_ms=1)
    total = ask.value + packet[price].value + (record.data.value if record.data else 0)
    if ask.value == 1:
        return Decline(f"{total} is too much")
    if ask.value == 2:
        return Review(f"{total} is for a person")
    if ask.value == 3:
        raise LookupError(f"no rule for {total}")
    return Commit(
        {"total": total}, changes=[record.becomes(Number(total))], effects=[Effect("send", {"n": total})]
    )


def coordinator_with(of: Any = policy) -> Any:
    price = Evidence("price", Fact("price", values(1, 2)), deadline_ms=10_000, freshness=Decisive("value"))
    tone = Evidence("tone", Fact("tone", 5), deadline_ms=10_000, required=False, after=["price"])
    return service_of(price, tone, policy=of, record=PROPOSAL, effects=[Sent()])


async def stored(root: asyncpg.Connection, decision: dict[str, Any]) -> Stored:
    """What an auditor finds: the decision, the record at the version it was based on, and its receipt."""
    record, view = decision["record"], msgspec.json.decode(msgspec.json.encode(decision), type=DecisionView)
    data = await root.fetchval(
        "SELECT data FROM record_versions WHERE id = $1 AND version = $2",
        record["id"],
        record["base_version"],
    )
    receipt = await root.fetchval(
        "SELECT body FROM receipts WHERE decision_id::text = $1 AND kind = $2",
        decision["id"],
        f"decision.{decision['status']}",
    )
    return Stored(
        view=view,
        record_data=None if data is None else msgspec.json.decode(data),
        outcome_digest=msgspec.json.decode(receipt).get("outcome_digest"),
    )


@pytest.mark.parametrize(
    ("value", "status"), [(0, "committed"), (1, "declined"), (2, "in_review"), (3, "failed")]
)
async def test_a_replay_arrives_at_the_same_outcome_and_digests(
    value: int, status: str, database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = coordinator_with()
    async with running(coordinator, database_url) as service:
        await service.decided("before", 0, record={"kind": "proposal", "id": "p"})
        decision = await service.decided("k", value, record={"kind": "proposal", "id": "p"})
    assert decision["status"] == status
    assert decision["record"]["base_version"] == 1
    kept = await stored(root, decision)
    found = replay(coordinator.types["quote"], kept)
    assert found.differences == []
    assert found.packet_digest == decision["packet_digest"]
    assert found.outcome_digest == kept.outcome_digest
    assert (kept.outcome_digest is not None) == (status != "failed")


async def changed(found: Replay) -> list[str]:
    return [difference.what for difference in found.differences]


async def test_a_changed_outcome_packet_record_or_policy_is_found(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = coordinator_with()
    async with running(coordinator, database_url) as service:
        decision = await service.decided("k", 0, record={"kind": "proposal", "id": "p"})
    declared = coordinator.types["quote"]
    dearer = decision | {"outcome": {"kind": "commit", "terms": {"total": 1_000}}}
    assert "outcome" in await changed(replay(declared, await stored(root, dearer)))
    evidence = [item | {"value": {"value": 99, "note": ""}} for item in decision["evidence"]]
    assert "packet_digest" in await changed(
        replay(declared, await stored(root, decision | {"evidence": evidence}))
    )
    other_record = msgspec.structs.replace(await stored(root, decision), record_data={"value": 50})
    assert "outcome_digest" in await changed(replay(declared, other_record))
    another = coordinator_with(lambda ask, packet, record: Decline("no"))
    assert "outcome" in await changed(replay(another.types["quote"], await stored(root, decision)))


async def test_a_policy_that_keeps_state_is_found_out(database_url: str, root: asyncpg.Connection) -> None:
    runs = itertools.count()

    def moody(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({"run": next(runs)})

    coordinator = coordinator_with(moody)
    async with running(coordinator, database_url) as service:
        decision = await service.decided("k", 0, record={"kind": "proposal", "id": "p"})
    found = replay(coordinator.types["quote"], await stored(root, decision))
    assert any("not deterministic" in what for what in await changed(found))
