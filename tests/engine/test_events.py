"""Following a decision: every event once, in one order, with the same number wherever and whenever it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest

from coordinator import Commit, Decisive, Effect, Evidence, NeedMore, Packet, Record
from coordinator.core.effect import Accepted, Ambiguous, Operation, SendResult
from coordinator.core.events import AT_REST, Event, at_rest, first_of
from coordinator.core.evidence import Answer, Failed, Found, ReadRequest
from coordinator.core.outcome import Outcome
from coordinator.engine.events import BATCH
from coordinator.engine.follow import FollowerCut
from coordinator.errors import NotFound, StreamsFull
from tests.engine.harness import Ask, Fact, Gate, Number, Running, Sent, running, service_of, values
from tests.support import eventually

BRISK = {"follow_ms": 20, "stream_heartbeat_s": 0.5}
Told = list[tuple[int, str, Any]]


async def followed(there: Running, id: UUID, after: int = 0) -> AsyncIterator[Event]:
    async with aclosing(there.service.streams.follow(there.tenant, id, after)) as batches:
        async for batch in batches:
            for event in batch:
                yield event


async def all_events(there: Running, id: UUID, after: int = 0) -> Told:
    with anyio.fail_after(20):
        return [told(event) async for event in followed(there, id, after)]


def told(event: Event) -> tuple[int, str, Any]:
    return event.number, event.kind, json.loads(event.data)


def kinds(events: Told) -> list[str]:
    return [kind for _, kind, _ in events]


def of_kind(events: Told, kind: str) -> list[Any]:
    return [data for _, each, data in events if each == kind]


async def begun(there: Running, key: str = "k") -> UUID:
    """A decision that is under way, or at rest already if nothing holds it up."""
    return (await there.post(key, wait=0)).id


async def stored(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET ROLE coordinator_app")
        count = 0
        for [tenant] in await _tenants(url):
            await connection.execute(f"SET coordinator.tenant = '{tenant}'")
            count += await connection.fetchval("SELECT count(*) FROM decision_events")
        return count
    finally:
        await connection.close()


async def _tenants(url: str) -> Sequence[Any]:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetch("SELECT tenant_id FROM tenants")
    finally:
        await connection.close()


def streaming(
    *parts: object,
    first: Callable[[], Awaitable[None]] | None = None,
    then: Callable[[], Awaitable[None]] | None = None,
) -> Callable[..., Any]:
    """A reading that streams these parts, and is found to be as many. ``first`` and ``then`` are awaited before and after."""

    async def answer(request: ReadRequest, _: int) -> Answer[Number]:
        if first is not None:
            await first()
        for part in parts:
            await request.emit(part)
        if then is not None:
            await then()
        return Found(Number(len(parts)))

    return answer


def two_facts(gate: Gate) -> Any:
    return service_of(
        Evidence("first", Fact("first", values(1)), deadline_ms=5_000, freshness=Decisive("value")),
        Evidence("second", Fact("second", gate.answering(2)), deadline_ms=20_000, after=["first"]),
    )


async def test_a_follower_is_told_everything_in_the_order_in_which_it_happens(database_url: str) -> None:
    gate = Gate()
    async with running(two_facts(gate), database_url) as there:
        id = await begun(there)
        await gate.arrived.wait()
        seen: Told = []
        with anyio.fail_after(20):
            async for event in followed(there, id):
                seen.append(told(event))
                if event.kind == "evidence" and not gate._open.is_set():
                    assert json.loads(event.data)["name"] == "first"
                    gate.open()  # it was told while the second reading was under way
    assert kinds(seen) == [
        *[
            "queued",
            "stage",
            "running",
            "evidence",
            "evidence",
            "stage",
            "stage",
            "outcome",
            "stage",
            "fence",
        ],
        *["rest", "decision"],
    ]
    assert [stage["stage"] for stage in of_kind(seen, "stage")] == ["admit", "gather", "decide", "fence"]
    assert [number for number, _, _ in seen] == sorted({number for number, _, _ in seen})
    assert of_kind(seen, "evidence")[1]["value"] == {"value": 2, "note": ""}
    assert of_kind(seen, "fence")[0]["held"] is True
    assert of_kind(seen, "rest")[0]["status"] == "committed"
    assert of_kind(seen, "decision")[0]["outcome"]["terms"] == {"total": 3}


async def test_coming_back_behind_any_event_gives_exactly_those_behind_it(database_url: str) -> None:
    gate = Gate()
    async with running(two_facts(gate), database_url) as there:
        id = await begun(there)
        async with asyncio.TaskGroup() as tasks:
            live = tasks.create_task(all_events(there, id))
            await gate.arrived.wait()
            gate.open()
        whole = live.result()
        for place, (number, _, _) in enumerate(whole):
            assert await all_events(there, id, number) == whole[place + 1 :]
        assert await all_events(there, id) == whole


async def test_a_decision_that_nobody_followed_is_told_from_what_is_stored(database_url: str) -> None:
    gate = Gate()
    gate.open()
    async with running(two_facts(gate), database_url) as there:
        decision = await there.decided()
        first = await all_events(there, UUID(decision["id"]))
        assert first == await all_events(there, UUID(decision["id"]))
        assert kinds(first)[:4] == ["queued", "stage", "running", "evidence"]
        assert of_kind(first, "evidence") == decision["evidence"]
        assert of_kind(first, "outcome") == [decision["outcome"]]
        assert of_kind(first, "decision")[0]["id"] == decision["id"]
        assert [stage["stage"] for stage in of_kind(first, "stage")] == ["admit", "gather", "decide", "fence"]
        numbers = [number for number, _, _ in first]
        assert numbers == sorted(set(numbers))
        for place, number in enumerate(numbers):
            assert await all_events(there, UUID(decision["id"]), number) == first[place + 1 :]
        assert await stored(database_url) == 0


async def test_a_follower_in_another_process_is_told_the_same(database_url: str) -> None:
    gate = Gate()
    async with (
        running(two_facts(gate), database_url, **BRISK) as there,
        running(two_facts(Gate()), database_url, **BRISK) as elsewhere,
    ):
        id = await begun(there)
        await gate.arrived.wait()
        seen: Told = []
        async with asyncio.TaskGroup() as tasks:
            here = tasks.create_task(all_events(there, id))
            with anyio.fail_after(20):
                async for event in followed(elsewhere, id):
                    seen.append(told(event))
                    if event.kind == "evidence":
                        gate.open()
        assert seen == here.result()
        assert [item["name"] for item in of_kind(seen, "evidence")] == ["first", "second"]
        assert await all_events(elsewhere, id, seen[3][0]) == seen[4:]


async def test_who_starts_to_follow_while_the_rest_is_being_committed_misses_nothing(
    database_url: str,
) -> None:
    """Over and over, at whatever moment it happens to be: what was told live is what is told afterwards."""
    fact = Fact("first", values(1))
    async with running(service_of(Evidence("first", fact, deadline_ms=5_000)), database_url) as there:
        for n in range(40):
            id = await begun(there, f"k-{n}")
            for _ in range(n):
                await asyncio.sleep(0)
            live = await all_events(there, id)
            assert live == await all_events(there, id)
            assert kinds(live)[-2:] == ["rest", "decision"]


async def test_operations_are_told_until_they_have_ended(database_url: str) -> None:
    gate = Gate()

    async def perform(_: Operation, __: int) -> SendResult:
        await gate()
        return Accepted("ref")

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({"ok": True}, effects=[Effect("send", {"value": 1})])

    coordinator = service_of(policy=policy, effects=[Sent(perform=perform, timeout_ms=20_000)])
    async with running(coordinator, database_url, **BRISK) as there:
        id = await begun(there)
        seen: Told = []
        with anyio.fail_after(20):
            async for event in followed(there, id):
                seen.append(told(event))
                if event.kind == "rest":
                    gate.open()
        states = [operation["state"] for operation in of_kind(seen, "operation")]
        assert states == ["dispatching", "succeeded"]
        assert seen[-1][1] == "decision"
        assert seen[-1][2]["operations"][0]["state"] == "succeeded"
        assert await all_events(there, id, seen[-1][0]) == []


async def test_what_happens_to_an_operation_after_the_end_of_a_stream_is_told_to_who_comes_back(
    database_url: str,
) -> None:
    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({"ok": True}, effects=[Effect("send", {"value": 1})])

    async def perform(_: Operation, __: int) -> SendResult:
        return Ambiguous("timed-out", "no answer")

    async with running(service_of(policy=policy, effects=[Sent(perform=perform)]), database_url) as there:
        decision = await there.decided()
        id = UUID(decision["id"])
        parked = await all_events(there, id)
        assert parked[-1][2]["operations"][0]["state"] == "uncertain"
        operation = UUID(decision["operations"][0]["id"])
        await there.service.operations.resolve(there.caller, operation, "happened", "r-1", "")
        later = await all_events(there, id, parked[-1][0])
        assert kinds(later) == ["operation", "decision"]
        assert later[0][2]["state"] == "succeeded"
        assert later[0][0] > parked[-1][0]


async def test_a_policy_that_asks_for_more_and_evidence_that_moves_are_told(database_url: str) -> None:
    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        if "extra" not in [item.name for item in packet.items]:
            return NeedMore(["extra"])
        return Commit({"ok": True})

    moving = Evidence("moving", Fact("moving", values(1, 2)), deadline_ms=5_000, freshness=Decisive("value"))
    gate = Gate()
    extra = Evidence(
        "extra", Fact("extra", gate.answering()), deadline_ms=9_000, required=False, on_demand=True
    )
    async with running(service_of(moving, extra, policy=policy), database_url) as there:
        id = await begun(there)
        async with asyncio.TaskGroup() as tasks:
            live = tasks.create_task(all_events(there, id))
            await gate.arrived.wait()
            gate.open()
        seen = live.result()
        assert [outcome["kind"] for outcome in of_kind(seen, "outcome")] == ["need-more", "commit", "commit"]
        assert [fence["held"] for fence in of_kind(seen, "fence")] == [False, True]
        assert [(item["name"], item["value"]["value"]) for item in of_kind(seen, "evidence")] == [
            ("moving", 1),
            ("extra", 1),
            ("moving", 2),
        ]
        assert await all_events(there, id) == seen


async def test_parts_are_told_as_they_come_and_the_evidence_is_the_whole(database_url: str) -> None:
    gate = Gate()
    parts = [{"text": f"{n}"} for n in range(200)]
    source = Fact("stream", streaming(*parts, then=gate))
    async with running(
        service_of(Evidence("stream", source, deadline_ms=20_000)), database_url, **BRISK
    ) as there:
        id = await begun(there)
        seen: Told = []
        with anyio.fail_after(20):
            async for event in followed(there, id):
                seen.append(told(event))
                if event.kind == "part" and len(of_kind(seen, "part")) == len(parts):
                    gate.open()
        assert [part["value"] for part in of_kind(seen, "part")] == parts
        assert [part["part"] for part in of_kind(seen, "part")] == list(range(200))
        assert of_kind(seen, "evidence")[0]["value"]["value"] == 200
        assert await all_events(there, id, seen[50][0]) == seen[51:], "after the rest, too"


async def test_a_slow_follower_holds_the_source_back_and_misses_nothing(database_url: str) -> None:
    parts = list(range(300))
    there_is_a_follower = Gate()
    source = Fact("stream", streaming(*parts, first=there_is_a_follower))
    evidence = Evidence("stream", source, deadline_ms=30_000)
    async with running(
        service_of(evidence), database_url, stream_buffer=8, stream_stall_ms=20_000, **BRISK
    ) as there:
        id = await begun(there)
        seen: Told = []
        lead: list[int] = []
        with anyio.fail_after(20):
            async for event in followed(there, id):
                seen.append(told(event))
                if event.kind == "running":
                    there_is_a_follower.open()
                run = there.service._holdings.runs.get(id)
                for _ in range(20):  # the source goes on as far as it may
                    await asyncio.sleep(0)
                if run is not None and event.kind == "part":
                    lead.append(len(run.events) + 1 - len(seen))
        assert max(lead) <= BATCH + 8 + 1, "a batch that is being sent, the buffer, and the part that waits"
        assert len(lead) > 200
        assert [part["value"] for part in of_kind(seen, "part")] == parts


async def test_a_follower_that_stands_still_is_cut_long_before_the_deadline_and_can_come_back(
    database_url: str,
) -> None:
    parts = list(range(300))
    there_is_a_follower, gate = Gate(), Gate()
    source = Fact("stream", streaming(*parts, first=there_is_a_follower, then=gate))
    evidence = Evidence("stream", source, deadline_ms=4_000, attempts=1)
    async with running(service_of(evidence), database_url, stream_buffer=8, **BRISK) as there:
        id = await begun(there)
        seen: Told = []

        async def stand_still() -> None:
            async for event in followed(there, id):
                seen.append(told(event))
                if event.kind == "running":
                    there_is_a_follower.open()
                if event.kind == "part":
                    await (
                        gate.arrived.wait()
                    )  # takes no more until the source, all the same, has streamed everything

        with anyio.fail_after(20), pytest.raises(FollowerCut):
            await stand_still()
        assert len(of_kind(seen, "part")) < 80
        gate.open()
        seen += await all_events(there, id, seen[-1][0])
        assert [part["value"] for part in of_kind(seen, "part")] == parts
        assert of_kind(seen, "evidence")[0]["state"] == "found"
        assert of_kind(seen, "evidence")[0]["elapsed_ms"] < 3_000, (
            "a quarter of the deadline was lost, not more"
        )


@pytest.mark.parametrize(
    ("settings", "parts", "expected"),
    [
        ({"max_parts": 3}, ["a", "b", "c", "d"], "more than 3 parts"),
        ({"max_evidence_bytes": 50}, ["a" * 30, "b" * 30], "more than 50 bytes"),
        ({}, [float("nan")], "not finite"),
    ],
)
async def test_a_reading_may_not_stream_without_end_nor_what_is_no_json(
    database_url: str, settings: dict[str, int], parts: list[object], expected: str
) -> None:
    source = Fact("stream", streaming(*parts))
    evidence = Evidence("stream", source, deadline_ms=5_000, required=False, attempts=1)
    async with running(service_of(evidence), database_url, **settings) as there:
        decision = await there.decided()
    [item] = decision["evidence"]
    assert item["state"] == "failed"
    assert expected in item["error"]["message"].lower()


async def test_each_attempt_counts_its_parts_anew(database_url: str) -> None:
    gate = Gate()

    async def answer(request: ReadRequest, n: int) -> Answer[Number]:
        await gate()
        await request.emit(n)
        return Failed("busy", "again", retryable=True) if n == 1 else Found(Number(n))

    async with running(
        service_of(Evidence("stream", Fact("stream", answer), deadline_ms=9_000)), database_url
    ) as there:
        id = await begun(there)
        async with asyncio.TaskGroup() as tasks:
            live = tasks.create_task(all_events(there, id))
            await gate.arrived.wait()
            gate.open()
    parts = of_kind(live.result(), "part")
    assert [(part["attempt"], part["part"], part["value"]) for part in parts] == [(1, 0, 1), (2, 0, 2)]


async def test_there_are_only_so_many_streams_and_one_that_ends_frees_its_place(database_url: str) -> None:
    async with running(service_of(), database_url, max_streams=2) as there:
        streams = there.service.streams
        with streams.slot(), streams.slot(), pytest.raises(StreamsFull) as refused, streams.slot():
            pass
        assert refused.value.extra["retry_after_ms"]
        with streams.slot():
            assert streams.open == 1
        assert streams.open == 0


async def test_another_tenants_decision_is_not_there(database_url: str) -> None:
    gate = Gate()
    async with running(two_facts(gate), database_url) as there:
        id = await begun(there)
        with pytest.raises(NotFound):
            async for _ in there.service.streams.follow(UUID(int=7), id, 0):
                pass
        gate.open()


async def test_a_silent_stream_says_so_now_and_then(database_url: str) -> None:
    gate = Gate()
    async with running(two_facts(gate), database_url, stream_heartbeat_s=0.02) as there:
        id = await begun(there)
        silent = 0
        with anyio.fail_after(10):
            async with aclosing(there.service.streams.follow(there.tenant, id, 0)) as batches:
                async for batch in batches:
                    silent += not batch
                    if silent == 3:
                        gate.open()
        assert silent >= 3


async def test_a_stopping_process_ends_the_streams_of_what_it_does_not_run(database_url: str) -> None:
    gate = Gate()
    async with running(two_facts(gate), database_url) as there:
        id = await begun(there)
        async with running(two_facts(Gate()), database_url) as elsewhere:
            async with asyncio.TaskGroup() as tasks:
                stream = tasks.create_task(all_events(elsewhere, id))
                await eventually(lambda: not stream.done())
                elsewhere.service.stop_taking()
            assert "rest" not in kinds(stream.result())
        gate.open()
        assert kinds(await all_events(there, id))[-1] == "decision"


def test_the_numbers_of_a_rest_are_above_those_of_its_run() -> None:
    assert first_of(1) == 2
    assert first_of(1) + AT_REST // 2 < at_rest(1, 0) < at_rest(1, 1) - 1 < at_rest(1, 1) < first_of(2)


async def test_what_a_worker_says_is_told_whichever_process_it_says_it_to(database_url: str) -> None:
    gate = Gate()
    async with (
        running(two_facts(gate), database_url, **BRISK) as there,
        running(two_facts(Gate()), database_url, **BRISK) as elsewhere,
    ):
        id = await begun(there)
        await gate.arrived.wait()
        seen: Told = []
        with anyio.fail_after(20):
            async for event in followed(there, id):
                seen.append(told(event))
                lines = [line for progress in of_kind(seen, "progress") for line in progress["lines"]]
                if event.kind == "evidence" and not lines:
                    there.service._holdings._progress(there.tenant, id, "second", ["page 1"])
                if lines == ["page 1"]:
                    elsewhere.service._holdings._progress(there.tenant, id, "second", ["page 2", "page 3"])
                if lines == ["page 1", "page 2", "page 3"]:
                    gate.open()
        assert of_kind(seen, "progress")[1] == {"evidence": "second", "lines": ["page 2", "page 3"]}
        assert await all_events(elsewhere, id) == seen


async def test_a_worker_that_never_stops_talking_fills_no_memory(database_url: str) -> None:
    gate = Gate()
    async with running(two_facts(gate), database_url, max_evidence_bytes=100) as there:
        id = await begun(there)
        await gate.arrived.wait()
        before = len(there.service._holdings.runs[id].events)
        for _ in range(50):
            there.service._holdings._progress(there.tenant, id, "second", ["x" * 30])
        assert len(there.service._holdings.runs[id].events) - before == 4
        gate.open()


async def test_who_shares_a_reading_is_told_all_of_its_parts_however_late_it_joins(database_url: str) -> None:
    first_half, second_half = Gate(), Gate()

    async def answer(request: ReadRequest, _: int) -> Answer[Number]:
        await request.emit("one")
        await first_half()
        await request.emit("two")
        await second_half()
        await request.emit("three")
        return Found(Number(3))

    source = Fact("stream", answer)
    async with running(
        service_of(Evidence("stream", source, deadline_ms=20_000)), database_url, **BRISK
    ) as there:
        leader = await begun(there, "leader")
        await first_half.arrived.wait()
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(all_events(there, leader))]
            first_half.open()
            await second_half.arrived.wait()
            late = await begun(there, "late")
            streams.append(tasks.create_task(all_events(there, late)))
            flights = there.service._holdings.engine.flights
            await eventually(lambda: [flight.waiting for flight in flights._all] == [2])
            runs = there.service._holdings.runs
            await eventually(lambda: all(runs[UUID(str(id))].events._followers for id in (leader, late)))
            second_half.open()
        for stream in streams:
            parts = of_kind(stream.result(), "part")
            assert [(part["part"], part["value"]) for part in parts] == [(0, "one"), (1, "two"), (2, "three")]
        assert source.reads == 1


async def test_a_reading_that_goes_on_for_others_tells_nothing_more_to_a_decision_that_has_left_it(
    database_url: str,
) -> None:
    gate = Gate()

    async def answer(request: ReadRequest, _: int) -> Answer[Number]:
        await request.emit("one")
        await gate()
        await request.emit("two")
        return Found(Number(2))

    evidence = Evidence("stream", Fact("stream", answer), deadline_ms=20_000, required=False)
    async with running(service_of(evidence), database_url, **BRISK) as there:
        leader = (await there.post("leader", wait=0, time_limit_ms=400)).id
        await gate.arrived.wait()
        follower = await begun(there, "follower")
        left = await all_events(there, leader)
        seen: Told = []
        with anyio.fail_after(20):
            async for event in followed(there, follower):
                seen.append(told(event))
                if event.kind == "part":
                    gate.open()
        assert [part["value"] for part in of_kind(left, "part")] == ["one"]
        assert [part["value"] for part in of_kind(seen, "part")] == ["one", "two"]
        assert await all_events(there, leader) == left
