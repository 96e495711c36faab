"""Every limit of a run ends in an answer, with everything gathered so far in its packet: never in a loop (I17)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from coordinator import Commit, Decisive, Evidence, NeedMore, telemetry
from coordinator.core.evidence import Failed, Found, ReadRequest
from coordinator.core.money import money
from tests.engine.harness import Fact, Gate, Number, evidence_of, running, service_of, values
from tests.support import eventually

FORTY = money("0.40 SGD")


def costing(amount: str, *numbers: int) -> Any:
    async def read(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(numbers[min(n, len(numbers)) - 1]), cost=money(amount))

    return read


def ceiling(amount: int) -> dict[str, Any]:
    return {"ceiling": {"amount_minor": amount, "currency": "SGD"}}


# Time ------------------------------------------------------------------------------------------------------------------------


async def test_a_decision_out_of_time_before_its_policy_ran_expires_with_what_was_gathered(
    database_url: str,
) -> None:
    never = Fact("never")
    coordinator = service_of(
        Evidence("quick", Fact("quick", 5), deadline_ms=10_000),
        Evidence("slow", Fact("slow", Gate().answering()), deadline_ms=10_000),
        Evidence("never", never, deadline_ms=10_000, after=["slow"], required=False),
    )
    async with running(coordinator, database_url) as service:
        decision = await service.decided(time_limit_ms=500)
    states = {item["name"]: item["state"] for item in decision["evidence"]}
    assert decision["status"] == "expired", decision["outcome"]
    assert decision["outcome"]["code"] == "time-limit"
    assert states == {"quick": "found", "slow": "timed_out", "never": "cancelled"}
    assert never.reads == 0
    assert decision["packet_digest"] is not None


async def test_a_decision_out_of_time_after_its_policy_ran_is_for_a_person_to_look_at(
    database_url: str,
) -> None:
    def asks_for_more(ask: Any, packet: Any, record: Any) -> Any:
        return NeedMore(["slow"]) if len(packet.items) == 1 else Commit({})

    coordinator = service_of(
        Evidence("quick", Fact("quick", 5), deadline_ms=10_000),
        Evidence(
            "slow", Fact("slow", Gate().answering()), deadline_ms=10_000, required=False, on_demand=True
        ),
        policy=asks_for_more,
    )
    async with running(coordinator, database_url) as service:
        decision = await service.decided(time_limit_ms=1_500)
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "time-limit")
    assert [(item["name"], item["state"]) for item in decision["evidence"]] == [
        ("quick", "found"),
        ("slow", "timed_out"),
    ]


async def test_what_an_earlier_round_gathered_is_still_there_when_time_runs_out_while_it_is_read_again(
    database_url: str,
) -> None:
    """`a` moves, so `b`, which comes after it, is read again, and hangs."""
    gate = Gate()

    async def hangs_the_second_time(_: ReadRequest, n: int) -> Found[Number]:
        if n > 1:
            await gate()
        return Found(Number(10))

    coordinator = service_of(
        Evidence("a", Fact("a", values(1, 2)), deadline_ms=10_000, freshness=Decisive()),
        Evidence("b", Fact("b", hangs_the_second_time), deadline_ms=10_000, after=["a"]),
    )
    async with running(coordinator, database_url) as service:
        decision = await service.decided(time_limit_ms=1_000)
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "time-limit")
    assert [(item["state"], item["value"]["value"]) for item in decision["evidence"]] == [
        ("found", 2),
        ("found", 10),
    ]


async def test_a_cancelled_decision_shows_what_had_been_gathered(database_url: str) -> None:
    gate = Gate()
    coordinator = service_of(
        Evidence("quick", Fact("quick", 5), deadline_ms=10_000),
        Evidence("slow", Fact("slow", gate.answering()), deadline_ms=10_000, after=["quick"]),
    )
    async with running(coordinator, database_url) as service:
        pending = await service.post(wait=0)
        await gate.arrived.wait()
        await service.service.cancel(service.caller, pending.id)
        decision = await service.shown(pending.id)
    assert decision["status"] == "cancelled"
    assert {item["name"]: item["state"] for item in decision["evidence"]} == {
        "quick": "found",
        "slow": "cancelled",
    }


# Cost ------------------------------------------------------------------------------------------------------------------------


async def test_a_re_reading_that_may_cost_more_than_is_left_is_not_begun_and_a_person_decides(
    database_url: str,
) -> None:
    """0.30 were spent of 0.60; another reading may cost 0.40."""
    source = Fact("a", costing("0.30 SGD", 7))
    evidence = Evidence("a", source, deadline_ms=10_000, freshness=Decisive(), reserves=FORTY)
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided(**ceiling(60))
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "cost-limit")
    assert evidence_of(decision, "a")["value"]["value"] == 7
    assert decision["budget"]["settled"]["amount_minor"] == 30
    assert (source.reads, decision["operations"]) == (1, [])


async def test_a_re_reading_that_fits_in_what_is_left_is_made(database_url: str) -> None:
    source = Fact("a", costing("0.20 SGD", 7))
    evidence = Evidence("a", source, deadline_ms=10_000, freshness=Decisive(), reserves=FORTY)
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided(**ceiling(60))
    assert decision["status"] == "committed"
    assert (source.reads, decision["budget"]["settled"]["amount_minor"]) == (2, 40)


async def test_values_that_keep_moving_are_paid_for_until_the_ceiling_and_no_further(
    database_url: str,
) -> None:
    source = Fact("a", costing("0.30 SGD", *range(1, 50)))
    evidence = Evidence("a", source, deadline_ms=10_000, freshness=Decisive(), reserves=FORTY)
    async with running(service_of(evidence, max_rounds=50), database_url) as service:
        decision = await service.decided(**ceiling(130))
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "cost-limit")
    assert decision["budget"]["settled"]["amount_minor"] == 120


async def test_a_call_that_did_not_say_what_it_cost_counts_as_its_reserve(database_url: str) -> None:
    evidence = Evidence("a", Fact("a"), deadline_ms=10_000, freshness=Decisive(), reserves=FORTY)
    async with running(service_of(evidence), database_url) as service:
        assert (await service.decided("tight", **ceiling(79)))["outcome"]["code"] == "cost-limit"
        assert (await service.decided("wide", **ceiling(80)))["status"] == "committed"


async def test_readings_that_begin_together_are_counted_before_they_have_ended(database_url: str) -> None:
    """Two that are asked for by the policy; each would fit alone."""
    barrier = asyncio.Event()

    async def read(_: ReadRequest, __: int) -> Found[Number]:
        await barrier.wait()
        return Found(Number(1), cost=money("0.01 SGD"))

    def both(ask: Any, packet: Any, record: Any) -> Any:
        return NeedMore(["b", "c"]) if len(packet.items) == 1 else Commit({})

    limits: dict[str, Any] = {"deadline_ms": 10_000, "required": False, "on_demand": True, "reserves": FORTY}
    sources = [Fact(name, read) for name in ("b", "c")]
    first = Evidence("a", Fact("a", costing("0.90 SGD", 1)), deadline_ms=10_000, reserves=FORTY)
    coordinator = service_of(first, *(Evidence(each.name, each, **limits) for each in sources), policy=both)
    async with running(coordinator, database_url) as service:
        pending = asyncio.ensure_future(service.decided(**ceiling(150)))
        await eventually(lambda: sum(each.reads for each in sources) == 1)
        barrier.set()
        decision = await pending
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "cost-limit")
    states = sorted((item["state"], (item["error"] or {}).get("code")) for item in decision["evidence"][1:])
    assert states == [("found", None), ("skipped", "cost-limit")]


async def test_repeats_within_one_reading_are_what_its_reserve_is_for(database_url: str) -> None:
    async def second_time(_: ReadRequest, n: int) -> Any:
        return Found(Number(5)) if n == 2 else Failed("busy", "busy", retryable=True, retry_after_ms=1)

    evidence = Evidence("a", Fact("a", second_time), deadline_ms=10_000, reserves=FORTY)
    async with running(service_of(evidence), database_url) as service:
        assert (await service.decided(**ceiling(40)))["status"] == "committed"


async def test_joining_a_reading_in_flight_costs_nothing_and_is_never_beyond_the_ceiling(
    database_url: str,
) -> None:
    """The first evidence bills far more than it reserves: another call would be beyond the ceiling. What another decision without
    a ceiling is asking already is not another call."""
    gate = Gate()

    async def gated_(_: ReadRequest, __: int) -> Found[Number]:
        await gate()
        return Found(Number(1), cost=FORTY)

    coordinator = service_of(
        Evidence(
            "dear", Fact("dear", costing("0.40 SGD", 1)), deadline_ms=10_000, reserves=money("0.01 SGD")
        ),
        Evidence("a", Fact("a", gated_), deadline_ms=10_000, after=["dear"], reserves=money("0.30 SGD")),
    )
    async with running(coordinator, database_url) as service:
        leader = asyncio.ensure_future(service.decided("leader"))
        await gate.arrived.wait()
        follower = asyncio.ensure_future(service.decided("follower", **ceiling(40)))
        await eventually(lambda: [f.waiting for f in service.service._holdings.engine.flights._all] == [2])
        gate.open()
        await leader
        joined = await follower
        alone = await service.decided("alone", **ceiling(40))
    assert (joined["status"], joined["budget"]["settled"]["amount_minor"]) == ("committed", 40)
    assert (alone["status"], alone["outcome"]["code"]) == ("in_review", "cost-limit")


# One call --------------------------------------------------------------------------------------------------------------------


def cut_off(source: str) -> float:
    counter = telemetry.CALLS_CUT_OFF.labels(source)
    return float(counter._value.get())


async def test_a_call_above_its_ceiling_is_cut_off_counted_and_repeated(database_url: str) -> None:
    gate, cleaned = Gate(), asyncio.Event()

    async def cleanup() -> None:
        cleaned.set()

    async def slow_the_first_time(request: ReadRequest, n: int) -> Found[Number]:
        request.on_cancel(cleanup)
        if n == 1:
            await gate()
        return Found(Number(n))

    evidence = Evidence(
        "a", Fact("cut-once", slow_the_first_time), deadline_ms=10_000, attempt_ms=60, attempts=3
    )
    before = cut_off("cut-once")
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    item = evidence_of(decision, "a")
    assert (item["state"], item["value"]["value"], item["attempts"]) == ("found", 2, 2)
    assert (gate.inside, cleaned.is_set(), cut_off("cut-once") - before) == (0, True, 1)


async def test_a_source_that_is_always_too_slow_is_cut_off_so_often_and_no_more(database_url: str) -> None:
    gate = Gate()
    source = Fact("cut-always", gate.answering())
    evidence = Evidence("a", source, deadline_ms=10_000, attempt_ms=20, attempts=3, required=False)
    async with running(service_of(evidence), database_url, provider_concurrency=1) as service:
        decision = await service.decided()
        assert service.service._holdings.engine.providers.by_name["cut-always"].busy == 0
    item = evidence_of(decision, "a")
    assert (item["state"], item["error"]["code"], item["attempts"]) == ("timed_out", "call-too-long", 3)
    assert (source.reads, gate.inside) == (3, 0)


async def test_waiting_for_a_slot_does_not_count_against_the_ceiling_of_a_call(database_url: str) -> None:
    gate = Gate()
    holder = Fact("holder", gate.answering(), provider="shared")
    waiter = Fact("waiter", provider="shared")
    coordinator = service_of(
        Evidence("holder", holder, deadline_ms=10_000),
        Evidence("waiter", waiter, deadline_ms=10_000, attempt_ms=50, attempts=1),
    )
    async with running(coordinator, database_url, provider_concurrency=1) as service:
        pending = asyncio.ensure_future(service.decided())
        await gate.arrived.wait()
        longer = time.monotonic() + 0.1  # than the waiter's call may take
        await eventually(lambda: time.monotonic() > longer)
        gate.open()
        decision = await pending
    assert decision["status"] == "committed"
    assert evidence_of(decision, "waiter")["elapsed_ms"] >= 50


@pytest.mark.parametrize("attempt_ms", [0, -1, 1.5, 1001])
def test_a_ceiling_of_a_call_lies_within_its_evidences_deadline(attempt_ms: Any) -> None:
    from coordinator.errors import DeclarationError

    with pytest.raises(DeclarationError, match="attempt_ms"):
        Evidence("a", Fact("a"), deadline_ms=1000, attempt_ms=attempt_ms)
