"""The queue of several processes on one database: who waits is served by whoever has a slot, in its turn, and exactly once (I1, I15,
I16, I17)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from typing import Any

import anyio
import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from coordinator import Evidence
from coordinator.core.evidence import Found, ReadRequest
from coordinator.core.fairness import ClassLimits
from coordinator.engine.schedule import Schedule, Slot
from coordinator.engine.service import Pending, Rested
from coordinator.errors import ClassNotAllowed, MalformedRequest, QueueFull
from coordinator.store.keys import Key
from tests.engine.harness import ONE_CLASS, Fact, Gate, Number, Running, running, service_of
from tests.store.given import new_tenant
from tests.support import eventually


def gated(gate: Gate) -> Evidence[Any, Any]:
    return Evidence("a", Fact("a", gate.answering()), deadline_ms=60_000)


TWO_CLASSES = {
    "urgent": ClassLimits(weight=8, reserved=1, queue_depth=100),
    "bulk": ClassLimits(weight=1, reserved=0, queue_depth=1000),
}


async def statuses(root: asyncpg.Connection) -> Counter[str]:
    rows = await root.fetch("SELECT status, count(*) AS n FROM decisions GROUP BY status")
    return Counter({row["status"]: row["n"] for row in rows})


async def has(root: asyncpg.Connection, **counts: int) -> bool:
    seen = await statuses(root)
    return all(seen[status] == count for status, count in counts.items())


async def is_empty(root: asyncpg.Connection) -> bool:
    """Nothing waits, nothing runs, and the counted depth says so, too."""
    depth = await root.fetchval("SELECT coalesce(sum(depth), 0) FROM queues")
    return bool(depth == 0) and await has(root, queued=0, running=0)


async def test_what_one_process_queued_another_one_runs_and_the_caller_that_waits_is_answered(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate, elsewhere = Gate(), Fact("a")
    coordinator = service_of(gated(gate))
    other = service_of(Evidence("a", elsewhere, deadline_ms=60_000))
    async with running(coordinator, database_url, max_running=1, classes=ONE_CLASS) as full:
        holder = asyncio.ensure_future(full.post("holder"))
        await gate.arrived.wait()
        waits = asyncio.ensure_future(full.post("waits"))
        await eventually(lambda: len(full.service._holdings.awaited._waiting) == 1)
        async with running(other, database_url, max_running=4, classes=ONE_CLASS):
            answer = await waits
            assert isinstance(answer, Rested)
            assert json.loads(answer.body)["status"] == "committed"
        assert elsewhere.reads == 1
        gate.open()
        await holder
    assert await is_empty(root)


async def test_a_queue_outlives_its_process(database_url: str, root: asyncpg.Connection) -> None:
    gate = Gate()
    async with running(
        service_of(gated(gate)), database_url, max_running=1, classes=ONE_CLASS, drain_s=0
    ) as dying:
        await dying.post("first", wait=0)
        await gate.arrived.wait()
        await dying.post("second", wait=0)
        await dying.post("third", wait=0)
    assert await statuses(root) == {"queued": 3}
    source = Fact("a")
    async with running(service_of(Evidence("a", source, deadline_ms=1_000)), database_url, poll_ms=10):
        await eventually(lambda: source.reads >= 1)  # they ask the same, and may share one reading
        await eventually(partial(is_empty, root))
    assert await statuses(root) == {"committed": 3}


async def test_many_processes_run_everything_that_is_queued_exactly_once(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate, source = Gate(), Fact("a")
    evidence = Evidence("a", source, deadline_ms=5_000)
    wide = {"interactive": ClassLimits(weight=1, reserved=0, queue_depth=100)}
    async with running(service_of(gated(gate)), database_url, max_running=1, classes=wide) as door:
        await door.post("holder", wait=0)
        await gate.arrived.wait()
        for n in range(60):
            assert isinstance(await door.post(f"k-{n}", n, wait=0), Pending)
        async with anyio.create_task_group() as tasks:
            done = anyio.Event()

            async def process() -> None:
                async with running(service_of(evidence), database_url, max_running=3, classes=wide):
                    await done.wait()

            for _ in range(4):
                tasks.start_soon(process)
            await eventually(partial(has, root, committed=60))
            done.set()
        gate.open()
    assert await is_empty(root)
    assert await statuses(root) == {"committed": 61}
    assert source.reads == 60
    committed = "SELECT count(*) FROM receipts WHERE kind = 'decision.committed' GROUP BY decision_id"
    assert {row["count"] for row in await root.fetch(committed)} == {1}


async def test_urgent_work_starts_at_once_though_its_reserve_is_lent_and_the_next_slot_makes_up_for_it(
    database_url: str,
) -> None:
    order: list[int] = []
    turn = asyncio.Semaphore(0)

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        order.append(request.input.value)  # type: ignore[attr-defined]  # the input is an Ask
        await turn.acquire()
        return Found(Number(1))

    evidence = Evidence("a", Fact("a", read), deadline_ms=60_000)
    async with running(service_of(evidence), database_url, max_running=2, classes=TWO_CLASSES) as service:
        shares = service.service._holdings.schedule.shares
        for n in range(20):
            await service.post(f"bulk-{n}", n, wait=0, **{"class": "bulk"})
        await eventually(lambda: len(order) == 2)
        first, second = [
            json.loads((await service.post(f"urgent-{n}", 99 + n, wait=0, **{"class": "urgent"})).body)
            for n in range(2)
        ]
        assert (first["status"], second["status"]) == ("running", "queued"), "its reserve is one"
        await eventually(lambda: len(order) == 3)
        assert (order[2], shares.busy) == (99, 3)
        turn.release()  # a bulk one ends, and nothing takes its slot
        await eventually(lambda: shares.busy == 2)
        assert len(order) == 3
        for _ in range(40):
            turn.release()
        await eventually(lambda: len(order) == 22)
        bulk = [value for value in order if value < 99]
        assert bulk == list(range(20)), "those of one class and tenant run in their order"


async def test_a_slot_that_was_lent_comes_back_before_what_is_queued(database_url: str) -> None:
    claimed: list[Slot] = []
    schedule = Schedule(TWO_CLASSES, 1, claimed.append)
    tenant = uuid7()
    slot = schedule.try_start("bulk", tenant)
    assert slot is not None
    assert schedule.try_start("bulk", tenant) is None
    schedule.queued("bulk", tenant)
    schedule.queued("bulk", tenant)
    used = anyio.Event()

    async def lend() -> None:
        async with schedule.lent(slot):
            await used.wait()

    lender = asyncio.ensure_future(lend())
    await eventually(lambda: len(claimed) == 1)
    used.set()
    await eventually(lambda: slot.turn is not None)
    assert not lender.done()
    schedule.give_back(claimed[0])
    await lender
    assert (len(claimed), schedule.shares.busy) == (1, 1)
    lender = asyncio.ensure_future(lend())
    await eventually(lambda: len(claimed) == 2)
    lender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lender
    schedule.give_back(slot)
    schedule.give_back(claimed[1])
    assert schedule.shares.busy == 0


async def test_tenants_of_a_class_take_turns(database_url: str) -> None:
    order: list[str] = []
    turn = asyncio.Semaphore(0)

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        order.append(request.tenant)
        await turn.acquire()
        return Found(Number(1))

    evidence = Evidence("a", Fact("a", read), deadline_ms=60_000)
    async with running(service_of(evidence), database_url, max_running=1, classes=TWO_CLASSES) as flood:
        modest = await flood.of_another_tenant()
        for n in range(30):
            await flood.post(f"k-{n}", n, wait=0, **{"class": "bulk"})
        await eventually(lambda: len(order) == 1)
        for n in range(5):
            await modest.post(f"k-{n}", n, wait=0, **{"class": "bulk"})
        for _ in range(40):
            turn.release()
        await eventually(lambda: len(order) == 35)
    assert order[:12].count(str(modest.tenant)) == 5, "not behind the thirty that came before"


async def test_a_full_queue_is_refused_for_one_tenant_and_open_for_another(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url, max_running=1, classes=ONE_CLASS) as service:
        await service.post("holder", wait=0)
        await gate.arrived.wait()
        for n in range(2):
            await service.post(f"k-{n}", wait=0)
        with pytest.raises(QueueFull) as refused:
            await service.post("too-many", wait=0)
        assert 100 <= refused.value.extra["retry_after_ms"] <= 60_000
        other = await service.of_another_tenant()
        assert isinstance(await other.post("mine", wait=0), Pending)
        assert await root.fetchval("SELECT count(*) FROM decisions WHERE idempotency_key = 'too-many'") == 0
        gate.open()


async def test_the_bound_of_a_queue_holds_over_processes_that_do_not_know_of_each_other_yet(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    limits = {"max_running": 1, "classes": ONE_CLASS, "queue_poll_ms": 60_000}
    async with running(service_of(gated(gate)), database_url, **limits) as one:
        await one.post("holder-1", wait=0)
        await eventually(lambda: gate.inside == 1)
        async with running(service_of(gated(gate)), database_url, **limits) as two:
            await two.post("holder-2", wait=0)
            await eventually(lambda: gate.inside == 2)
            answers = await asyncio.gather(
                *(process.post(f"k-{n}-{id(process)}", wait=0) for n in range(4) for process in (one, two)),
                return_exceptions=True,
            )
            gate.open()
    assert sum(isinstance(answer, Pending) for answer in answers) == 2
    assert sum(isinstance(answer, QueueFull) for answer in answers) == 6


async def test_a_run_that_holds_its_slot_too_long_is_stopped_queued_again_and_then_put_before_a_person(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    limits = {"max_running": 1, "classes": ONE_CLASS, "max_run_ms": 30, "max_requeues": 2}
    async with running(service_of(gated(gate)), database_url, **limits) as service:
        decision = await service.decided("stuck")
        assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "requeue-limit")
        await eventually(lambda: service.service._holdings.schedule.shares.busy == 0)
    kinds = [row["kind"] for row in await root.fetch("SELECT kind FROM receipts ORDER BY index")]
    assert kinds == ["decision.running", *["decision.queued", "decision.running"] * 3, "decision.in_review"]
    assert gate.inside == 0


async def test_a_decision_whose_type_no_longer_fits_what_was_asked_fails_and_gives_its_slot_back(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url, max_running=1, classes=ONE_CLASS) as service:
        await service.post("holder", wait=0)
        await gate.arrived.wait()
        queued = await service.post("changed", wait=0)
        await root.execute(
            'UPDATE decisions SET request = \'{"type": "quote", "input": {"value": "x"}}\' WHERE id = $1',
            queued.id,
        )
        gate.open()
        await eventually(partial(has, root, failed=1))
        shown = await service.shown(queued.id)
        assert shown["outcome"]["code"] == "malformed-request"
        await eventually(lambda: service.service._holdings.schedule.shares.busy == 0)


async def test_what_waits_and_runs_is_shown_to_its_tenant_alone(database_url: str) -> None:
    gate = Gate()
    async with running(service_of(gated(gate)), database_url, max_running=1, classes=TWO_CLASSES) as service:
        idle = await shown(service)
        assert idle["bulk"]["estimated_start_ms"] == 0
        await service.post("holder", wait=0, **{"class": "bulk"})
        await gate.arrived.wait()
        for n in range(3):
            await service.post(f"k-{n}", wait=0, **{"class": "bulk"})
        mine, others = await shown(service), await shown(await service.of_another_tenant())
        assert (mine["bulk"]["depth"], mine["bulk"]["running"], mine["urgent"]["depth"]) == (3, 1, 0)
        assert mine["bulk"]["estimated_start_ms"] > 0
        assert mine["bulk"]["oldest_age_ms"] >= 0
        assert (others["bulk"]["depth"], others["bulk"]["running"]) == (0, 0)
        assert (mine["urgent"]["weight"], mine["urgent"]["reserved"], mine["urgent"]["slots"]) == (8, 1, 1)
        gate.open()


async def shown(service: Running) -> dict[str, Any]:
    views = await service.service.queues(service.tenant)
    return {view.class_: msgspec.to_builtins(view) for view in views}


async def test_a_key_asks_only_for_the_classes_it_may(database_url: str, root: asyncpg.Connection) -> None:
    source = Fact("a")
    async with running(
        service_of(Evidence("a", source, deadline_ms=1_000)), database_url, classes=TWO_CLASSES
    ) as service:
        key = Key(await new_tenant(database_url, "one"), uuid7(), frozenset({"decide"}), frozenset({"bulk"}))
        limited = Running(service.service, key, database_url)
        with pytest.raises(ClassNotAllowed) as refused:
            await limited.post("k", **{"class": "urgent"})
        assert refused.value.extra["classes"] == ["bulk"]
        assert isinstance(await limited.post("k", **{"class": "bulk"}), Rested)
        with pytest.raises(MalformedRequest):
            await service.post("k", **{"class": "nonsense"})
    assert await root.fetchval("SELECT count(*) FROM decisions") == 1
