"""What readings cost: every call that was begun is accounted for, by what it said or as not known (I10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coordinator import Decisive, Evidence
from coordinator.core.evidence import Absent, Answer, Failed, Found, ReadRequest, Unchanged
from coordinator.core.money import Money, money
from tests.engine.harness import Fact, Gate, Number, evidence_of, running, service_of
from tests.support import eventually

CENT = money("0.01 SGD")


def paid(
    name: str, answer: Callable[[ReadRequest, int], Awaitable[Any]], **more: Any
) -> Evidence[Number, Any]:
    limits: dict[str, Any] = {
        "deadline_ms": 10_000,
        "required": False,
        "reserves": money("0.40 SGD"),
        "attempts": 1,
    }
    return Evidence(name, Fact(name, answer), **limits | more)


def saying(*answers: Answer[Number]) -> Callable[[ReadRequest, int], Awaitable[Any]]:
    async def answer(_: ReadRequest, n: int) -> Answer[Number]:
        return answers[min(n, len(answers)) - 1]

    return answer


def minor(amount: Any) -> int | None:
    return None if amount is None else int(amount["amount_minor"])


@pytest.mark.parametrize(
    "answer",
    [Found(Number(1), cost=CENT), Absent(cost=CENT), Failed("down", "it is down", cost=CENT)],
)
async def test_whatever_a_source_answers_it_can_say_what_that_cost(
    answer: Answer[Number], database_url: str
) -> None:
    async with running(service_of(paid("cost", saying(answer))), database_url) as service:
        decision = await service.decided()
    assert minor(evidence_of(decision, "cost")["cost"]) == 1
    assert (minor(decision["budget"]["settled"]), decision["budget"]["uncertain"]) == (1, None)


async def test_a_failed_attempt_is_paid_for_as_well_as_the_one_that_succeeds(database_url: str) -> None:
    busy = Failed("busy", "busy", retryable=True, retry_after_ms=1, cost=money("0.02 SGD"))
    evidence = paid("cost", saying(busy, Found(Number(1), cost=CENT)), attempts=2)
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert minor(decision["budget"]["settled"]) == 3


async def test_the_re_reading_of_the_fence_is_paid_for(database_url: str) -> None:
    evidence = paid(
        "cost",
        saying(Found(Number(1), "r1", cost=CENT), Unchanged(cost=money("0.03 SGD"))),
        freshness=Decisive(),
    )
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed"
    assert (minor(decision["budget"]["settled"]), decision["budget"]["uncertain"]) == (4, None)


async def test_a_re_reading_that_is_silent_about_its_cost_may_still_be_billed(database_url: str) -> None:
    evidence = paid("cost", saying(Found(Number(1), cost=CENT), Found(Number(1))), freshness=Decisive())
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert (minor(decision["budget"]["settled"]), minor(decision["budget"]["uncertain"])) == (1, 40)


async def test_a_call_that_was_cut_off_may_still_be_billed_and_one_that_never_began_may_not(
    database_url: str,
) -> None:
    late = paid("late", Gate().answering(), deadline_ms=30)
    never = paid("never", saying(Found(Number(1))), after=["late"])
    async with running(service_of(late, never), database_url) as service:
        decision = await service.decided()
    assert [item["state"] for item in decision["evidence"]] == ["timed_out", "skipped"]
    assert (decision["budget"]["settled"], minor(decision["budget"]["uncertain"])) == (None, 40)


async def test_what_a_superseded_round_cost_is_not_forgotten(database_url: str) -> None:
    """The decisive value moves once: three readings, of which the packet shows the last."""
    answers = (Found(Number(1), cost=CENT), Found(Number(2), cost=CENT), Found(Number(2), cost=CENT))
    evidence = paid("cost", saying(*answers), freshness=Decisive())
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert (decision["status"], decision["fence"]["rounds"]) == ("committed", 2)
    assert minor(decision["budget"]["settled"]) == 3


async def test_a_bill_in_another_currency_is_no_bill_and_its_reservation_stays_uncertain(
    database_url: str,
) -> None:
    evidence = paid("cost", saying(Absent(cost=Money(1, "JPY"))))
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert evidence_of(decision, "cost")["error"]["code"] == "wrong-currency"
    assert (decision["budget"]["settled"], minor(decision["budget"]["uncertain"])) == (None, 40)


async def test_sources_that_bill_in_two_currencies_without_any_reservation_do_not_break_the_decision(
    database_url: str,
) -> None:
    evidence = [
        paid("dollars", saying(Found(Number(1), cost=CENT)), reserves=None),
        paid("yen", saying(Found(Number(1), cost=Money(1, "JPY"))), reserves=None, after=["dollars"]),
    ]
    async with running(service_of(*evidence), database_url) as service:
        decision = await service.decided()
    assert (decision["status"], minor(decision["budget"]["settled"])) == ("committed", 1)


async def test_a_negative_cost_is_malformed(database_url: str) -> None:
    evidence = paid("cost", saying(Found(Number(1), cost=Money(-1, "SGD"))))
    async with running(service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert evidence_of(decision, "cost")["error"]["code"] == "malformed-answer"
    assert minor(decision["budget"]["uncertain"]) == 40


async def test_a_call_that_never_got_its_slot_never_began_and_cannot_be_billed(database_url: str) -> None:
    gate = Gate()
    evidence = [
        Evidence("holder", Fact("holder", gate.answering(), provider="shared"), deadline_ms=10_000),
        paid("waits", saying(Found(Number(1))), deadline_ms=50),
    ]
    evidence[1].remote.provider = "shared"  # type: ignore[misc]  # a Fact's is an attribute
    async with running(service_of(*evidence), database_url, provider_concurrency=1) as service:
        pending = asyncio.ensure_future(service.decided())
        await gate.arrived.wait()
        provider = service.service._holdings.engine.providers.of("shared")
        await eventually(lambda: provider.waiting == 1)
        await eventually(lambda: provider.waiting == 0)
        gate.open()
        decision = await pending
    assert evidence_of(decision, "waits")["state"] == "timed_out"
    assert (decision["budget"]["settled"], decision["budget"]["uncertain"]) == (None, None)
