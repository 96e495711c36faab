"""A decision can take another one's outcome as evidence: one child however often it is asked for, no slot held while it waits, no
circle, and nothing left behind when it is cancelled (I1, I15, I17)."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from adapters.decision import DecisionSource
from coordinator import Commit, Concluded, Coordinator, Decisive, Decline, Evidence, Packet, decision_type
from coordinator.config import Settings
from coordinator.core.evidence import Failed, Found, ReadRequest
from coordinator.core.fairness import ClassLimits
from coordinator.engine.children import Children
from coordinator.engine.service import Pending
from coordinator.store.children import adopt, waits_for
from coordinator.store.database import open_database
from tests.engine.harness import Ask, Fact, Gate, Number, evidence_of, running
from tests.store.given import admitted, new_tenant
from tests.support import eventually

WIDE = {"interactive": ClassLimits(weight=1, reserved=0, queue_depth=100)}


class Terms(msgspec.Struct, frozen=True):
    total: int


def asking(name: str = "credit", **more: Any) -> DecisionSource[Terms]:
    return DecisionSource(name, type="child", terms=Terms, **more)


def child_policy(ask: Ask, packet: Packet, record: Any) -> Any:
    if ask.value < 0:
        return Decline("not for negative ones")
    return Commit(Terms(10 * ask.value))


def typed(name: str, *evidence: Evidence[Any, Any], policy: Any = None, **more: Any) -> Any:
    return decision_type(
        name,
        request=Ask,
        policy=policy or (lambda ask, packet, record: Commit({"seen": seen(packet)})),
        policy_version="1",
        evidence=evidence,
        **more,
    )


def seen(packet: Packet) -> list[Any]:
    return [item.value for item in packet.items]


def family(*credits: Evidence[Any, Any], child: Any = None, policy: Any = None) -> Coordinator:
    return Coordinator(
        [typed("quote", *credits, policy=policy), child or typed("child", policy=child_policy)]
    )


def credit(source: DecisionSource[Terms] | None = None, name: str = "credit", **more: Any) -> Any:
    limits: dict[str, Any] = {"deadline_ms": 20_000, "attempts": 1}
    return Evidence(name, source or asking(), **limits | more)


async def types(root: asyncpg.Connection) -> list[tuple[str, str]]:
    rows = await root.fetch("SELECT type, status FROM decisions ORDER BY type DESC")
    return [(row["type"], row["status"]) for row in rows]


async def test_a_decision_takes_the_terms_of_another_as_evidence(
    database_url: str, root: asyncpg.Connection
) -> None:
    declared = Evidence("credit", asking(), deadline_ms=20_000)

    def policy(ask: Ask, packet: Packet, record: Any) -> Any:
        concluded: Concluded[Terms] = packet[declared]
        assert concluded.terms is not None
        return Commit({"total": concluded.terms.total + 1})

    async with running(family(declared, policy=policy), database_url) as service:
        decision = await service.decided(value=4)
        item = evidence_of(decision, "credit")
        child = await service.shown(item["value"]["decision"])
    assert decision["outcome"]["terms"] == {"total": 41}
    assert (item["state"], item["value"]["status"], item["revision"]) == (
        "found",
        "committed",
        child["packet_digest"],
    )
    assert (child["type"], child["status"], child["class"], child["trace_id"]) == (
        "child",
        "committed",
        "interactive",
        decision["trace_id"],
    )


async def test_a_child_that_is_declined_is_known_and_one_that_comes_to_nothing_is_not(
    database_url: str,
) -> None:
    async def down(_: ReadRequest, __: int) -> Failed:
        return Failed("down", "it is down")

    broken = typed("child", Evidence("a", Fact("a", down), deadline_ms=1_000, attempts=1))
    async with running(family(credit()), database_url) as service:
        declined = evidence_of(await service.decided("declined", -1), "credit")
    async with running(family(credit(required=False), child=broken), database_url) as service:
        unresolved = evidence_of(await service.decided("unresolved"), "credit")
    assert declined["state"] == "found"
    assert (declined["value"]["status"], declined["value"]["reason"]) == ("declined", "not for negative ones")
    assert (unresolved["state"], unresolved["error"]["code"]) == ("failed", "child-unresolved")


async def test_an_input_that_the_child_does_not_take_is_a_typed_failure(database_url: str) -> None:
    wrong = asking(input={"value": "{input.value} apples"})
    async with running(family(credit(wrong, required=False)), database_url) as service:
        item = evidence_of(await service.decided(), "credit")
    assert (item["state"], item["error"]["code"]) == ("failed", "malformed-request")


async def test_reading_it_again_finds_the_same_child(database_url: str, root: asyncpg.Connection) -> None:
    async with running(family(credit(freshness=Decisive())), database_url) as service:
        decision = await service.decided()
    assert (decision["status"], decision["fence"]["rounds"]) == ("committed", 1)
    assert await types(root) == [("quote", "committed"), ("child", "committed")]


async def test_each_parent_has_its_own_unless_they_name_the_same_key(
    database_url: str, root: asyncpg.Connection
) -> None:
    own, shared = credit(), credit(asking("shared", input={"value": 1}, key="{input.note}x"), name="shared")

    class Noted(Ask, frozen=True):
        note: str = "n"

    parent = decision_type(
        "quote",
        request=Noted,
        policy=lambda ask, packet, record: Commit({"seen": seen(packet)}),
        policy_version="1",
        evidence=[own, shared],
    )
    async with running(Coordinator([parent, typed("child", policy=child_policy)]), database_url) as service:
        made = [await service.decided(key, 1) for key in ("first", "second")]
    children = [
        [evidence_of(decision, name)["value"]["decision"] for decision in made]
        for name in ("credit", "shared")
    ]
    assert len(set(children[0])) == 2
    assert len(set(children[1])) == 1
    assert [kind for kind, _ in await types(root)].count("child") == 3


async def test_a_child_for_each_of_a_list(database_url: str) -> None:
    class Many(msgspec.Struct, frozen=True):
        values: list[int]

    source = asking(input={"value": "{each}"})
    each = Evidence("credits", source, deadline_ms=20_000, for_each="input.values", attempts=1)

    def policy(ask: Many, packet: Packet, record: Any) -> Any:
        return Commit([one.terms.total for one in packet[each].found if one.terms])

    parent = decision_type("quote", request=Many, policy=policy, policy_version="1", evidence=[each])
    coordinator = Coordinator([parent, typed("child", policy=child_policy)])
    async with running(coordinator, database_url) as service:
        decision = await service.decided(input={"values": [3, 1, 2]})
    assert decision["outcome"]["terms"] == [30, 10, 20]


async def test_parents_that_wait_hold_no_slot_that_their_children_need(database_url: str) -> None:
    """One slot for a parent and its three children, and for another parent."""
    credits = [credit(asking(name, input={"value": n}), name) for n, name in enumerate(("a", "b", "c"))]
    async with running(
        family(*credits), database_url, max_running=1, classes=WIDE, queue_poll_ms=20
    ) as service:
        made = await asyncio.gather(*(service.decided(key) for key in ("first", "second")))
        assert [decision["status"] for decision in made] == ["committed", "committed"]
        await eventually(lambda: service.service.idle)
        assert service.service._holdings.schedule.shares.running["interactive"] == 0


async def test_a_parent_that_waits_while_its_process_stops_waits_on(database_url: str) -> None:
    gate = Gate()
    gated = typed(
        "child", Evidence("a", Fact("a", gate.answering()), deadline_ms=60_000), policy=child_policy
    )
    async with running(family(credit(), child=gated), database_url) as service:
        pending = await service.post("k", 2, wait=0)
        await gate.arrived.wait()
        await eventually(lambda: service.service._holdings.schedule.shares.running["interactive"] == 1)
        service.service.stop_taking()
        assert (await service.shown(pending.id))["status"] == "running"
        gate.open()
        await eventually(lambda: service.service.idle)
        decision = await service.shown(pending.id)
    assert evidence_of(decision, "credit")["value"]["terms"] == {"total": 20}


async def test_a_parent_that_runs_while_its_process_stops_may_still_ask(database_url: str) -> None:
    gate = Gate()
    first = Evidence("first", Fact("first", gate.answering()), deadline_ms=60_000)
    async with running(family(first, credit(after=["first"])), database_url) as service:
        pending = await service.post("k", 2, wait=0)
        await gate.arrived.wait()
        service.service.stop_taking()
        gate.open()
        await eventually(lambda: service.service.idle)
        decision = await service.shown(pending.id)
    assert evidence_of(decision, "credit")["value"]["terms"] == {"total": 20}


async def test_whoever_takes_a_parent_over_goes_on_with_its_child(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    waits = typed("child", Evidence("a", Fact("a", gate.answering()), deadline_ms=60_000))
    source = asking()
    async with running(family(credit(source), child=waits), database_url, drain_s=0) as dying:
        pending = await dying.post("k", 2, wait=0)
        await gate.arrived.wait()
        before = await root.fetchval("SELECT id FROM decisions WHERE type = 'child'")
    quick = typed("child", policy=child_policy)
    async with running(
        family(credit(source), child=quick), database_url, poll_ms=10, queue_poll_ms=20
    ) as service:
        decision = await service.decided("k", 2)
    assert decision["id"] == str(pending.id)
    assert evidence_of(decision, "credit")["value"]["decision"] == str(before)
    assert await types(root) == [("quote", "committed"), ("child", "committed")]


@pytest.mark.parametrize(("key", "child"), [(None, "cancelled"), ("shared", "committed")])
async def test_a_child_that_nobody_else_can_ask_for_is_cancelled_with_its_parent(
    key: str | None, child: str, database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    waits = typed("child", Evidence("a", Fact("a", gate.answering()), deadline_ms=60_000))
    async with running(family(credit(asking(key=key)), child=waits), database_url) as service:
        pending = await service.post(wait=0)
        await gate.arrived.wait()
        await service.service.cancel(service.caller, pending.id)
        gate.open()
        await eventually(lambda: service.service.idle)
    assert await types(root) == [("quote", "cancelled"), ("child", child)]


async def test_a_child_has_no_more_time_than_its_parents_reading(
    database_url: str, root: asyncpg.Connection
) -> None:
    waits = typed("child", Evidence("a", Fact("a", Gate().answering()), deadline_ms=60_000))
    source = asking(key="shared")  # so that nobody cancels it
    async with running(
        family(credit(source, deadline_ms=300, required=False), child=waits), database_url
    ) as service:
        item = evidence_of(await service.decided(), "credit")
        await eventually(lambda: service.service.idle)
    assert item["state"] in ("timed_out", "failed")
    assert dict(await types(root))["child"] == "expired"


async def test_a_circle_that_two_releases_make_together_is_refused_by_whoever_closes_it(
    database_url: str, root: asyncpg.Connection
) -> None:
    """In one release a asks for b, in the other b asks for a: each loads, and a rolling upgrade runs both at once."""
    gate = Gate()

    async def let_go(_: ReadRequest, __: int) -> Found[Number]:
        await gate()
        return Found(Number(1))

    to_b = DecisionSource("b", type="b", terms=Terms, key="y")
    to_a = DecisionSource("a", type="a", terms=Terms, key="x")
    first = Evidence("first", Fact("first", let_go), deadline_ms=20_000)
    old = Coordinator([typed("a", first, credit(to_b, "b", after=["first"])), typed("b")])
    new = Coordinator([typed("b", credit(to_a, "a")), typed("a")])
    common = {"class": "interactive"}
    async with running(old, database_url) as one, running(new, database_url) as two:
        a = asyncio.ensure_future(one.decided("child/a/x", 1, type="a", **common))
        await gate.arrived.wait()
        b = asyncio.ensure_future(two.decided("child/b/y", 1, type="b", **common))
        await eventually(lambda: _edges(root, 1))
        gate.open()
        made = await asyncio.gather(a, b)
    assert [decision["status"] for decision in made] == ["unresolved", "unresolved"]
    assert evidence_of(made[0], "b")["error"]["code"] == "decision-circle"
    assert evidence_of(made[1], "a")["error"]["code"] == "child-unresolved"


async def _edges(root: asyncpg.Connection, count: int) -> bool:
    return bool(await root.fetchval("SELECT count(*) = $1 FROM decision_children", count))


async def test_who_waits_for_whom_is_known_however_indirectly(database_url: str) -> None:
    tenant = await new_tenant(database_url, "one")
    async with open_database(database_url, Settings(pool_size=1)) as database:
        a, b, c, other = [await admitted(database, tenant) for _ in range(4)]
        edges: list[tuple[UUID, UUID]] = [(a, b), (b, c), (a, b)]
        for parent, child in edges:
            async with database.transaction(tenant) as connection:
                await adopt(connection, tenant, parent, child)
        async with database.transaction(tenant) as connection:
            assert await waits_for(connection, tenant, a, c)
            assert not await waits_for(connection, tenant, c, a)
            assert not await waits_for(connection, tenant, a, other)
            await adopt(connection, tenant, c, a)  # a circle does not keep the question from being answered
            assert await waits_for(connection, tenant, a, a)
            assert not await waits_for(connection, tenant, a, other)


async def test_a_child_that_waits_for_a_person_is_no_answer_yet(database_url: str) -> None:
    from coordinator import Review

    review = typed("child", policy=lambda ask, packet, record: Review("somebody has to look"))
    async with running(family(credit(required=False), child=review), database_url) as service:
        answer = await service.post()
        assert not isinstance(answer, Pending)
        item = evidence_of(msgspec.json.decode(answer.body), "credit")
    assert (item["state"], item["error"]["code"]) == ("failed", "child-in-review")


class Decides:
    """As much of a service as a clean-up sees."""

    def __init__(self, draining: bool) -> None:
        self.draining = draining
        self.stopped: list[UUID] = []

    async def ask(self, *_: Any) -> Any:
        raise AssertionError("a clean-up asks for nothing")

    async def rests(self, *_: Any) -> Any:
        raise AssertionError("a clean-up waits for nothing")

    async def view(self, tenant: UUID, id: UUID) -> None:
        raise AssertionError("a clean-up looks at nothing")

    async def stop_unfinished(self, tenant: UUID, id: UUID) -> None:
        self.stopped.append(id)


@pytest.mark.parametrize(("draining", "stopped"), [(False, 1), (True, 0)])
async def test_a_process_that_stops_leaves_the_children_to_those_who_take_over(
    draining: bool, stopped: int, database_url: str
) -> None:
    service = Decides(draining)
    async with open_database(database_url, Settings(pool_size=1)) as database:
        await Children(database)._stop(service, uuid7(), uuid7())
    assert len(service.stopped) == stopped
