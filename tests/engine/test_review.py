"""Reviews: what a person is shown, what an approval commits, and what becomes of it when the world has moved meanwhile (I2, I3, I5,
I11, I12, I18)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from adapters.records import RecordSource
from coordinator import (
    Absent,
    Commit,
    Decisive,
    Decline,
    Effect,
    Evidence,
    Failed,
    MaxAge,
    Record,
    RecordKind,
    Review,
)
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.core.review import Verdict
from coordinator.core.view import DecisionView
from coordinator.engine.replay import Stored, replay
from coordinator.engine.service import Rested
from coordinator.errors import (
    Draining,
    NotFound,
    Overloaded,
    OwnRequest,
    ReviewUnconfirmed,
    StaleReview,
    StateConflict,
)
from coordinator.failpoints import arm
from coordinator.store.keys import Key
from tests.engine.harness import PROPOSAL, Ask, Fact, Gate, Number, Running, Sent, running, service_of, values
from tests.store.given import expire, kinds_of, new_tenant
from tests.support import eventually

RECORD = {"kind": "proposal", "id": "p-1"}
LIMIT = Evidence("limit", Fact("limits", 7), deadline_ms=1_000, freshness=Decisive("value"))
RATE = Evidence("rate", Fact("rates", 3), deadline_ms=1_000, freshness=MaxAge(timedelta(hours=1)))


@pytest.fixture(autouse=True)
def _no_failpoints_left() -> Iterator[None]:
    yield
    arm("")


def limit(*numbers: int) -> Evidence[Number, Any]:
    return Evidence("limit", Fact("limits", values(*numbers)), deadline_ms=1_000, freshness=Decisive("value"))


def reviewer(service: Running) -> Key:
    return Key(service.tenant, uuid7(), frozenset({"review"}))


async def verdict(
    service: Running,
    decision: Any,
    given: Verdict = "approve",
    *,
    by: Key | None = None,
    etag: str = "1",
    note: str = "",
) -> Any:
    """The decision afterwards."""
    await service.service.reviews.review(by or reviewer(service), UUID(decision["id"]), given, etag, note)
    return await service.shown(decision["id"])


async def refused(service: Running, decision: Any, given: Verdict = "approve", **more: Any) -> StaleReview:
    with pytest.raises(StaleReview) as stale:
        await verdict(service, decision, given, **more)
    return stale.value


async def unconfirmed(service: Running, decision: Any, **more: Any) -> list[str]:
    """What nobody knows of, and that nothing else is told."""
    with pytest.raises(ReviewUnconfirmed) as refusal:
        await verdict(service, decision, **more)
    review = (await service.shown(decision["id"]))["review"]
    assert (review["moved"], review["etag"]) == ([], refusal.value.extra["etag"])
    names = [check["evidence"] for check in review["unconfirmed"]]
    assert names == refusal.value.extra["unconfirmed"]
    return names


async def sent_once(service: Running, decision: Any, sink: Sent) -> None:
    async def settled() -> bool:
        shown = await service.shown(decision["id"])
        return [op["state"] for op in shown["operations"]] == ["succeeded"]

    await eventually(settled, what="its one operation has succeeded")
    assert [op.key for op in sink.sends] == [f"{decision['id']}.send.0"]


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


# Approving -------------------------------------------------------------------------------------------------------------------


async def test_an_approval_commits_what_was_shown_once(database_url: str, root: asyncpg.Connection) -> None:
    sink = Sent()
    coordinator = service_of(LIMIT, RATE, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        first = await service.post(record=RECORD)
        assert isinstance(first, Rested)
        decision, somebody = json.loads(first.body), reviewer(service)
        done = await verdict(service, decision, by=somebody, note="agreed")
        await sent_once(service, done, sink)
        again = await service.post(record=RECORD)
        kinds = await kinds_of(root, service.tenant, decision=first.id)
    assert isinstance(again, Rested)
    assert (done["status"], done["outcome"]) == ("committed", {"kind": "commit", "terms": {"total": 7}})
    assert done["record"] == {"kind": "proposal", "id": "p-1", "base_version": 0, "committed_version": 1}
    assert [(c["evidence"], c["held"]) for c in done["fence"]["checks"]] == [
        ("limit", True),
        ("rate", True),
        ("record", True),
    ]
    given = done["review"]["verdict"]
    assert (given["verdict"], given["by"], given["note"]) == ("approve", str(somebody.id), "agreed")
    assert done["review"]["etag"] is None
    assert done["packet_digest"] == decision["packet_digest"]
    assert again.body == first.body, "a replay of the key still gives the first answer (I11)"
    assert kinds[:6] == [
        "decision.running",
        "decision.in_review",
        "decision.approving",
        "decision.approved",
        "decision.committed",
        "operation.dispatching",
    ]
    assert sorted(kinds[6:]) == ["operation.succeeded"]


async def test_the_index_in_the_view_is_that_of_the_operations_receipt(
    database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent()
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        done = await verdict(service, decision)
        view = json.loads(
            await root.fetchval("SELECT view FROM decisions WHERE id::text = $1", decision["id"])
        )
        kind = await root.fetchval(
            "SELECT kind FROM receipts WHERE index = $1", view["operations"][0]["receipt"]
        )
        await sent_once(service, done, sink)
    assert kind == "operation.dispatching"


async def test_the_key_that_asked_may_neither_approve_nor_reject(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        given: Verdict
        for given in ("approve", "reject"):
            with pytest.raises(OwnRequest):
                await verdict(service, decision, given, by=service.caller)
        assert (await service.shown(decision["id"]))["review"]["etag"] == "1"


async def test_another_tenants_review_is_like_none_at_all(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        stranger = Key(await new_tenant(database_url, "two"), uuid7(), frozenset({"review"}))
        told = []
        for id in (decision["id"], str(uuid7())):
            with pytest.raises(NotFound) as absent:
                await verdict(service, {"id": id}, by=stranger)
            told.append(str(absent.value))
    assert told[0] == told[1]


async def test_of_two_reviewers_at_once_one_wins_and_the_other_is_stale(database_url: str) -> None:
    """Two processes, one database; both have seen the same etag, and both stand at the same moment."""
    sink = Sent()
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as one, running(coordinator, database_url) as other:
        for n in range(8):
            decision = await one.decided(f"k-{n}", record={"kind": "proposal", "id": f"p-{n}"})
            barrier = asyncio.Barrier(2)

            async def review(
                service: Running, decision: Any = decision, barrier: asyncio.Barrier = barrier
            ) -> str:
                await barrier.wait()
                try:
                    return str((await verdict(service, decision))["status"])
                except StaleReview as stale:
                    return stale.code

            results = await asyncio.gather(review(one), review(other))
            assert sorted(results) == ["committed", "stale-review"]
        await eventually(lambda: len(sink.sends) == 8, what="each was sent")
    assert len({op.key for op in sink.sends}) == 8


async def test_an_approval_and_a_rejection_at_once_do_not_both_count(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as one, running(coordinator, database_url) as other:
        decision = await one.decided(record=RECORD)
        results = await asyncio.gather(
            verdict(one, decision), verdict(other, decision, "reject"), return_exceptions=True
        )
        status = (await one.shown(decision["id"]))["status"]
    stale = [result for result in results if isinstance(result, StaleReview)]
    won = [result["status"] for result in results if isinstance(result, dict)]
    assert (len(stale), won) == (1, [status])


async def test_an_etag_that_is_not_the_present_one_changes_nothing(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        stale = await refused(service, decision, etag="0")
        assert stale.extra["etag"] == "1"
        assert (await service.shown(decision["id"]))["status"] == "in_review"


async def test_the_same_verdict_again_has_the_same_result_and_does_nothing(
    database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent()
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        approved, rejected = [
            await service.decided(k, record={"kind": "proposal", "id": k}) for k in ("a", "b")
        ]
        somebody = reviewer(service)
        first = await verdict(service, approved, by=somebody)
        await sent_once(service, first, sink)
        await verdict(service, rejected, "reject", by=somebody)
        before = await kinds_of(root, service.tenant)
        assert (await verdict(service, approved, by=somebody))["status"] == "committed"
        assert (await verdict(service, rejected, "reject", by=somebody))["status"] == "declined"
        assert await kinds_of(root, service.tenant) == before
        for decision in (approved, rejected):
            stale = await refused(service, decision)
            assert stale.extra["etag"] is None
        await refused(service, rejected, "approve", by=somebody)
        await sent_once(service, first, sink)


async def test_without_a_proposal_there_is_nothing_to_approve_and_a_rejection_still_ends_it(
    database_url: str, root: asyncpg.Connection
) -> None:
    def undecided(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Review("nobody knows")

    async with running(service_of(LIMIT, policy=undecided), database_url) as service:
        decision = await service.decided()
        assert decision["review"]["proposal"] is None
        with pytest.raises(StateConflict, match="reject it"):
            await verdict(service, decision)
        done = await verdict(service, decision, "reject", note="too dear")
        kinds = await kinds_of(root, service.tenant)
    assert (done["status"], done["outcome"]["reason"]) == ("declined", "rejected in review: too dear")
    assert done["review"]["verdict"]["verdict"] == "reject"
    assert kinds == ["decision.running", "decision.in_review", "decision.rejected", "decision.declined"]


async def test_what_never_was_in_review_is_no_matter_for_a_reviewer(database_url: str) -> None:
    async with running(service_of(record=PROPOSAL), database_url) as service:
        decision = await service.decided(record=RECORD)
        with pytest.raises(StateConflict, match="not in review"):
            await verdict(service, decision)


# What moved meanwhile -------------------------------------------------------------------------------------------------------


async def test_evidence_that_moved_is_not_committed_but_shown_for_another_look(
    database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent()
    coordinator = service_of(limit(7, 9), policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        first = await service.post(record=RECORD)
        assert isinstance(first, Rested)
        decision, somebody = json.loads(first.body), reviewer(service)
        stale = await refused(service, decision, by=somebody)
        assert (stale.extra["moved"], stale.extra["etag"]) == (["limit"], "2")
        assert (await refused(service, decision, by=somebody)).extra["etag"] == "2", (
            "the same again, the same result"
        )
        renewed = await service.shown(decision["id"])
        assert (renewed["status"], sink.sends) == ("in_review", [])
        (check,) = renewed["review"]["moved"]
        assert (check["then"], check["now"]) == (7, 9)
        assert renewed["review"]["proposal"]["terms"] == {"total": 9}
        assert renewed["review"]["etag"] == "2"
        for kept in ("since", "expires_at"):
            assert renewed["review"][kept] == decision["review"][kept]
        done = await verdict(service, decision, etag="2")
        await sent_once(service, done, sink)
        again = await service.post(record=RECORD)
        kinds = await kinds_of(root, service.tenant, decision=first.id)
    assert isinstance(again, Rested)
    assert (done["status"], done["outcome"]["terms"]) == ("committed", {"total": 9})
    assert again.body == first.body
    assert kinds[:6] == [
        "decision.running",
        "decision.in_review",
        "decision.approving",
        "decision.review-moved",
        "decision.approving",
        "decision.approved",
    ]


async def test_a_policy_that_would_commit_by_now_still_waits_for_the_person(
    database_url: str, root: asyncpg.Connection
) -> None:
    def above_eight(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        commit = Commit({"total": packet[LIMIT].value})
        return Review("above eight", proposal=commit) if packet[LIMIT].value > 8 else commit

    coordinator = service_of(limit(9, 5), policy=above_eight)
    async with running(coordinator, database_url) as service:
        decision = await service.decided()
        await refused(service, decision)
        renewed = await service.shown(decision["id"])
        assert (renewed["status"], renewed["outcome"]["code"]) == ("in_review", "evidence-moved")
        assert renewed["review"]["concluded"] == {"kind": "commit", "terms": {"total": 5}}
        done = await verdict(service, decision, etag="2")
        await agrees(root, coordinator, renewed, "decision.review-moved")
        await agrees(root, coordinator, done, "decision.committed")
    assert (done["status"], done["outcome"]["terms"]) == ("committed", {"total": 5})


async def test_a_policy_that_declines_by_now_leaves_nothing_to_approve(database_url: str) -> None:
    def below_eight(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        if packet[LIMIT].value > 8:
            return Decline("above eight")
        return Review("a person looks", proposal=Commit({"total": packet[LIMIT].value}))

    async with running(service_of(limit(5, 9), policy=below_eight), database_url) as service:
        decision = await service.decided()
        stale = await refused(service, decision)
        done = await service.shown(decision["id"])
    assert stale.extra["decision_status"] == done["status"] == "declined"
    assert done["outcome"] == {"kind": "decline", "reason": "above eight"}
    assert done["review"]["verdict"] is None


async def test_a_record_that_moved_meanwhile_is_decided_on_anew(database_url: str) -> None:
    sink = Sent()
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        await service.service.put_record(service.caller, "proposal", "p-1", 0, {"value": 1, "note": ""})
        stale = await refused(service, decision)
        assert stale.extra["moved"] == ["record"]
        done = await verdict(service, decision, etag="2")
        await sent_once(service, done, sink)
    assert done["record"] == {"kind": "proposal", "id": "p-1", "base_version": 1, "committed_version": 2}


async def test_a_record_that_is_only_relied_on_may_not_have_moved_either(database_url: str) -> None:
    def looks_only(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Review("a person looks", proposal=Commit({"seen": record.version}))

    async with running(service_of(policy=looks_only, record=PROPOSAL), database_url) as service:
        decision = await service.decided(record=RECORD)
        await service.service.put_record(service.caller, "proposal", "p-1", 0, {"value": 1, "note": ""})
        assert (await refused(service, decision)).extra["moved"] == ["record"]
        assert (await verdict(service, decision, etag="2"))["outcome"]["terms"] == {"seen": 1}


async def test_a_record_that_moves_between_the_fence_and_the_commit_is_found_under_lock(
    database_url: str,
) -> None:
    gate = Gate()

    async def twice(request: Any, n: int) -> Any:
        if n == 2:
            await gate()
        return await values(7)(request, n)

    slow = Evidence("limit", Fact("limits", twice), deadline_ms=10_000, freshness=Decisive("value"))
    sink = Sent()
    coordinator = service_of(slow, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        approving = asyncio.ensure_future(refused(service, decision))
        await gate.arrived.wait()
        await service.service.put_record(service.caller, "proposal", "p-1", 0, {"value": 1, "note": ""})
        gate.open()
        stale = await approving
    assert stale.extra["moved"] == ["record"]
    assert sink.sends == []


async def test_another_record_that_was_read_is_compared_under_lock(database_url: str) -> None:
    site: RecordKind[Number] = RecordKind("site", Number)
    capacity = Evidence(
        "limit",
        RecordSource("site", "site", "s-1", returns=Number),
        deadline_ms=1_000,
        freshness=Decisive("value"),
    )
    coordinator = service_of(capacity, policy=ask_a_person, effects=[Sent()], record=PROPOSAL, records=[site])
    async with running(coordinator, database_url) as service:
        await service.service.put_record(service.caller, "site", "s-1", 0, {"value": 7, "note": ""})
        decision = await service.decided(record=RECORD)
        await service.service.put_record(service.caller, "site", "s-1", 1, {"value": 7, "note": "other"})
        done = await verdict(service, decision)
        assert done["status"] == "committed", "the decisive field is what it was"
        second = await service.decided("other", record={"kind": "proposal", "id": "p-2"})
        await service.service.put_record(service.caller, "site", "s-1", 2, {"value": 8, "note": ""})
        stale = await refused(service, second)
        renewed = await service.shown(second["id"])
    assert stale.extra["moved"] == ["limit"]
    assert renewed["review"]["proposal"]["terms"] == {"total": 8}


async def test_a_version_that_the_caller_named_and_that_is_gone_cannot_be_approved(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD | {"expected_version": 0})
        await service.service.put_record(service.caller, "proposal", "p-1", 0, {"value": 1, "note": ""})
        stale = await refused(service, decision)
        done = await service.shown(decision["id"])
    assert stale.extra["decision_status"] == done["status"] == "conflicted"
    assert done["outcome"]["code"] == "stale-version"


@pytest.mark.parametrize(("now", "moves"), [(3, False), (4, True)])
async def test_evidence_that_is_too_old_by_now_is_read_again_and_has_to_be_the_same(
    database_url: str, root: asyncpg.Connection, now: int, moves: bool
) -> None:
    source = Fact("rates", values(3, now))
    rate = Evidence("rate", source, deadline_ms=1_000, freshness=MaxAge(timedelta(hours=1)))
    coordinator = service_of(LIMIT, rate, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        await let_pass(root, decision, hours=2)
        aged = await service.shown(decision["id"])
        assert aged["review"]["evidence_age_ms"]["rate"] >= 7_200_000
        if moves:
            stale = await refused(service, decision)
            assert stale.extra["moved"] == ["rate"]
        else:
            done = await verdict(service, decision)
            assert done["status"] == "committed"
            assert done["packet_digest"] == decision["packet_digest"]
    assert source.reads == 2


async def test_evidence_that_is_young_enough_is_not_read_again(database_url: str) -> None:
    source = Fact("rates", values(3, 4))
    rate = Evidence("rate", source, deadline_ms=1_000, freshness=MaxAge(timedelta(hours=1)))
    coordinator = service_of(LIMIT, rate, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        assert (await verdict(service, await service.decided(record=RECORD)))["status"] == "committed"
    assert source.reads == 1


async def let_pass(root: asyncpg.Connection, decision: Any, *, hours: int) -> None:
    """Let the decision have come into review that much earlier."""
    for column in ("answer", "view"):
        stored = await root.fetchval(f"SELECT {column} FROM decisions WHERE id::text = $1", decision["id"])
        if stored is None:
            continue
        view = json.loads(stored)
        for name in ("as_of", "since"):
            then = datetime.fromisoformat(view["review"][name]) - timedelta(hours=hours)
            view["review"][name] = then.isoformat().replace("+00:00", "Z")
        await root.execute(
            f"UPDATE decisions SET {column} = $2::text::json WHERE id::text = $1",
            decision["id"],
            json.dumps(view),
        )


async def test_a_source_that_cannot_tell_leaves_the_review_as_it_is_for_the_same_verdict_again(
    database_url: str, root: asyncpg.Connection
) -> None:
    async def down(request: Any, n: int) -> Any:
        return Failed("away", "the source is away") if n in (2, 3) else await values(7)(request, n)

    flaky = Evidence("limit", Fact("limits", down), deadline_ms=1_000, freshness=Decisive("value"))
    coordinator = service_of(flaky, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        one, other = reviewer(service), reviewer(service)
        assert await unconfirmed(service, decision, by=one) == ["limit"]
        same = await service.shown(decision["id"])
        assert same["packet_digest"] == decision["packet_digest"]
        assert same["review"]["proposal"] == decision["review"]["proposal"]
        assert (await refused(service, decision, by=other)).extra["etag"] == "2"
        assert await unconfirmed(service, decision, by=one) == ["limit"]
        done = await verdict(service, decision, by=one)
        assert (done["status"], done["review"]["unconfirmed"]) == ("committed", [])
    assert (await kinds_of(root, service.tenant)).count("decision.review-unconfirmed") == 2


async def test_a_review_that_could_not_be_confirmed_is_open_for_everybody(database_url: str) -> None:
    async def down(request: Any, n: int) -> Any:
        return Failed("away", "the source is away") if n % 2 == 0 else await values(7)(request, n)

    flaky = Evidence("limit", Fact("limits", down), deadline_ms=1_000, freshness=Decisive("value"))
    coordinator = service_of(flaky, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        assert await unconfirmed(service, decision) == ["limit"]
        assert (await verdict(service, decision, etag="2"))["status"] == "committed"


async def test_optional_evidence_that_cannot_be_read_again_is_not_taken_for_missing(
    database_url: str,
) -> None:
    async def down(request: Any, n: int) -> Any:
        return Failed("away", "the source is away") if n == 2 else await values(7)(request, n)

    flaky = Evidence(
        "limit", Fact("limits", down), deadline_ms=1_000, freshness=Decisive("value"), required=False
    )

    def either_way(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Review("a person looks", proposal=Commit({"limit": packet[flaky].or_else(Number(0)).value}))

    async with running(service_of(flaky, policy=either_way), database_url) as service:
        decision = await service.decided()
        assert await unconfirmed(service, decision) == ["limit"]
        assert (await service.shown(decision["id"]))["review"]["proposal"]["terms"] == {"limit": 7}
        assert (await verdict(service, decision, etag="2"))["outcome"]["terms"] == {"limit": 7}


async def test_required_evidence_that_is_gone_leaves_a_review_that_can_only_be_rejected(
    database_url: str,
) -> None:
    async def gone(request: Any, n: int) -> Any:
        return Absent() if n > 1 else await values(7)(request, n)

    vanishing = Evidence("limit", Fact("limits", gone), deadline_ms=1_000, freshness=Decisive("value"))
    coordinator = service_of(vanishing, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        await refused(service, decision)
        renewed = await service.shown(decision["id"])
        assert (renewed["status"], renewed["review"]["code"]) == ("in_review", "evidence-missing")
        with pytest.raises(StateConflict, match="reject it"):
            await verdict(service, decision, etag="2")
        assert (await verdict(service, decision, "reject", etag="2"))["status"] == "declined"


async def test_what_another_version_of_the_policy_proposed_is_concluded_anew(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        coordinator.types["quote"].policy_version = "2"
        stale = await refused(service, decision)
        renewed = await service.shown(decision["id"])
        assert (stale.extra["moved"], renewed["policy_version"]) == (["policy_version"], "2")
        assert (await verdict(service, decision, etag="2"))["status"] == "committed"


async def test_a_change_that_the_record_kind_refuses_fails_and_sends_nothing(
    database_url: str, root: asyncpg.Connection
) -> None:
    strict: RecordKind[Number] = RecordKind("proposal", Number, transition=lambda old, new: "never")
    sink = Sent()
    async with running(
        service_of(LIMIT, policy=ask_a_person, effects=[sink], record=strict), database_url
    ) as service:
        decision = await service.decided(record=RECORD)
        done = await verdict(service, decision)
        kinds = await kinds_of(root, service.tenant)
    assert (done["status"], done["outcome"]["code"], sink.sends) == ("failed", "transition-refused", [])
    assert kinds[-2:] == ["decision.approved", "decision.failed"]


# Lost replies, crashes and stops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["review.before", "review.after", "commit.before", "commit.after"])
async def test_an_approval_whose_reply_is_lost_anywhere_commits_exactly_once(
    point: str, database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent()
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision, somebody = await service.decided(record=RECORD), reviewer(service)
        arm(f"{point}=lose")
        done = await repeated(service, decision, "approve", somebody)
        assert done["status"] == "committed"
        if point == "commit.after":  # its operations are left to their lease, as after any lost COMMIT
            assert await root.fetchval("SELECT count(*) FROM operations WHERE state = 'dispatching'") == 1
        else:
            await sent_once(service, done, sink)
        kinds = await kinds_of(root, service.tenant, decision=UUID(decision["id"]))
    assert kinds.count("decision.approved") == kinds.count("decision.committed") == 1
    if point.startswith("commit"):
        assert kinds.count("decision.approving") == 1, "what became of it was read back, not begun again"
    assert await root.fetchval("SELECT count(*) FROM record_versions") == 1


@pytest.mark.parametrize("point", ["review.before", "review.after"])
async def test_a_rejection_whose_reply_is_lost_is_carried_out_once(
    point: str, database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision, somebody = await service.decided(record=RECORD), reviewer(service)
        arm(f"{point}=lose")
        assert (await repeated(service, decision, "reject", somebody))["status"] == "declined"
        kinds = await kinds_of(root, service.tenant, decision=UUID(decision["id"]))
    assert kinds.count("decision.rejected") == kinds.count("decision.declined") == 1


async def repeated(service: Running, decision: Any, given: Verdict, by: Key) -> Any:
    """As a careful caller does: the same again, until there is an answer."""
    for _ in range(3):
        try:
            return await verdict(service, decision, given, by=by)
        except Overloaded:
            continue
    raise AssertionError("never answered")


async def test_a_claim_whose_process_died_is_open_again_to_its_reviewer_and_to_others(
    database_url: str, root: asyncpg.Connection
) -> None:
    """The claim is durable and its holder is gone: it hangs for ever in a process of its own."""
    gate = Gate()

    async def hangs(request: Any, n: int) -> Any:
        if n == 2:
            await gate()
        return await values(7)(request, n)

    stuck = Evidence("limit", Fact("limits", hangs), deadline_ms=60_000, freshness=Decisive("value"))
    sink, limits = Sent(), {"default_wait_s": 1}
    dying_type = service_of(stuck, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[sink], record=PROPOSAL)
    async with (
        running(dying_type, database_url) as dying,
        running(coordinator, database_url, **limits) as other,
    ):
        decision, somebody = await dying.decided(record=RECORD), reviewer(dying)
        approving = asyncio.ensure_future(verdict(dying, decision, by=somebody))
        await gate.arrived.wait()
        stale = await refused(other, decision, etag="2")
        assert "just now" in stale.detail, "it is held"
        await expire(root, UUID(decision["id"]))
        done = await verdict(other, decision, by=somebody)
        assert done["status"] == "committed", "the same verdict on the same etag claims it again"
        await sent_once(other, done, sink)
        gate.open()
        assert (await approving)["status"] == "committed", "the late one finds that it was carried out"
        kinds = await kinds_of(root, other.tenant, decision=UUID(decision["id"]))
    assert kinds.count("decision.committed") == kinds.count("decision.approved") == 1
    assert len(sink.sends) == 1


async def test_an_approval_that_takes_longer_than_a_lease_is_still_its_holders(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()

    async def hangs(request: Any, n: int) -> Any:
        if n == 2:
            await gate()
        return await values(7)(request, n)

    stuck = Evidence("limit", Fact("limits", hangs), deadline_ms=60_000, freshness=Decisive("value"))
    coordinator = service_of(stuck, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    until = "SELECT lease_expires_at FROM decisions"
    async with running(coordinator, database_url, lease_ms=600, review_poll_ms=20) as service:
        decision = await service.decided(record=RECORD)
        approving = asyncio.ensure_future(verdict(service, decision))
        await gate.arrived.wait()
        await root.execute("UPDATE decisions SET review_expires_at = clock_timestamp()")
        first = await root.fetchval(until)

        async def renewed() -> bool:
            return bool(await root.fetchval(f"SELECT ({until}) > $1 AND clock_timestamp() > $1", first))

        await eventually(renewed, what="the first lease is over, and there is another")
        assert "just now" in (await refused(service, decision, etag="2")).detail
        gate.open()
        assert (await approving)["status"] == "committed", "its time ran out while it was being approved"


async def test_an_abandoned_claim_can_be_rejected_by_another_on_the_present_etag(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as dying, running(coordinator, database_url) as other:
        decision = await dying.decided(record=RECORD)
        arm("review.after=lose")
        with pytest.raises(Overloaded):
            await verdict(dying, decision)
        await expire(root, UUID(decision["id"]))
        assert (await refused(other, decision, "reject")).extra["etag"] == "2"
        assert (await verdict(other, decision, "reject", etag="2"))["status"] == "declined"


async def test_the_same_approval_sent_several_times_at_once_is_carried_out_once(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url, pool_size=8) as service:
        for n in range(8):
            decision = await service.decided(f"k{n}", record={"kind": "proposal", "id": f"p-{n}"})
            by = reviewer(service)
            same = [verdict(service, decision, by=by) for _ in range(4)]
            assert {done["status"] for done in await asyncio.gather(*same)} == {"committed"}
            kinds = await kinds_of(root, service.tenant, decision=UUID(decision["id"]))
            assert kinds.count("decision.approving") == 1


async def test_a_fault_of_ours_leaves_the_review_open(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        arm("fence.after=raise")
        assert await unconfirmed(service, decision) == ["internal-error"]
        assert (await verdict(service, decision, etag="2"))["status"] == "committed"


async def test_an_approval_that_takes_too_long_leaves_the_review_open(database_url: str) -> None:
    gate = Gate()

    async def hangs(request: Any, n: int) -> Any:
        if n == 2:
            await gate()
        return await values(7)(request, n)

    stuck = Evidence("limit", Fact("limits", hangs), deadline_ms=60_000, freshness=Decisive("value"))
    coordinator = service_of(stuck, policy=ask_a_person, effects=[Sent()], record=PROPOSAL, time_limit_ms=400)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        assert await unconfirmed(service, decision) in (["time-limit"], ["limit"])
        assert (await verdict(service, decision, etag="2"))["status"] == "committed"


async def test_approvals_beyond_the_limit_are_refused_at_once_and_change_nothing(database_url: str) -> None:
    gate = Gate()

    async def hangs(request: Any, n: int) -> Any:
        if n == 3:
            await gate()
        return await values(7)(request, n)

    stuck = Evidence("limit", Fact("limits", hangs), deadline_ms=60_000, freshness=Decisive("value"))
    coordinator = service_of(stuck, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url, max_approving=1) as service:
        first, second = [await service.decided(k, record={"kind": "proposal", "id": k}) for k in ("a", "b")]
        approving = asyncio.ensure_future(verdict(service, first))
        await gate.arrived.wait()
        with pytest.raises(Overloaded):
            await verdict(service, second)
        assert (await service.shown(second["id"]))["review"]["etag"] == "1"
        assert (await verdict(service, second, "reject"))["status"] == "declined"
        gate.open()
        assert (await approving)["status"] == "committed"


async def test_a_stopping_process_claims_no_review(database_url: str) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        service.service.stop_taking()
        with pytest.raises(Draining):
            await verdict(service, decision)


# The end of its time, withdrawal, the list, replay -----------------------------------------------------------------------------


async def test_a_review_that_nobody_ends_in_time_expires_by_the_databases_clock(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(
        LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL, review_within=timedelta(hours=1)
    )
    async with running(coordinator, database_url, review_poll_ms=20) as service:
        first = await service.post(record=RECORD)
        assert isinstance(first, Rested)
        other = await service.decided("other", record={"kind": "proposal", "id": "p-2"})
        await root.execute(
            "UPDATE decisions SET review_expires_at = clock_timestamp() WHERE id = $1", first.id
        )

        async def expired() -> Any:
            shown = await service.shown(first.id)
            return shown if shown["status"] == "expired" else None

        done = await eventually(expired, what="the review has expired")
        stale = await refused(service, done)
        again = await service.post(record=RECORD)
        kinds = await kinds_of(root, service.tenant, decision=first.id)
        assert (await service.shown(other["id"]))["status"] == "in_review"
        await agrees(root, coordinator, done, "decision.expired")
    assert isinstance(again, Rested)
    assert again.body == first.body
    assert (done["outcome"]["code"], stale.extra["decision_status"]) == ("review-expired", "expired")
    assert kinds == ["decision.running", "decision.in_review", "decision.expired"]


async def test_a_review_whose_time_is_over_is_not_approved_though_nobody_has_ended_it_yet(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url, review_poll_ms=60_000) as service:
        decision = await service.decided(record=RECORD)
        await root.execute("UPDATE decisions SET review_expires_at = clock_timestamp()")
        assert "in time" in (await refused(service, decision)).detail


async def test_whoever_asked_may_take_it_back_from_review(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=RECORD)
        answer = json.loads(await service.service.cancel(service.caller, UUID(decision["id"])))
        assert (answer["status"], answer["stopped"]) == ("cancelled", True)
        assert (await refused(service, decision)).extra["decision_status"] == "cancelled"
        assert (await kinds_of(root, service.tenant))[-1] == "decision.cancelled"


async def test_reviews_are_listed_by_class_then_by_the_end_of_their_time_on_stable_pages(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        ids: dict[str, str] = {}
        for name, class_ in (("d", "bulk"), ("b", "interactive"), ("c", "interactive"), ("a", "urgent")):
            made = await service.decided(name, record={"kind": "proposal", "id": name}, class_=class_)
            ids[made["id"]] = name
        later = next(UUID(id) for id, name in ids.items() if name == "c")
        await root.execute(
            "UPDATE decisions SET review_expires_at = review_expires_at + interval '1 h' WHERE id = $1", later
        )
        await root.execute("UPDATE decisions SET class = 'no more' WHERE class = 'bulk'")
        listed: list[str] = []
        page, after = await service.service.reviews.by_urgency(service.tenant, after=None, limit=1)
        early = await service.decided("early", record={"kind": "proposal", "id": "e"}, class_="urgent")
        await root.execute(
            "UPDATE decisions SET review_expires_at = review_expires_at - interval '1 h' WHERE id::text = $1",
            early["id"],
        )
        while True:
            listed += [ids.get(view.id, "new") for _, view in page]
            if after is None:
                break
            page, after = await service.service.reviews.by_urgency(service.tenant, after=after, limit=1)
        stranger = await new_tenant(database_url, "two")
        assert (await service.service.reviews.by_urgency(stranger, after=None, limit=9))[0] == []
    assert listed == ["a", "b", "c", "d"]


async def agrees(root: asyncpg.Connection, coordinator: Any, decision: Any, kind: str) -> None:
    """A replay of the decision finds no difference, the digest in its receipt of that kind included (I18)."""
    body = await root.fetchval(
        "SELECT body FROM receipts WHERE decision_id::text = $1 AND kind = $2", decision["id"], kind
    )
    view = msgspec.json.decode(msgspec.json.encode(decision), type=DecisionView)
    found = replay(
        coordinator.types["quote"], Stored(view=view, outcome_digest=json.loads(body)["outcome_digest"])
    )
    assert found.differences == []
    assert {"packet_digest", "outcome", "outcome_digest"} <= set(found.compared)


async def test_a_reviewed_decision_can_be_replayed(database_url: str, root: asyncpg.Connection) -> None:
    coordinator = service_of(LIMIT, policy=ask_a_person, effects=[Sent()], record=PROPOSAL)
    async with running(coordinator, database_url) as service:
        approved, rejected = [
            await service.decided(k, record={"kind": "proposal", "id": k}) for k in ("a", "b")
        ]
        await agrees(root, coordinator, approved, "decision.in_review")
        await agrees(root, coordinator, await verdict(service, approved), "decision.committed")
        await agrees(root, coordinator, await verdict(service, rejected, "reject"), "decision.declined")
        other = replay(
            service_of(LIMIT, policy=lambda *_: Review("below it"), record=PROPOSAL).types["quote"],
            Stored(view=msgspec.json.decode(msgspec.json.encode(approved), type=DecisionView)),
        )
    assert [difference.what for difference in other.differences] == ["outcome"]
