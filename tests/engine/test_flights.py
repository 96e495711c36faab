"""Identical readings in flight are shared: one call, one bill, everybody's own deadline, and a confirmation that is a real one (I3,
I14, I15)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from coordinator import Decisive, Evidence
from coordinator.config import Settings
from coordinator.core.evidence import Answer, Failed, Found, ReadRequest, Unchanged
from coordinator.core.money import money
from coordinator.engine.flights import CALLED_OFF, Flight, Flights
from coordinator.engine.parts import Audience
from tests.engine.harness import Fact, Gate, Number, Running, evidence_of, running, service_of
from tests.store.given import new_tenant
from tests.support import eventually

CENT = money("0.01 SGD")
NOBODY = Audience(Settings(), "nobody")


def waiting(service: Running) -> list[int]:
    """How many wait for each flight under way."""
    return sorted(flight.waiting for flight in service.service._holdings.engine.flights._all)


async def two_of(service: Running, source: Fact, gate: Gate, **second: Any) -> Sequence[Any]:
    """Two decisions that ask the same at the same time; the second joins the first one's flight."""
    first = asyncio.ensure_future(service.decided("first"))
    await gate.arrived.wait()
    other = asyncio.ensure_future(service.decided("second", **second))
    await eventually(lambda: waiting(service) == [2])
    gate.open()
    return await asyncio.gather(first, other)


async def test_what_two_decisions_ask_at_the_same_time_is_asked_once_and_the_second_says_so(
    database_url: str,
) -> None:
    gate = Gate()
    source = Fact("a", gate.answering(7))
    async with running(service_of(Evidence("a", source, deadline_ms=20_000)), database_url) as service:
        first, second = await two_of(service, source, gate)
        assert waiting(service) == []
    assert source.reads == 1
    assert [evidence_of(made, "a")["reading"] for made in (first, second)] == ["own", "shared"]
    assert [evidence_of(made, "a")["value"]["value"] for made in (first, second)] == [7, 7]


async def test_the_leader_pays_and_the_follower_does_not(database_url: str) -> None:
    gate = Gate()

    async def paid(_: ReadRequest, __: int) -> Found[Number]:
        await gate()
        return Found(Number(1), cost=CENT)

    source = Fact("a", paid)
    evidence = Evidence("a", source, deadline_ms=20_000, reserves=money("0.40 SGD"))
    async with running(service_of(evidence), database_url) as service:
        first, second = await two_of(service, source, gate)
    assert first["budget"]["settled"]["amount_minor"] == 1
    assert (second["budget"]["settled"], second["budget"]["uncertain"]) == (None, None)
    assert evidence_of(second, "a")["cost"] is None


async def test_another_input_or_another_tenant_is_another_reading(database_url: str) -> None:
    gate = Gate()
    source = Fact("a", gate.answering())
    async with running(service_of(Evidence("a", source, deadline_ms=20_000)), database_url) as service:
        caller = msgspec.structs.replace(service.caller, tenant=await new_tenant(database_url, "two"))
        stranger = Running(service.service, caller, service.url)
        asked = (service.decided("k", 1), service.decided("l", 2), stranger.decided("k", 1))
        made = [asyncio.ensure_future(each) for each in asked]
        await eventually(lambda: gate.inside == 3)
        gate.open()
        assert {evidence_of(decision, "a")["reading"] for decision in await asyncio.gather(*made)} == {"own"}
    assert source.reads == 3


async def test_a_leader_that_leaves_does_not_take_its_follower_along(database_url: str) -> None:
    gate, cleaned = Gate(), asyncio.Event()

    async def cleanup() -> None:
        cleaned.set()

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        request.on_cancel(cleanup)
        await gate()
        return Found(Number(3))

    source = Fact("a", read)
    evidence = Evidence("a", source, deadline_ms=20_000, required=False, reserves=CENT)
    async with running(service_of(evidence), database_url) as service:
        first = asyncio.ensure_future(service.decided("first", time_limit_ms=200))
        await gate.arrived.wait()
        second = asyncio.ensure_future(service.decided("second"))
        left = await first
        assert evidence_of(left, "a")["state"] == "timed_out"
        assert left["budget"]["uncertain"]["amount_minor"] == 1
        assert waiting(service) == [1]
        gate.open()
        assert evidence_of(await second, "a")["value"]["value"] == 3
    assert (source.reads, cleaned.is_set()) == (1, False)


async def test_when_the_last_one_leaves_the_call_is_cancelled_and_its_clean_ups_have_run(
    database_url: str,
) -> None:
    gate, cleaned = Gate(), asyncio.Event()

    async def cleanup() -> None:
        cleaned.set()

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        request.on_cancel(cleanup)
        await gate()
        raise AssertionError

    source = Fact("a", read)
    evidence = Evidence("a", source, deadline_ms=200, required=False)
    async with running(service_of(evidence), database_url) as service:
        made = await asyncio.gather(*(service.decided(f"k{n}") for n in range(3)))
        assert waiting(service) == []
        assert service.service._holdings.engine.providers.by_name["a"].busy == 0
    assert {evidence_of(decision, "a")["state"] for decision in made} == {"timed_out"}
    assert (source.reads, gate.inside, cleaned.is_set()) == (1, 0, True)


async def test_a_follower_with_time_left_asks_again_when_the_source_gave_up_at_the_leaders_limit(
    database_url: str,
) -> None:
    """The leader's decision has 100 ms, and tells its source so; the source holds on until the leader's time is over."""
    inside, over = asyncio.Event(), asyncio.Event()

    async def read(request: ReadRequest, n: int) -> Answer[Number]:
        if n > 1:
            return Found(Number(5))
        inside.set()
        await over.wait()
        return Failed("timed-out", "no answer within the limit")

    source = Fact("a", read)
    evidence = Evidence("a", source, deadline_ms=20_000, required=False)
    async with running(service_of(evidence), database_url) as service:
        first = asyncio.ensure_future(service.decided("first", time_limit_ms=100))
        await inside.wait()
        second = asyncio.ensure_future(service.decided("second"))
        await eventually(lambda: waiting(service) == [2])
        await first
        over.set()
        item = evidence_of(await second, "a")
    assert (item["state"], item["value"]["value"], item["reading"], item["attempts"]) == (
        "found",
        5,
        "own",
        1,
    )


async def test_a_failure_that_is_no_matter_of_time_is_the_followers_too(database_url: str) -> None:
    gate = Gate()

    async def read(_: ReadRequest, __: int) -> Failed:
        await gate()
        return Failed("down", "it is down")

    source = Fact("a", read)
    evidence = Evidence("a", source, deadline_ms=20_000, required=False)
    async with running(service_of(evidence), database_url) as service:
        made = await two_of(service, source, gate)
    assert source.reads == 1
    assert [evidence_of(decision, "a")["error"]["code"] for decision in made] == ["down", "down"]


def confirming(gate: Gate) -> Fact:
    """Read at once; asked whether that still holds, it waits for the gate."""

    async def read(request: ReadRequest, _: int) -> Answer[Number]:
        if request.if_revision is None:
            return Found(Number(1), "r1")
        await gate()
        return Unchanged()

    return Fact("a", read)


async def test_a_confirmation_joins_none_that_began_before_what_it_confirms_had_ended(
    database_url: str,
) -> None:
    gate = Gate()
    source = confirming(gate)
    evidence = Evidence("a", source, deadline_ms=20_000, freshness=Decisive())
    async with running(service_of(evidence), database_url) as service:
        first = asyncio.ensure_future(service.decided("first"))
        await gate.arrived.wait()  # the first decision is being confirmed; only now the second one reads
        second = asyncio.ensure_future(service.decided("second"))
        await eventually(lambda: gate.inside == 2)
        gate.open()
        assert [made["status"] for made in await asyncio.gather(first, second)] == ["committed", "committed"]
    assert source.reads == 4


async def test_decisions_that_come_to_their_fences_together_are_confirmed_by_one_reading(
    database_url: str,
) -> None:
    both_read, confirmed = Gate(), Gate()
    source = confirming(confirmed)
    evidence = [
        Evidence("a", source, deadline_ms=20_000, freshness=Decisive()),
        Evidence("b", Fact("b", both_read.answering()), deadline_ms=20_000),
    ]
    async with running(service_of(*evidence), database_url) as service:
        made = [asyncio.ensure_future(service.decided(key)) for key in ("first", "second")]
        await eventually(lambda: waiting(service) == [2])  # for b; a is there for both
        both_read.open()
        await eventually(lambda: confirmed.inside == 1 and waiting(service) == [2])
        confirmed.open()
        decisions = await asyncio.gather(*made)
    assert [decision["status"] for decision in decisions] == ["committed", "committed"]
    assert [request.if_revision for request in source.requests].count("r1") == 1


async def a_call(began: float, flight: Flight, gate: Gate) -> Answer[Any]:
    flight.began = began
    await gate()
    return Unchanged()


def soon() -> float:
    return time.monotonic() + 60


async def test_only_what_begins_late_enough_is_joined_and_a_later_flight_takes_the_place_of_an_earlier() -> (
    None
):
    gate, flights = Gate(), Flights(1.0)
    early, late = Flight(("q",), soon(), NOBODY), Flight(("q",), soon(), NOBODY)
    first = asyncio.ensure_future(flights.lead(early, a_call(10.0, early, gate)))
    await eventually(lambda: len(flights) == 1)
    assert flights.latest(("q",), 10.0) is early
    await gate.arrived.wait()
    assert flights.latest(("q",), 10.0) is early
    assert flights.latest(("q",), 10.5) is None
    second = asyncio.ensure_future(flights.lead(late, a_call(11.0, late, gate)))
    await eventually(lambda: gate.inside == 2)
    assert flights.latest(("q",), 10.5) is late
    gate.open()
    assert [await first, await second] == [Unchanged(), Unchanged()]
    assert flights.latest(("q",), 0.0) is None
    assert len(flights) == 0


async def test_what_waits_for_its_slot_will_begin_after_any_moment_there_was() -> None:
    gate, flights = Gate(), Flights(1.0)
    flight = Flight(("q",), soon(), NOBODY)

    async def call() -> Answer[Any]:
        await gate()
        return Unchanged()

    leading = asyncio.ensure_future(flights.lead(flight, call()))
    await gate.arrived.wait()
    assert flights.latest(("q",), time.monotonic()) is flight
    gate.open()
    assert await leading == Unchanged()


async def test_each_waits_as_long_as_its_own_time_lasts_and_the_last_one_ends_it() -> None:
    gate, flights = Gate(), Flights(1.0)
    flight = Flight(("q",), time.monotonic() + 0.05, NOBODY)
    leading = asyncio.ensure_future(flights.lead(flight, a_call(1.0, flight, gate)))
    await gate.arrived.wait()
    joined = asyncio.ensure_future(flights.join(flight, time.monotonic() + 0.3))
    assert await leading is CALLED_OFF
    assert (gate.inside, joined.done()) == (1, False)
    assert await joined is CALLED_OFF
    assert (gate.inside, len(flights)) == (0, 0)


async def test_a_cancelled_flight_is_joined_by_nobody_even_while_it_has_not_ended() -> None:
    stubborn, flights = Gate(), Flights(0.05)
    flight = Flight(("q",), time.monotonic() + 0.02, NOBODY)

    async def call() -> Answer[Any]:
        with anyio.CancelScope(shield=True):
            await stubborn()
        return Unchanged()

    assert await flights.lead(flight, call()) is CALLED_OFF
    assert flights.latest(("q",), 0.0) is None
    assert len(flights) == 1  # it holds its slot until it really ends
    stubborn.open()
    await eventually(lambda: len(flights) == 0)


async def test_no_flight_outlives_its_owner() -> None:
    gate, flights = Gate(), Flights(1.0)
    made = [Flight(question, soon(), NOBODY) for question in (("a",), ("b",), None)]
    leading = [asyncio.ensure_future(flights.lead(each, a_call(1.0, each, gate))) for each in made]
    await eventually(lambda: gate.inside == 3)
    await flights.aclose()
    assert (gate.inside, len(flights)) == (0, 0)
    assert await asyncio.gather(*leading) == [CALLED_OFF] * 3


async def test_a_fault_inside_the_engine_reaches_everyone_who_waits() -> None:
    gate, flights = Gate(), Flights(1.0)
    flight = Flight(("q",), soon(), NOBODY)

    async def broken() -> Answer[Any]:
        await gate()
        raise LookupError("a fault of ours")

    waiting = [flights.lead(flight, broken()), flights.join(flight, soon())]
    both = [asyncio.ensure_future(each) for each in waiting]
    await eventually(lambda: flight.waiting == 2 and gate.inside == 1)
    gate.open()
    for raised in await asyncio.gather(*both, return_exceptions=True):
        assert isinstance(raised, LookupError)


async def test_a_leader_whose_deadline_comes_first_is_timed_out_then_and_its_follower_is_not(
    database_url: str,
) -> None:
    """Two evidences of one source in one decision: neither the shorter nor the longer deadline becomes the other's."""
    gate, started = Gate(), time.monotonic()
    source = Fact("source", gate.answering(7))
    evidence = [
        Evidence("short", source, deadline_ms=100, required=False),
        Evidence("long", source, deadline_ms=20_000, required=False),
    ]
    async with running(service_of(*evidence), database_url) as service:
        pending = asyncio.ensure_future(service.decided())
        await eventually(lambda: waiting(service) == [2])
        await eventually(lambda: waiting(service) == [1])
        assert time.monotonic() - started < 15
        gate.open()
        decision = await pending
    assert [evidence_of(decision, name)["state"] for name in ("short", "long")] == ["timed_out", "found"]
    assert source.reads == 1
