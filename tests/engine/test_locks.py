"""Named locks: one run at a time, never a circle of waiting, nothing committed under a lock that is another's (I2, I12, I17)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest
from prometheus_client import REGISTRY
from uuid_utils.compat import uuid7

from coordinator import Commit, Coordinator, Decline, Evidence, NeedMore, Record, Review, decision_type
from coordinator.core.decision import DecisionType
from coordinator.core.evidence import Found, ReadRequest
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.engine.service import Pending, Rested
from coordinator.errors import MalformedRequest
from coordinator.store.keys import Key
from tests.engine.harness import (
    ONE_CLASS,
    PROPOSAL,
    Ask,
    Fact,
    Gate,
    Number,
    Running,
    running,
    service_of,
    sum_up,
)
from tests.store.given import kinds_of, new_tenant
from tests.support import eventually

NEVER = {"lock_poll_ms": 60_000}
"""Nobody asks for a lock twice: what goes on, goes on because it was handed over."""
OFTEN = {"lock_poll_ms": 5, "lock_patience_ms": 20}
A_RECORD = {"kind": "proposal", "id": "p-1"}


def locked(source: Fact, *locks: str, name: str = "quote", **more: Any) -> DecisionType[Ask, Any]:
    known: dict[str, Any] = {"policy": sum_up, "policy_version": "1", "request": Ask, **more}
    return decision_type(
        name, evidence=[Evidence("a", source, deadline_ms=60_000)], locks=list(locks) or ["ledger"], **known
    )


def serving(gate: Gate, *locks: str, **more: Any) -> Coordinator:
    return Coordinator([locked(Fact("a", gate.answering()), *locks, **more)])


async def held(root: asyncpg.Connection) -> dict[str, int]:
    """The locks that are held, with their tokens."""
    rows = await root.fetch("SELECT name, fencing_token FROM locks WHERE decision_id IS NOT NULL")
    return {row["name"]: row["fencing_token"] for row in rows}


async def of_locks(root: asyncpg.Connection, tenant: UUID, **of: UUID) -> list[str]:
    return [kind for kind in await kinds_of(root, tenant, **of) if kind.startswith("lock.")]


def waiting(type: str = "quote") -> float:
    return REGISTRY.get_sample_value("coordinator_locks_waiting", {"type": type}) or 0.0


@asynccontextmanager
async def two(
    coordinator: Callable[[], Coordinator], url: str, **settings: Any
) -> AsyncIterator[tuple[Running, Running]]:
    """Two services on one database, of one tenant."""
    async with (
        running(coordinator(), url, **OFTEN | settings) as one,
        running(coordinator(), url, **OFTEN | settings) as other,
    ):
        yield one, other


# One at a time ----------------------------------------------------------------------------------------------------------------


async def test_a_type_without_locks_pays_nothing_for_them(
    database_url: str, root: asyncpg.Connection
) -> None:
    def transactions() -> float:
        return REGISTRY.get_sample_value("coordinator_transactions_total", {"kind": "lock"}) or 0.0

    before = transactions()
    async with running(service_of(), database_url) as service:
        decision = await service.decided()
    assert transactions() == before
    assert "lock" not in [stage["stage"] for stage in decision["timeline"]]
    assert await root.fetchval("SELECT count(*) FROM locks") == 0


async def test_the_second_reads_nothing_until_the_first_rests_and_then_goes_on_at_once(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with running(serving(gate), database_url, **NEVER) as service:
        first = await service.post("first", wait=0)
        await gate.arrived.wait()
        second = asyncio.ensure_future(service.post("second"))
        await eventually(lambda: waiting() == 1)
        assert (gate.inside, await held(root)) == (1, {"ledger": 1})
        gate.open()
        assert isinstance(await second, Rested)
        assert await held(root) == {}
        assert await of_locks(root, service.tenant, decision=first.id) == ["lock.taken", "lock.released"]
    tokens = [
        (row["kind"], json.loads(row["body"])["fencing_token"])
        for row in await root.fetch("SELECT kind, body FROM receipts WHERE kind LIKE 'lock.%' ORDER BY index")
    ]
    assert tokens == [("lock.taken", 1), ("lock.released", 1), ("lock.taken", 2), ("lock.released", 2)]
    assert waiting() == 0


async def test_other_names_do_not_wait_for_each_other(database_url: str) -> None:
    gate = Gate()
    async with running(serving(gate, "site/{input.value}"), database_url, **NEVER) as service:
        posts = [asyncio.ensure_future(service.post(str(n), n)) for n in (1, 2)]
        await eventually(lambda: gate.inside == 2)
        gate.open()
        await asyncio.gather(*posts)


async def test_the_record_is_read_under_the_lock_so_nothing_moved_when_the_turn_comes(
    database_url: str,
) -> None:
    gate = Gate()
    async with running(serving(gate, record=PROPOSAL), database_url, **NEVER) as service:
        posts = [asyncio.ensure_future(service.decided(key, record=A_RECORD)) for key in "abc"]
        await gate.arrived.wait()
        gate.open()
        decisions = await asyncio.gather(*posts)
    assert sorted(one["record"]["committed_version"] for one in decisions) == [1, 2, 3]
    assert [one["fence"]["rounds"] for one in decisions] == [1, 1, 1]


@pytest.mark.parametrize(
    ("policy", "status"),
    [
        (lambda *_: Decline("no"), "declined"),
        (lambda *_: Review("a person"), "in_review"),
        (lambda *_: 1 / 0, "failed"),
        (lambda *_: NeedMore(["a"]), "in_review"),
        (lambda *_: Commit({}), "committed"),
    ],
)
async def test_every_rest_lets_go(
    policy: Any, status: str, database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = Coordinator([locked(Fact("a"), "one", "two", policy=policy)])
    async with running(coordinator, database_url, **NEVER) as service:
        assert (await service.decided("first"))["status"] == status
        assert await held(root) == {}
        assert await of_locks(root, service.tenant) == ["lock.taken"] * 2 + ["lock.released"] * 2
        assert (await service.decided("second"))["status"] == status


async def test_a_request_that_names_no_lock_is_refused_with_nothing_stored(
    database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = serving(Gate(), "record/{record.id}", "site/{input.value}", record=PROPOSAL)
    long = {"kind": "proposal", "id": "x" * 250}
    async with running(coordinator, database_url) as service:
        with pytest.raises(MalformedRequest) as refused:
            await service.post(record=long)
    (error,) = refused.value.extra["errors"]  # type: ignore[misc]  # a list of dicts
    assert error["pointer"] == "/record/id"
    assert await root.fetchval("SELECT count(*) FROM decisions") == 0


# No circle, no starving ----------------------------------------------------------------------------------------------------------


class OneAtATime:
    """Evidence that finds out if two runs ever read at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    async def __call__(self, request: ReadRequest, _: int) -> Found[Number]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await anyio.lowlevel.checkpoint()
        self.inside -= 1
        return Found(Number(1))


@pytest.mark.parametrize("orders", [("ab", "ba"), ("abc", "cb"), ("a", "cba")])
async def test_decisions_that_declare_their_locks_in_opposite_orders_all_commit_one_at_a_time(
    orders: tuple[str, str], database_url: str, root: asyncpg.Connection
) -> None:
    inside = OneAtATime()

    def coordinator() -> Coordinator:
        types = [locked(Fact("a", inside), *locks, name=f"locks-{locks}") for locks in orders]
        return Coordinator(types)

    async with two(coordinator, database_url) as services:
        posts = [
            service.post(f"{n}-{of}-{locks}", type=f"locks-{locks}")
            for n in range(12)
            for of, service in enumerate(services)
            for locks in orders
        ]
        answers = await asyncio.gather(*posts)
    assert {json.loads(answer.body)["status"] for answer in answers} == {"committed"}
    assert inside.most == 1
    assert await held(root) == {}


async def test_a_process_with_a_line_of_its_own_lets_another_ones_turn_come(
    database_url: str, root: asyncpg.Connection
) -> None:
    """The next in line asks at once when the first rests; the other process, which has asked before, only with its next poll."""
    gate = Gate()
    fair = {"lock_patience_ms": 0, "lock_poll_ms": 200}
    async with two(lambda: serving(gate), database_url, **fair) as (busy, other):
        posts = [asyncio.ensure_future(busy.post("first"))]
        await gate.arrived.wait()
        posts += [asyncio.ensure_future(other.post("other"))]
        await eventually(lambda: root.fetchval("SELECT wanted_by FROM locks"))
        posts += [asyncio.ensure_future(busy.post(f"next-{n}")) for n in range(5)]
        await eventually(lambda: waiting() == 6)
        gate.open()
        await asyncio.gather(*posts)
    keys = await root.fetch(
        "SELECT idempotency_key FROM receipts r JOIN decisions d ON d.id = r.decision_id WHERE kind = 'lock.taken'"
        " ORDER BY index"
    )
    assert [row["idempotency_key"] for row in keys][:2] == ["first", "other"]


async def test_whoever_is_refused_a_lock_keeps_no_place_in_a_line_behind_it(
    database_url: str, root: asyncpg.Connection
) -> None:
    """Else: one waits for a, first in line for c; another has a and waits for b; a third has b and stands in line for c."""
    gates = {name: Gate() for name in ("ab", "ac", "b", "bc")}

    def coordinator() -> Coordinator:
        return Coordinator(
            [locked(Fact("a", gate.answering()), *names, name=names) for names, gate in gates.items()]
        )

    for name in ("ab", "ac", "bc"):
        gates[name].open()
    settings = {"lock_poll_ms": 50, "lock_patience_ms": 60_000}
    seldom = settings | {"lock_poll_ms": 600}
    async with (
        running(coordinator(), database_url, **settings) as here,
        running(coordinator(), database_url, **seldom) as there,
    ):
        posts = [asyncio.ensure_future(here.post("1", type="b"))]
        await gates["b"].arrived.wait()
        posts += [asyncio.ensure_future(there.post("2", type="ab"))]
        await eventually(lambda: held_now(root, "a", "b"))
        posts += [asyncio.ensure_future(here.post("3", type="ac"))]
        await eventually(lambda: waiting("ac") == 1)
        posts += [asyncio.ensure_future(here.post("4", type="bc"))]
        await eventually(lambda: waiting("bc") == 1)
        gates["b"].open()
        answers = await asyncio.gather(*posts)
    assert {json.loads(answer.body)["status"] for answer in answers} == {"committed"}


async def held_now(root: asyncpg.Connection, *names: str) -> bool:
    return sorted(await held(root)) == sorted(names)


# Lost locks ------------------------------------------------------------------------------------------------------------------------


async def paused_past_its_time(url: str, root: asyncpg.Connection, **more: Any) -> tuple[Any, Any, list[str]]:
    """A holder that reads while its lock runs out and another process has it: both decisions, and the receipts of the first."""
    gate, free = Gate(), Gate()
    free.open()
    source = Fact("a", gate.answering())
    async with (
        running(Coordinator([locked(source, record=PROPOSAL, **more)]), url, **OFTEN) as slow,
        running(serving(free, record=PROPOSAL), url, **OFTEN) as quick,
    ):
        first = asyncio.ensure_future(slow.decided("slow", 1, record=A_RECORD))
        await gate.arrived.wait()
        await root.execute("UPDATE locks SET expires_at = clock_timestamp() - interval '1 s'")
        second = await quick.decided("quick", 2, record={"kind": "proposal", "id": "p-2"})
        gate.open()
        decision = await first
        receipts = await kinds_of(root, slow.tenant, decision=UUID(decision["id"]))
    assert source.reads == decision["fence"]["rounds"]
    return decision, second, receipts


async def test_a_holder_that_was_paused_past_its_time_commits_nothing_and_reads_everything_again(
    database_url: str, root: asyncpg.Connection
) -> None:
    """Its record is nobody else's: but for the token of its lock, everything still held."""
    decision, second, receipts = await paused_past_its_time(database_url, root)
    assert (second["status"], decision["status"]) == ("committed", "committed")
    assert decision["fence"]["rounds"] == 2
    assert receipts == [
        "decision.running",
        "lock.taken",
        "lock.taken",
        "decision.committed",
        "lock.released",
    ]
    assert await root.fetchval("SELECT fencing_token FROM locks") == 3


async def test_a_holder_that_lost_its_lock_and_has_no_further_round_ends_with_the_reason(
    database_url: str, root: asyncpg.Connection
) -> None:
    decision, _, receipts = await paused_past_its_time(database_url, root, max_rounds=1)
    assert (decision["status"], decision["outcome"]["code"]) == ("conflicted", "lock-lost")
    assert "ledger" in decision["outcome"]["reason"]
    assert receipts == ["decision.running", "lock.taken", "decision.conflicted"]
    assert await root.fetchval("SELECT count(*) FROM record_versions") == 1


async def test_a_decision_that_is_taken_over_takes_its_locks_along_and_its_old_holder_changes_nothing(
    database_url: str, root: asyncpg.Connection
) -> None:
    """Where it is taken over, somebody stands in line for the very lock that it has."""
    stuck, gate = Gate(), Gate()
    limits = {"poll_ms": 10, **NEVER}
    async with running(serving(stuck, "x", "y"), database_url, **NEVER) as dying:
        orphan = await dying.post("orphan", wait=0)
        await stuck.arrived.wait()
        async with running(serving(gate, "x", "y"), database_url, **limits) as service:
            waits = asyncio.ensure_future(service.post("waits"))
            await eventually(lambda: waiting() == 1)
            await root.execute("UPDATE decisions SET lease_expires_at = '-infinity' WHERE id = $1", orphan.id)
            await gate.arrived.wait()
            assert await held(root) == {"x": 2, "y": 2}
            stuck.open()
            await eventually(lambda: not dying.service._holdings.runs)
            gate.open()
            assert (await service.decided("orphan"))["status"] == "committed"
            await service.service.cancel(service.caller, await id_of(root, "waits"))
            await waits
    assert (await of_locks(root, service.tenant, decision=orphan.id)) == ["lock.taken"] * 4 + [
        "lock.released"
    ] * 2


async def id_of(root: asyncpg.Connection, key: str) -> UUID:
    return UUID(str(await root.fetchval("SELECT id FROM decisions WHERE idempotency_key = $1", key)))


async def test_whoever_waits_with_the_last_slot_gets_the_lock_of_a_decision_that_is_queued_again(
    database_url: str, root: asyncpg.Connection
) -> None:
    """That one needs a slot to go on, and has none to wait for its lock with."""
    stuck, gate = Gate(), Gate()
    gate.open()
    async with running(serving(stuck), database_url, **NEVER) as dying:
        orphan = await dying.post("orphan", wait=0)
        await stuck.arrived.wait()
        one_slot = {"max_running": 1, "classes": ONE_CLASS, "poll_ms": 10, **OFTEN}
        async with running(serving(gate), database_url, **one_slot) as service:
            waits = asyncio.ensure_future(service.decided("waits"))
            await eventually(lambda: waiting() == 1)
            await root.execute("UPDATE decisions SET lease_expires_at = '-infinity' WHERE id = $1", orphan.id)
            assert (await waits)["status"] == "committed"
            stuck.open()  # whoever has a slot first
            assert (await service.decided("orphan"))["status"] == "committed"


async def test_whoever_waits_for_a_lock_gives_its_slot_back_and_has_one_again_before_it_reads(
    database_url: str,
) -> None:
    gate = Gate()
    source = Fact("a", gate.answering())
    coordinator = Coordinator([locked(source, "{input.value}"), locked(Fact("a"), "other", name="other")])
    async with running(coordinator, database_url, max_running=2, classes=ONE_CLASS, **NEVER) as service:
        shares = service.service._holdings.schedule.shares
        posts = [asyncio.ensure_future(service.post(key)) for key in ("holder", "waits", "waits-too")]
        await eventually(lambda: (waiting(), source.reads, shares.busy) == (2, 1, 1))
        assert (await service.decided("of-another-lock", type="other"))["status"] == "committed"
        blocker = asyncio.ensure_future(service.post("blocker", 1))
        await eventually(lambda: source.reads == 2)
        assert shares.busy == 2
        gate.open()
        await asyncio.gather(*posts, blocker)
        assert (shares.busy, shares.running["interactive"]) == (0, 0)


async def test_only_so_many_wait_without_a_slot(database_url: str) -> None:
    gate = Gate()
    limits: dict[str, Any] = {"max_running": 3, "classes": ONE_CLASS, "max_lock_waiters": 1}
    async with running(serving(gate), database_url, **limits, **NEVER) as service:
        posts = [asyncio.ensure_future(service.post(key)) for key in ("holder", "without", "with")]
        await eventually(lambda: waiting() == 2)
        await eventually(lambda: service.service._holdings.schedule.shares.busy == 2)
        gate.open()
        await asyncio.gather(*posts)
        assert service.service._holdings.schedule.shares.busy == 0


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_slot_that_was_given_back_comes_back_however_the_waiting_ends(
    how: str, database_url: str
) -> None:
    gate = Gate()
    async with running(serving(gate), database_url, max_running=1, classes=ONE_CLASS, **NEVER) as service:
        holder = asyncio.ensure_future(service.post("holder"))
        await gate.arrived.wait()
        holding = service.service._holdings
        holding.schedule.shares.slots = 2
        late = await service.post("late", wait=0, time_limit_ms=60_000 if how == "cancelled" else 100)
        await eventually(lambda: waiting() == 1)
        holding.schedule.shares.slots = 1
        if how == "cancelled":
            await service.service.cancel(service.caller, late.id)
        await eventually(lambda: late.id not in holding.runs)
        assert holding.schedule.shares.busy == 1
        gate.open()
        await holder
        assert holding.schedule.shares.busy == 0


async def test_a_decision_that_is_taken_over_while_it_waits_stops_waiting_where_it_was(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with two(lambda: serving(gate), database_url, poll_ms=60_000) as (one, _):
        holder = asyncio.ensure_future(one.post("holder"))
        await gate.arrived.wait()
        async with running(serving(gate), database_url, **OFTEN) as losing:
            orphan = await losing.post("orphan", wait=0)
            await eventually(lambda: waiting() == 1)
            await root.execute("UPDATE decisions SET fencing_token = 2 WHERE id = $1", orphan.id)
            await eventually(lambda: not losing.service._holdings.runs)
            assert losing.service._holdings.engine.lines.by_name == {}
        gate.open()
        assert isinstance(await holder, Rested)
    assert await of_locks(root, one.tenant, decision=orphan.id) == []


async def test_locks_of_a_decision_at_rest_are_free_whoever_brought_it_to_rest(
    database_url: str, root: asyncpg.Connection
) -> None:
    """As if it had been ended by a service that does not know of its type's locks."""
    gate = Gate()
    gate.open()
    async with running(serving(gate), database_url, **NEVER) as service:
        old = await service.post("old")
        await root.execute(
            "UPDATE locks SET decision_id = $1, decision_token = 1, taken_at = now(), expires_at = now() + interval '1 hour'",
            old.id,
        )
        assert (await service.decided("new"))["status"] == "committed"


async def test_an_approval_takes_the_locks_that_the_review_did_not_keep(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({}) if ask.value else Review("a person", proposal=Commit({"approved": True}))

    source = Fact("a", gate.answering())
    coordinator = Coordinator([locked(source, policy=policy)])
    async with running(coordinator, database_url, **NEVER) as service:
        gate.open()
        reviewed = UUID((await service.decided("reviewed"))["id"])
        assert await held(root) == {}
        gate.close()
        holder = asyncio.ensure_future(service.post("holder", 1))
        await gate.arrived.wait()
        reviewer = Key(service.tenant, uuid7(), frozenset({"review"}))
        approving = asyncio.ensure_future(
            service.service.reviews.review(reviewer, reviewed, "approve", "1", "")
        )
        await eventually(lambda: waiting() == 1)
        gate.open()
        await approving
        await holder
        assert (await service.shown(reviewed))["status"] == "committed"
        assert await held(root) == {}
        kinds = await of_locks(root, service.tenant, decision=reviewed)
    assert kinds == ["lock.taken", "lock.released"] * 2


# Ends while waiting ---------------------------------------------------------------------------------------------------------------


async def test_a_decision_that_is_cancelled_while_it_waits_leaves_its_place_to_the_next(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with running(serving(gate), database_url, **NEVER) as service:
        first = asyncio.ensure_future(service.post("first"))
        await gate.arrived.wait()
        cancelled = await service.post("cancelled", wait=0)
        assert isinstance(cancelled, Pending)
        third = asyncio.ensure_future(service.post("third"))
        await eventually(lambda: waiting() == 2)
        said = json.loads(await service.service.cancel(service.caller, cancelled.id))
        assert (said["status"], said["stopped"]) == ("cancelled", True)
        assert await of_locks(root, service.tenant, decision=cancelled.id) == []
        gate.open()
        assert isinstance(await first, Rested)
        assert isinstance(await third, Rested)
        assert service.service._holdings.engine.lines.by_name == {}


async def test_a_holder_that_is_cancelled_from_another_process_lets_go(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with two(lambda: serving(gate), database_url) as (one, other):
        pending = await one.post("k", wait=0)
        await gate.arrived.wait()
        said = json.loads(await other.service.cancel(other.caller, pending.id))
        assert said["stopped"]
        assert await held(root) == {}
        assert await of_locks(root, one.tenant) == ["lock.taken", "lock.released"]
        gate.open()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_decision_whose_time_runs_out_while_it_waits_says_for_what(
    elsewhere: bool, database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with two(lambda: serving(gate), database_url) as (one, other):
        holder = await one.post("holder", wait=0)
        await gate.arrived.wait()
        decision = await (other if elsewhere else one).decided("late", time_limit_ms=150)
        assert (decision["status"], decision["outcome"]["code"]) == ("expired", "time-limit")
        assert "waited for the lock 'ledger'" in decision["outcome"]["reason"]
        assert await held(root) == {"ledger": 1}
        gate.open()
        assert (await one.decided("holder"))["id"] == str(holder.id)


async def test_another_tenants_locks_of_the_same_name_are_others(database_url: str) -> None:
    gate = Gate()
    async with running(serving(gate), database_url, **NEVER) as service:
        caller = type(service.caller)(await new_tenant(database_url, "two"), uuid7(), frozenset({"decide"}))
        posts: Sequence[Any] = [
            asyncio.ensure_future(who.post("k")) for who in (service, replace(service, caller=caller))
        ]
        await eventually(lambda: gate.inside == 2)
        gate.open()
        await asyncio.gather(*posts)
