"""The service: one answer for each key, whatever happens in between (I1, I11, I12); what waits is bounded (I16), slots come in pairs
(I15), and every decision ends (I17)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import anyio
import asyncpg
import pytest

from coordinator import Commit, Decline, Effect, Evidence, NeedMore, Record, Review
from coordinator.core.evidence import Found, ReadRequest
from coordinator.core.fairness import ClassLimits
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.core.record import Change
from coordinator.engine.service import Pending, Rested
from coordinator.errors import (
    DecisionInFlight,
    Draining,
    IdempotencyKeyReused,
    MalformedRequest,
    Overloaded,
    QueueFull,
    UnknownDecisionType,
)
from tests.engine.harness import (
    ONE_CLASS,
    PROPOSAL,
    Ask,
    Fact,
    Gate,
    Number,
    Running,
    Sent,
    running,
    service_of,
    sum_up,
)
from tests.store.given import blocked, kinds_of
from tests.store.proxy import Proxy, proxy
from tests.support import eventually
from tests.workers.research import coordinator as research

Policy = Callable[[Ask, Packet, Record[Any]], Outcome]
A_RECORD = {"kind": "proposal", "id": "p-1"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def gated(gate: Gate, **more: Any) -> Evidence[Number, Any]:
    return Evidence("a", Fact("a", gate.answering()), **{"deadline_ms": 60_000} | more)


def always(outcome: Outcome) -> Policy:
    return lambda ask, packet, record: outcome


# One answer for each key ------------------------------------------------------------------------------------------------------


async def test_a_replay_is_the_same_bytes_and_nothing_runs_again(
    database_url: str, root: asyncpg.Connection
) -> None:
    source = Fact("a", 4)
    async with running(service_of(Evidence("a", source, deadline_ms=1_000)), database_url) as service:
        first, again = await service.post(), await service.post()
        receipts = await kinds_of(root, service.tenant)
    assert isinstance(first, Rested)
    assert isinstance(again, Rested)
    assert (first.status, first.replayed) == (201, False)
    assert (again.status, again.replayed, again.body, again.id) == (200, True, first.body, first.id)
    assert source.reads == 1
    assert receipts == ["decision.running", "decision.committed"]


async def test_another_request_under_a_used_key_is_refused_and_changes_nothing(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with running(service_of(), database_url) as service:
        first = await service.post("k", 1)
        with pytest.raises(IdempotencyKeyReused) as refused:
            await service.post("k", 2)
        assert refused.value.extra == {"decision": str(first.id)}
        assert (await service.post("k", 1)).body == first.body
    assert await root.fetchval("SELECT count(*) FROM decisions") == 1


async def test_whoever_comes_while_it_runs_joins_and_gets_the_same_answer(database_url: str) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url) as service:
        callers = [asyncio.ensure_future(service.post("k")) for _ in range(5)]
        await gate.arrived.wait()
        gate.open()
        answers = await asyncio.gather(*callers)
    assert len({answer.body for answer in answers}) == 1
    assert len({answer.id for answer in answers}) == 1


async def test_a_joiner_whose_wait_is_over_is_told_that_it_is_in_flight(database_url: str) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url) as service:
        first = asyncio.ensure_future(service.post("k"))
        await gate.arrived.wait()
        with pytest.raises(DecisionInFlight) as refused:
            await service.post("k", wait=0)
        gate.open()
        assert refused.value.extra["decision"] == str((await first).id)


async def test_a_caller_that_does_not_wait_gets_it_pending_and_it_rests_later(database_url: str) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url) as service:
        pending = await service.post("k", wait=0)
        assert isinstance(pending, Pending)
        view = json.loads(pending.body)
        assert (view["status"], view["queue_position"], view["estimated_start_ms"]) == ("running", 0, 0)
        gate.open()
        assert (await service.decided("k"))["status"] == "committed"
        assert (await service.shown(pending.id))["status"] == "committed"


async def test_a_caller_that_goes_away_leaves_its_decision_running_to_its_end(database_url: str) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url) as service:
        caller = asyncio.ensure_future(service.post("k"))
        await gate.arrived.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        gate.open()
        assert (await service.decided("k"))["status"] == "committed"


async def test_a_refusal_stores_nothing_and_leaves_the_key_free(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with running(service_of(), database_url) as service:
        with pytest.raises(UnknownDecisionType):
            await service.post("k", type="no-such-type")
        with pytest.raises(MalformedRequest):
            await service.post("k", input={"value": "many"})
        with pytest.raises(MalformedRequest):
            await service.post("k", **{"class": "no-such-class"})
        assert await root.fetchval("SELECT count(*) FROM decisions") == 0
        assert (await service.decided("k"))["status"] == "committed"


# What a policy concludes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "status"), [(Decline("too dear"), "declined"), (Review("a person has to look"), "in_review")]
)
async def test_declined_and_in_review_change_nothing_and_send_nothing(
    outcome: Outcome, status: str, database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent()
    coordinator = service_of(policy=always(outcome), record=PROPOSAL, effects=[sink])
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=A_RECORD)
        receipts = await kinds_of(root, service.tenant)
    assert (decision["status"], decision["record"]["committed_version"]) == (status, None)
    assert receipts == ["decision.running", f"decision.{status}"]
    assert await root.fetchval("SELECT count(*) FROM record_versions") == 0
    assert sink.sends == []


def raises(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    raise LookupError("a fault of\x00 the policy's")


CANNOT_BE_CARRIED_OUT: dict[str, tuple[Policy, str]] = {
    "it raises": (raises, "policy-raised"),
    "it returns None": (lambda *_: None, "policy-returned-junk"),  # type: ignore[dict-item,return-value]  # as an untyped policy may
    "an effect that is not declared": (always(Commit({}, effects=[Effect("fax", {})])), "unknown-effect"),
    "a record that was not read": (
        always(Commit({}, changes=[Change("proposal", "another", Number(1))])),
        "record-not-read",
    ),
    "one record twice": (
        lambda ask, packet, record: Commit({}, changes=[record.becomes(Number(1))] * 2),
        "record-changed-twice",
    ),
    "terms that are not JSON": (always(Commit(object())), "outcome-not-json"),
    "terms with a NaN": (always(Commit({"price": float("nan")})), "outcome-not-json"),
    "terms with a NUL": (always(Commit({"text": "a\x00b"})), "outcome-not-json"),
    "an effect that is not JSON": (
        always(Commit({}, effects=[Effect("send", object())])),
        "outcome-not-json",
    ),
    "evidence that is not declared": (always(NeedMore(["nothing"])), "unknown-evidence"),
    "data that the record kind does not allow": (
        lambda ask, packet, record: Commit({}, changes=[record.becomes({"value": "many"})]),
        "transition-refused",
    ),
}


@pytest.mark.parametrize("what", CANNOT_BE_CARRIED_OUT)
async def test_what_cannot_be_carried_out_fails_with_its_reason_and_a_receipt(
    what: str, database_url: str, root: asyncpg.Connection
) -> None:
    policy, code = CANNOT_BE_CARRIED_OUT[what]
    sink = Sent()
    coordinator = service_of(policy=policy, record=PROPOSAL, effects=[sink])
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record=A_RECORD)
        receipts = await kinds_of(root, service.tenant)
    assert (decision["status"], decision["outcome"]["code"]) == ("failed", code)
    assert decision["outcome"]["reason"].isprintable()
    assert receipts == ["decision.running", "decision.failed"]
    assert await root.fetchval("SELECT count(*) FROM record_versions") == 0
    assert sink.sends == []


async def test_a_transition_that_raises_fails_its_own_decision_only(database_url: str) -> None:
    def transition(old: Number | None, new: Number) -> str | None:
        if new.value == 13:
            raise ArithmeticError("a fault of the transition's")
        return None

    kind = type(PROPOSAL)("proposal", Number, transition=transition)
    async with running(service_of(record=kind), database_url) as service:
        unlucky, lucky = await asyncio.gather(
            service.decided("a", 13, record=A_RECORD),
            service.decided("b", 1, record=A_RECORD | {"id": "p-2"}),
        )
    assert (unlucky["status"], lucky["status"]) == ("failed", "committed")


async def test_the_log_names_the_callers_trace_when_a_policy_raises(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with running(service_of(policy=raises), database_url) as service:
            decision = await service.decided(traceparent=TRACEPARENT)
    assert decision["trace_id"] == TRACE
    logged = [
        record
        for record in caplog.records
        if "Traceback" in record.getMessage() and "policy" in record.getMessage()
    ]
    assert len(logged) == 1
    assert TRACE in logged[0].getMessage()


async def test_a_policy_that_always_wants_more_ends_in_review(database_url: str) -> None:
    more = Evidence("more", Fact("more"), deadline_ms=1_000, required=False, on_demand=True)
    coordinator = service_of(more, policy=always(NeedMore(["more"])))
    async with running(coordinator, database_url) as service:
        decision = await service.decided()
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "round-limit")


# Ends ------------------------------------------------------------------------------------------------------------------------


async def test_a_decision_that_runs_out_of_time_expires(database_url: str, root: asyncpg.Connection) -> None:
    gate = Gate()
    async with running(service_of(gated(gate), record=PROPOSAL), database_url) as service:
        decision = await service.decided(time_limit_ms=100, record=A_RECORD)
        receipts = await kinds_of(root, service.tenant)
    assert decision["status"] in {"expired", "unresolved"}
    assert receipts[0] == "decision.running"
    assert len(receipts) == 2
    assert gate.inside == 0


async def test_a_queued_decision_that_runs_out_of_time_expires_and_leaves_the_queue(
    database_url: str,
) -> None:
    gate = Gate()
    limits = {"max_running": 1, "classes": ONE_CLASS, "poll_ms": 10}
    async with running(service_of(gated(gate)), database_url, **limits) as service:
        first = asyncio.ensure_future(service.post("first"))
        await gate.arrived.wait()
        late = await service.decided("late", time_limit_ms=50)
        assert (late["status"], late["outcome"]["code"]) == ("expired", "time-limit")
        gate.open()
        await first
        assert isinstance(await service.post("next"), Rested)


async def test_a_cancelled_decision_changes_nothing_and_says_so(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate, sink = Gate(), Sent()
    coordinator = service_of(gated(gate), record=PROPOSAL, effects=[sink])
    async with running(coordinator, database_url) as service:
        pending = await service.post("k", wait=0, record=A_RECORD)
        await gate.arrived.wait()
        said = json.loads(await service.service.cancel(service.caller, pending.id))
        again = json.loads(await service.service.cancel(service.caller, pending.id))
        assert (said["status"], said["stopped"], said["operations"]) == ("cancelled", True, [])
        assert again == said
        assert (await service.decided("k", record=A_RECORD))["status"] == "cancelled"
        assert await kinds_of(root, service.tenant) == ["decision.running", "decision.cancelled"]
    assert gate.inside == 0
    assert await root.fetchval("SELECT count(*) FROM record_versions") == 0


async def test_a_queued_decision_can_be_cancelled_while_another_one_takes_the_slot_it_waited_for(
    database_url: str, root: asyncpg.Connection
) -> None:
    """Its rest is being written (and is made to wait) when the slot comes free: the slot is not lost on it."""
    gate = Gate()
    async with running(service_of(gated(gate)), database_url, max_running=1, classes=ONE_CLASS) as service:
        first = asyncio.ensure_future((await service.of_another_tenant()).post("first"))
        await gate.arrived.wait()
        queued = await service.post("queued", wait=0)
        async with root.transaction():
            await root.execute("SELECT FROM decisions WHERE id = $1 FOR UPDATE", queued.id)
            cancelling = asyncio.ensure_future(service.service.cancel(service.caller, queued.id))
            await blocked_elsewhere(database_url)
            gate.open()
            assert isinstance(await first, Rested)
        assert json.loads(await cancelling)["status"] == "cancelled"
        assert isinstance(await service.post("next"), Rested)
        await eventually(lambda: slots_busy(service) == 0)


async def blocked_elsewhere(url: str) -> None:
    """As `blocked`, asked from a connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        await blocked(connection)
    finally:
        await connection.close()


async def test_a_cancel_that_comes_during_the_commit_waits_for_it_and_the_effects_are_sent(
    database_url: str, root: asyncpg.Connection
) -> None:
    """COMMIT cannot be recalled; what was promised is dispatched at once, not after a lost lease."""
    sink = Sent()

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({}, changes=[record.becomes(Number(1))], effects=[Effect("send", {})])

    coordinator = service_of(policy=policy, record=PROPOSAL, effects=[sink])
    async with running(coordinator, database_url) as service:
        await service.decided("first", record=A_RECORD)
        await eventually(lambda: len(sink.sends) == 1)
        async with root.transaction():
            await root.execute("SELECT FROM records FOR UPDATE")
            pending = await service.post("k", wait=0, record=A_RECORD)
            await blocked_elsewhere(database_url)
            cancelling = asyncio.ensure_future(service.service.cancel(service.caller, pending.id))
            await anyio.lowlevel.checkpoint()
        said = json.loads(await cancelling)
        assert (said["status"], said["stopped"]) == ("committed", False)
        await eventually(lambda: len(sink.sends) == 2)


# Queues and slots ------------------------------------------------------------------------------------------------------------


def slots_busy(service: Running) -> int:
    schedule = service.service._holdings.schedule
    return schedule.shares.busy + sum(turns.total for turns in schedule.turns.values())


async def test_the_second_of_one_slot_is_queued_with_its_place_and_an_estimate(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url, max_running=1, classes=ONE_CLASS) as service:
        first = asyncio.ensure_future(service.post("first"))
        await gate.arrived.wait()
        views = [json.loads((await service.post(key, wait=0)).body) for key in ("second", "third")]
        assert [view["status"] for view in views] == ["queued", "queued"]
        assert [view["queue_position"] for view in views] == [1, 2]
        assert 0 < views[0]["estimated_start_ms"] < views[1]["estimated_start_ms"]
        with pytest.raises(QueueFull) as refused:
            await service.post("fourth", wait=0)
        assert refused.value.extra["retry_after_ms"] >= 100
        gate.open()
        await first
        decision = await service.decided("second")
        assert "queue" in [stage["stage"] for stage in decision["timeline"]]
        await service.decided("third")
        assert (await service.decided("fourth"))["status"] == "committed", "the refused key is free"
        await eventually(lambda: slots_busy(service) == 0)
        rows = await root.fetch(
            "SELECT r.kind FROM receipts r JOIN decisions d ON d.id = r.decision_id WHERE idempotency_key = 'second'"
            " ORDER BY r.index"
        )
    assert [row["kind"] for row in rows] == ["decision.queued", "decision.running", "decision.committed"]


async def test_slots_come_back_after_every_kind_of_end(database_url: str) -> None:
    gate = Gate()

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        match request.input.value:  # type: ignore[attr-defined]  # the input is an Ask
            case 1:
                raise RuntimeError
            case 2:
                await anyio.sleep_forever()
            case 3:
                await gate()
        return Found(Number(1))

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return raises(ask, packet, record) if ask.value == 4 else sum_up(ask, packet, record)

    evidence = Evidence("a", Fact("a", read), deadline_ms=60_000)
    async with running(
        service_of(evidence, policy=policy), database_url, max_running=1, classes=ONE_CLASS
    ) as service:
        await service.decided("unresolved", 1)
        await service.decided("expired", 2, time_limit_ms=30)
        cancelled = await service.post("cancelled", 3, wait=0)
        await gate.arrived.wait()
        queued = await service.post("queued", wait=0)
        await service.service.cancel(service.caller, queued.id)
        await service.service.cancel(service.caller, cancelled.id)
        await service.decided("failed", 4)
        with pytest.raises(IdempotencyKeyReused):
            await service.post("failed", 5)
        await service.decided("failed", 4)
        await eventually(lambda: slots_busy(service) == 0)
        assert isinstance(await service.post("last"), Rested)


async def test_a_taken_over_decision_that_has_to_wait_for_its_slot_runs_in_its_turn(
    database_url: str, root: asyncpg.Connection
) -> None:
    """The process that falls silent has no slot left to take it back."""
    classes = {"bulk": ClassLimits(weight=1, reserved=0, queue_depth=9)}
    gate = Gate()
    coordinator = service_of(gated(gate))
    limits = {"classes": classes, "lease_ms": 60_000}
    async with running(coordinator, database_url, max_running=1, **limits) as dying:
        orphan = await dying.post("orphan", wait=0, **{"class": "bulk"})
        await gate.arrived.wait()
        async with running(coordinator, database_url, poll_ms=10, max_running=2, **limits) as service:
            holder = asyncio.ensure_future(service.post("holder", **{"class": "bulk"}))
            await eventually(lambda: gate.inside == 2)
            await root.execute("UPDATE decisions SET lease_expires_at = '-infinity' WHERE id = $1", orphan.id)
            await eventually(lambda: orphan.id in service.service._holdings.runs)
            gate.open()
            await holder
            decision = await service.decided("orphan", **{"class": "bulk"})
    assert decision["status"] == "committed"
    kinds = [
        row["kind"] for row in await root.fetch("SELECT kind FROM receipts WHERE decision_id = $1", orphan.id)
    ]
    assert kinds.count("decision.committed") == 1


async def test_a_process_that_lost_a_lease_to_itself_keeps_serving(
    database_url: str, root: asyncpg.Connection
) -> None:
    """Renewals came too late, and its own sweep took the decision over: two runs of one decision in one process."""
    gate = Gate()
    source = Fact("a", gate.answering())
    evidence = Evidence("a", source, deadline_ms=60_000)
    async with running(service_of(evidence), database_url, poll_ms=10) as service:
        caller = asyncio.ensure_future(service.post("k"))
        await gate.arrived.wait()
        await root.execute("UPDATE decisions SET lease_expires_at = '-infinity'")
        await eventually(lambda: [run.token > 1 for run in service.service._holdings.runs.values()] == [True])
        gate.open()
        assert isinstance(await caller, Rested)
        assert (await service.decided("next"))["status"] == "committed"
        await eventually(lambda: slots_busy(service) == 0)
        assert (await kinds_of(root, service.tenant)).count("decision.committed") == 2


# Stopping --------------------------------------------------------------------------------------------------------------------


async def test_a_drain_finishes_what_runs_and_takes_nothing_new(database_url: str) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url) as service:
        caller = asyncio.ensure_future(service.post("k"))
        await gate.arrived.wait()
        service.service.stop_taking()
        with pytest.raises(Draining):
            await service.post("new")
        gate.open()
    assert isinstance(await caller, Rested)


async def test_a_drain_lets_go_of_what_does_not_finish_for_another_process(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    coordinator = service_of(gated(gate))
    async with running(coordinator, database_url, drain_s=0) as service:
        pending = await service.post("k", wait=0)
        await gate.arrived.wait()
    assert gate.inside == 0
    assert await root.fetchval("SELECT status FROM decisions WHERE id = $1", pending.id) == "queued"
    gate.open()
    async with running(coordinator, database_url, poll_ms=10) as service:
        assert (await service.decided("k"))["id"] == str(pending.id)


async def test_a_caller_that_waits_is_told_at_the_end_of_the_drain_that_the_decision_goes_on(
    database_url: str,
) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url, drain_s=0.1) as service:
        caller = asyncio.ensure_future(service.post("k", wait=60))
        await gate.arrived.wait()
        service.service.stop_taking()
        with anyio.fail_after(10):
            assert isinstance(await caller, Pending)


async def test_a_stop_leaves_the_tasks_of_workers_to_whoever_takes_over(
    database_url: str, root: asyncpg.Connection
) -> None:
    question = {"type": "question", "input": {"topic": "bees"}}
    async with running(research, database_url, drain_s=0) as service:
        await service.post("k", wait=0, **question)
        await eventually(lambda: root.fetchval("SELECT count(*) FROM tasks"))
    assert await root.fetchval("SELECT state FROM tasks") == "waiting"
    async with running(research, database_url, poll_ms=10, queue_poll_ms=20, drain_s=0):
        await eventually(lambda: root.fetchval("SELECT bool_or(decision_token > 1) FROM tasks"))
    assert await root.fetchval("SELECT count(*) FROM tasks") == 1, "it was adopted, not asked for again"


async def test_a_stop_ends_within_its_limit_even_if_the_database_is_away(database_url: str) -> None:
    gate = Gate()
    async with proxy(database_url) as network:
        coordinator = service_of(gated(gate))
        with anyio.fail_after(20):
            async with running(coordinator, network.url, drain_s=0) as service:
                await service.post("k", wait=0, time_limit_ms=100)
                await gate.arrived.wait()
                network.go_down()
                await eventually(
                    lambda: gate.inside == 0, what="its time is over, and it wants to write that"
                )


# COMMIT is unknown -----------------------------------------------------------------------------------------------------------


def losing(network: Callable[[], Proxy], how: str) -> Policy:
    """Arms the proxy for the next COMMIT, which is the decision's own."""

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        if ask.value == 1:
            setattr(network(), how, 1)
        return Commit(
            {"n": ask.value}, changes=[record.becomes(Number(ask.value))], effects=[Effect("send", {})]
        )

    return policy


@pytest.mark.parametrize("how", ["answers_to_lose", "commits_to_lose"])
async def test_a_decision_whose_commit_is_unknown_ends_exactly_once_with_one_answer(
    how: str, database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent()
    async with proxy(database_url) as network:
        policy = losing(lambda: network, how)
        coordinator = service_of(policy=policy, record=PROPOSAL, effects=[sink])
        async with running(coordinator, network.url) as service:
            first = await service.post("k", 1, record=A_RECORD)
            again = await service.post("k", 1, record=A_RECORD)
            assert network.lost == 1
            receipts = await kinds_of(root, service.tenant, decision=first.id)
    assert isinstance(first, Rested)
    assert (first.status, again.body) == (201, first.body)
    assert json.loads(first.body)["status"] == "committed"
    assert [kind for kind in receipts if kind.startswith("decision")] == [
        "decision.running",
        "decision.committed",
    ]
    assert await root.fetchval("SELECT max(version) FROM record_versions") == 1
    assert await root.fetchval("SELECT count(*) FROM operations") == 1
    assert len(sink.sends) <= 1


@pytest.mark.parametrize("how", ["answers_to_lose", "commits_to_lose"])
async def test_an_admission_whose_commit_is_unknown_is_found_again_or_can_be_repeated(
    how: str, database_url: str, root: asyncpg.Connection
) -> None:
    async with proxy(database_url) as network:
        async with running(service_of(), network.url, lease_ms=300, poll_ms=20) as service:
            await service.decided("warm-up")
            setattr(network, how, 1)
            try:
                await service.post("k")
            except Overloaded:
                assert how == "commits_to_lose"
            decision = await service.decided("k")
        assert network.lost == 1
    assert decision["status"] == "committed"
    assert await root.fetchval("SELECT count(*) FROM decisions WHERE idempotency_key = 'k'") == 1


async def test_a_decision_survives_a_database_that_goes_away_before_its_commit(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with proxy(database_url) as network:

        def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
            network.cut()
            return Commit({})

        async with running(service_of(policy=policy), network.url) as service:
            decision = await service.decided()
    assert decision["status"] == "committed"
