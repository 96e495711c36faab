"""Gathering: readings run at once, each failure is a typed item and never a value (I4), slots come back on every path (I15), and
no reading outlives its limits (I17)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from adapters.function import FunctionSource
from coordinator import Commit, Evidence
from coordinator.core.evidence import Absent, Answer, Failed, Found, ReadRequest, Unchanged
from coordinator.engine.service import Pending, Rested
from tests.engine.harness import Fact, Gate, Number, evidence_of, running, service_of
from tests.support import eventually

Reading = Callable[[ReadRequest, int], Awaitable[Any]]


def optional(name: str, answer: Reading | int, **more: Any) -> Evidence[Number, Any]:
    """Optional evidence: what became of it shows in the packet."""
    return Evidence(
        name, Fact(name, answer), **{"deadline_ms": 10_000, "required": False, "attempts": 1} | more
    )


async def raising(_: ReadRequest, __: int) -> Answer[Number]:
    raise RuntimeError("a source\x00 with a \ud800 fault")


def answering(answer: object) -> Reading:
    async def read(_: ReadRequest, __: int) -> object:
        return answer

    return read


async def test_independent_sources_run_at_once(database_url: str) -> None:
    """A barrier that opens only when all three are inside."""
    barrier = asyncio.Barrier(3)

    async def together(_: ReadRequest, __: int) -> Found[Number]:
        await barrier.wait()
        return Found(Number(1))

    names = ("a", "b", "c")
    sources = [Evidence(name, Fact(name, together), deadline_ms=20_000) for name in names]
    async with running(service_of(*sources), database_url) as service:
        assert (await service.decided())["outcome"]["terms"] == {"total": 3}


async def test_a_dependant_starts_as_soon_as_its_dependency_is_there(database_url: str) -> None:
    """Not with the next batch: `slow` is still being read while `second` and `third` come and go."""
    gate, seen = Gate(), asyncio.Event()

    async def last(request: ReadRequest, _: int) -> Found[Number]:
        assert gate.inside == 1
        assert request.evidence == {"second": {"value": 2, "note": ""}}
        seen.set()
        return Found(Number(3))

    coordinator = service_of(
        Evidence("slow", Fact("slow", gate.answering(10)), deadline_ms=20_000),
        Evidence("first", Fact("first", 1), deadline_ms=20_000),
        Evidence("second", Fact("second", 2), deadline_ms=20_000, after=["first"]),
        Evidence("third", Fact("third", last), deadline_ms=20_000, after=["second"]),
    )
    async with running(coordinator, database_url) as service, anyio.create_task_group() as tasks:
        tasks.start_soon(service.decided)
        await asyncio.wait_for(seen.wait(), 10)
        gate.open()


async def test_a_dependant_does_not_start_before_its_dependency_is_there(database_url: str) -> None:
    gate, after = Gate(), Fact("second", 2)
    coordinator = service_of(
        Evidence("first", Fact("first", gate.answering()), deadline_ms=20_000),
        Evidence("second", after, deadline_ms=20_000, after=["first"]),
    )
    async with running(coordinator, database_url) as service:
        pending = asyncio.ensure_future(service.decided())
        await gate.arrived.wait()
        assert after.reads == 0
        gate.open()
        assert (await pending)["status"] == "committed"
    assert after.reads == 1


async def test_a_source_that_hangs_is_timed_out_and_the_policy_is_told(database_url: str) -> None:
    gate = Gate()
    late = optional("late", gate.answering(), deadline_ms=50)
    async with running(service_of(late), database_url) as service:
        decision = await service.decided()
    item = evidence_of(decision, "late")
    assert (item["state"], item["value"]) == ("timed_out", None)
    assert item["elapsed_ms"] >= 50
    assert decision["outcome"]["terms"] == {"total": 0}
    assert gate.inside == 0


async def test_required_evidence_that_fails_ends_the_others_and_runs_their_clean_ups(
    database_url: str,
) -> None:
    inside, cleaned = asyncio.Event(), asyncio.Event()
    gate = Gate()

    async def clean_up() -> None:
        await anyio.lowlevel.checkpoint()  # a clean-up may wait
        cleaned.set()

    async def hanging(request: ReadRequest, _: int) -> Found[Number]:
        request.on_cancel(clean_up)
        inside.set()
        await gate()
        return Found(Number(1))

    async def failing(_: ReadRequest, __: int) -> Failed:
        await inside.wait()
        return Failed("no-such-site", "there is none")

    coordinator = service_of(
        Evidence("hanging", Fact("hanging", hanging), deadline_ms=20_000),
        Evidence("failing", Fact("failing", failing), deadline_ms=20_000),
        Evidence("after", Fact("after"), deadline_ms=20_000, after=["hanging"]),
    )
    async with running(coordinator, database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "unresolved"
    states = {item["name"]: item["state"] for item in decision["evidence"]}
    assert states == {"hanging": "cancelled", "failing": "failed", "after": "cancelled"}
    assert cleaned.is_set()
    assert gate.inside == 0


async def test_a_clean_up_that_hangs_is_cut_off_and_one_that_raises_does_not_stop_the_next(
    database_url: str,
) -> None:
    ran: list[str] = []

    async def good() -> None:
        ran.append("good")

    async def bad() -> None:
        ran.append("bad")
        raise RuntimeError("a clean-up that fails")

    async def hanging() -> None:
        ran.append("hanging")
        await anyio.sleep_forever()

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        for clean_up in (hanging, good, bad):  # they run in the opposite order
            request.on_cancel(clean_up)
        await anyio.sleep_forever()
        raise AssertionError

    late = optional("late", read, deadline_ms=20)
    async with running(service_of(late), database_url, cleanup_ms=50) as service:
        decision = await service.decided()
    assert ran == ["bad", "good", "hanging"]
    assert evidence_of(decision, "late")["state"] == "timed_out"


async def test_evidence_whose_dependency_is_missing_is_skipped_and_never_starts(database_url: str) -> None:
    after = Fact("after")
    coordinator = service_of(
        optional("first", answering(Failed("down", "it is down"))),
        Evidence("after", after, deadline_ms=1_000, after=["first"], required=False),
    )
    async with running(coordinator, database_url) as service:
        item = evidence_of(await service.decided(), "after")
    assert (item["state"], item["attempts"], item["error"]["code"]) == ("skipped", 0, "dependency-missing")
    assert after.reads == 0


@pytest.mark.parametrize(("retryable", "attempts", "reads"), [(True, 3, 3), (True, 1, 1), (False, 3, 1)])
async def test_only_what_is_worth_repeating_is_repeated_and_every_attempt_is_counted(
    retryable: bool, attempts: int, reads: int, database_url: str
) -> None:
    down = Fact("down", answering(Failed("down", "it is down", retryable=retryable)))
    declared = Evidence("down", down, deadline_ms=20_000, attempts=attempts, required=False)
    async with running(service_of(declared), database_url) as service:
        item = evidence_of(await service.decided(), "down")
    assert (down.reads, item["attempts"], item["error"]["code"]) == (reads, reads, "down")


async def test_a_reading_that_succeeds_at_its_second_attempt_is_found(database_url: str) -> None:
    async def second_time(_: ReadRequest, n: int) -> Answer[Number]:
        return Found(Number(5)) if n == 2 else Failed("busy", "busy", retryable=True, retry_after_ms=1)

    declared = Evidence("flaky", Fact("flaky", second_time), deadline_ms=20_000)
    async with running(service_of(declared), database_url) as service:
        item = evidence_of(await service.decided(), "flaky")
    assert (item["state"], item["attempts"], item["value"]["value"]) == ("found", 2, 5)


JUNK: dict[str, tuple[Reading, str]] = {
    "it raises": (raising, "source-raised"),
    "a value of the wrong type": (answering(Found({"value": "many"})), "malformed-value"),
    "a value that is not JSON": (answering(Found(object())), "malformed-value"),
    "a NaN": (answering(Found({"value": math.nan})), "malformed-value"),
    "an integer past 2^53": (answering(Found(Number(2**53))), "malformed-value"),
    "a NUL in a text": (answering(Found(Number(1, "a\x00b"))), "malformed-value"),
    "a lone surrogate in a text": (answering(Found(Number(1, "a\ud800b"))), "malformed-value"),
    "a value of a megabyte": (answering(Found(Number(1, "x" * 1_000_000))), "value-too-large"),
    "no answer at all": (answering(None), "malformed-answer"),
    "a plain value in place of an answer": (answering(Number(1)), "malformed-answer"),
    "unchanged, although nobody asked that": (answering(Unchanged()), "unexpected-unchanged"),
    "a confidence that is NaN": (answering(Found(Number(1), confidence=math.nan)), "malformed-value"),
    "a confidence above 1": (answering(Found(Number(1), confidence=1.5)), "malformed-value"),
    "an interval without end": (answering(Found(Number(1), interval=(0.0, math.inf))), "malformed-value"),
    "a revision that is no text": (answering(Found(Number(1), revision=7)), "malformed-value"),  # type: ignore[arg-type]  # as an untyped source may
    "an age that is no number": (answering(Found(Number(1), age_ms="old")), "malformed-value"),  # type: ignore[arg-type]  # the same
    "a value that comes from the future": (answering(Found(Number(1), age_ms=-1)), "malformed-value"),
    "an error text with a NUL and a surrogate": (answering(Failed("down", "a\x00\ud800b")), "down"),
    "an error that is no text": (answering(Failed("down", 7)), "malformed-answer"),  # type: ignore[arg-type]  # the same
}


@pytest.mark.parametrize("what", JUNK)
async def test_a_source_that_answers_junk_is_a_typed_failure(what: str, database_url: str) -> None:
    answer, code = JUNK[what]
    async with running(service_of(optional("junk", answer)), database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed", decision["outcome"]
    item = evidence_of(decision, "junk")
    assert (item["state"], item["value"], item["error"]["code"]) == ("failed", None, code)
    assert item["error"]["message"].isprintable()


async def test_absent_is_knowledge_and_not_a_value(database_url: str) -> None:
    required = Evidence("gone", Fact("gone", answering(Absent("r7"))), deadline_ms=1_000)
    async with running(service_of(required), database_url) as service:
        decision = await service.decided()
    item = evidence_of(decision, "gone")
    assert (decision["status"], item["state"], item["revision"], item["error"]) == (
        "unresolved",
        "absent",
        "r7",
        None,
    )


async def test_a_plain_function_serves_as_a_source(database_url: str) -> None:
    source = FunctionSource("twice", lambda ask, _: Number(2 * ask.value), returns=Number)
    async with running(service_of(Evidence("twice", source, deadline_ms=10_000)), database_url) as service:
        assert (await service.decided(value=4))["outcome"]["terms"] == {"total": 12}


async def test_the_slots_of_a_provider_come_back_after_timeouts_exceptions_and_cancels(
    database_url: str,
) -> None:
    """Two slots. Afterwards two readings can be inside at once, so both are free."""
    hang, barrier = Gate(), asyncio.Barrier(2)

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        match request.input.value:  # type: ignore[attr-defined]  # the input is an Ask
            case 1:
                raise RuntimeError
            case 2:
                await anyio.sleep_forever()
            case 3:
                await hang()
            case 4:
                await barrier.wait()
        return Found(Number(1))

    def declared(name: str) -> Evidence[Number, Any]:
        return Evidence(name, Fact(name, read, provider="shared"), deadline_ms=1_000, required=False)

    coordinator = service_of(declared("left"), declared("right"))
    async with running(coordinator, database_url, provider_concurrency=2) as service:
        assert (await service.decided("raises", 1))["status"] == "committed"
        assert (await service.decided("times-out", 2))["status"] == "committed"
        pending = await service.post("cancelled", 3, wait=0)
        assert isinstance(pending, Pending)
        await eventually(lambda: hang.inside == 2)
        await service.service.cancel(service.caller, pending.id)
        assert hang.inside == 0
        decision = await service.decided("both", 4)
        assert decision["outcome"]["terms"] == {"total": 6}
        provider = service.service._holdings.engine.providers.of("shared")
        assert (provider.busy, provider.waiting) == (0, 0)


async def test_no_more_calls_reach_a_provider_at_once_than_it_has_slots(database_url: str) -> None:
    gate = Gate()
    names = [f"n{n}" for n in range(5)]
    sources = [
        Evidence(name, Fact(name, gate.answering(), provider="shared"), deadline_ms=20_000) for name in names
    ]
    async with running(service_of(*sources), database_url, provider_concurrency=2) as service:
        pending = asyncio.ensure_future(service.post())
        provider = service.service._holdings.engine.providers.of("shared")
        await eventually(lambda: (gate.inside, provider.waiting) == (2, 3))
        gate.open()
        assert isinstance(await pending, Rested)


async def test_a_pause_between_attempts_holds_no_slot(database_url: str) -> None:
    """One slot. While one reading backs off for longer than the test lasts, the other gets in."""
    paused = asyncio.Event()

    async def busy(_: ReadRequest, __: int) -> Failed:
        paused.set()
        return Failed("busy", "busy", retryable=True, retry_after_ms=3_600_000)

    async def other(_: ReadRequest, __: int) -> Found[Number]:
        await paused.wait()
        return Found(Number(1))

    coordinator = service_of(
        Evidence("busy", Fact("busy", busy, provider="shared"), deadline_ms=500, required=False),
        Evidence("first", Fact("first", 1), deadline_ms=10_000),
        Evidence("other", Fact("other", other, provider="shared"), deadline_ms=10_000, after=["first"]),
    )
    async with running(coordinator, database_url, provider_concurrency=1) as service:
        decision = await service.decided()
    assert evidence_of(decision, "other")["state"] == "found"
    assert evidence_of(decision, "busy")["attempts"] == 1


async def test_a_policy_that_needs_nothing_reads_nothing(database_url: str) -> None:
    source = Fact("unused")
    on_demand = Evidence("unused", source, deadline_ms=1_000, required=False, on_demand=True)
    coordinator = service_of(on_demand, policy=lambda ask, packet, record: Commit({}))
    async with running(coordinator, database_url) as service:
        assert (await service.decided())["evidence"] == []
    assert source.reads == 0
