"""What workers cost: every holder of a task may be billed for, also one that was superseded, and only those who had it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.core.money import money
from coordinator.worker import Failed, Found
from tests.support.postgres import Databases
from tests.support.waiting import eventually_now
from tests.workers.asking import Service, serving
from tests.workers.told import Told

SGD = {"currency": "SGD"}


@pytest.fixture
def service(postgres: Databases) -> Iterator[Service]:
    """With a budget that these tests alone draw on."""
    with serving(postgres) as made:
        ceiling = {"ceiling": {"amount_minor": 1_000, **SGD}, "period": "total", "timezone": "UTC"}
        assert made.client.call("PUT", "/v1/budgets/all", ceiling).status in (200, 201)
        yield made


def spent(service: Service) -> dict[str, int]:
    shown = service.client.get("/v1/budgets/all").json
    return {part: shown[part]["amount_minor"] for part in ("held", "uncertain", "settled")}


def cost(minor: int) -> dict[str, Any]:
    return {"amount_minor": minor, **SGD}


def test_an_answer_that_was_too_late_is_paid_for_with_the_one_that_counts(service: Service) -> None:
    silent, question = service.register("silent"), service.ask(type="paid-question")
    lost = silent.one()
    other = service.register("other")
    task = other.one()
    assert silent.complete(lost, cost=cost(7)).code == "superseded"
    assert other.complete(task, cost=cost(12)).status == 200
    assert question.answer()["budget"]["settled"] == cost(19)
    assert spent(service) == {"held": 0, "uncertain": 0, "settled": 19}


def test_a_worker_that_was_lost_may_still_be_billed_and_is_once_it_says_what_it_cost(
    service: Service,
) -> None:
    silent, question = service.register("silent"), service.ask(type="paid-question")
    lost = silent.one()
    other = service.register("other")
    assert other.complete(other.one(), cost=cost(12)).status == 200
    assert question.answer()["status"] == "committed"
    assert spent(service) == {"held": 0, "uncertain": 40, "settled": 0}
    for _ in range(2):
        assert silent.complete(lost, cost=cost(7)).code == "superseded"
    eventually_now(lambda: other.claim(0) or spent(service) == {"held": 0, "uncertain": 0, "settled": 19})


def test_a_late_answer_to_a_reading_that_ran_out_of_time_settles_it(service: Service) -> None:
    worker, question = service.register(), service.ask(type="short-paid-question")
    task = worker.one()
    assert question.answer()["status"] == "unresolved"
    assert spent(service)["uncertain"] == 40
    worker.complete(task, cost=cost(31))
    eventually_now(lambda: worker.claim(0) or spent(service) == {"held": 0, "uncertain": 0, "settled": 31})


def test_what_no_worker_ever_had_costs_nothing(service: Service) -> None:
    question = service.ask(type="short-paid-question")
    assert question.findings()["state"] == "timed_out"
    assert spent(service) == {"held": 0, "uncertain": 0, "settled": 0}


def test_a_late_cost_that_nobody_reserved_for_is_an_overage(service: Service) -> None:
    silent, question = service.register("silent"), service.ask()
    lost = silent.one()
    other = service.register("other")
    assert other.complete(other.one()).status == 200
    assert question.answer()["status"] == "committed"
    assert silent.complete(lost, cost=cost(7)).code == "superseded"
    eventually_now(lambda: other.claim(0) or spent(service)["settled"] == 7)


def test_a_cost_in_a_currency_that_its_decision_does_not_reserve_is_refused_and_may_be_corrected(
    service: Service,
) -> None:
    worker, question = service.register(), service.ask(type="paid-question")
    task = worker.one()
    for report in (worker.complete, worker.fail):
        refused = report(task, cost={"amount_minor": 12, "currency": "JPY"})
        assert (refused.status, refused.code) == (400, "malformed-request")
        assert [error["pointer"] for error in refused.json["errors"]] == ["/cost/currency"]
    assert worker.complete(task, cost=cost(12)).status == 200
    assert question.answer()["status"] == "committed"
    assert spent(service) == {"held": 0, "uncertain": 0, "settled": 12}


def test_a_cost_in_a_currency_that_the_ceiling_does_not_count_is_refused(service: Service) -> None:
    worker = service.register()
    question = service.ask(ceiling={"amount_minor": 50, **SGD})
    task = worker.one()
    assert worker.complete(task, cost={"amount_minor": 12, "currency": "JPY"}).code == "malformed-request"
    assert worker.complete(task, cost=cost(12)).status == 200
    assert question.answer()["budget"]["settled"] == cost(12)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "error", "settled", "uncertain"),
    [
        (Found({"summary": 7}, cost=money("0.12 SGD")), "malformed-result", 12, 0),
        (Found({"summary": "so"}, cost=money("12 JPY")), "malformed-result", 0, 40),
        (Failed("closed-today", "come back", cost=money("0.12 SGD")), "closed-today", 12, 0),
        (Failed("closed-today", "come back", cost=money("12 JPY")), "closed-today", 0, 40),
    ],
)
async def test_a_worker_whose_report_is_refused_says_what_can_be_said_of_it(
    service: Service, said: Found[object] | Failed, error: str, settled: int, uncertain: int
) -> None:
    findings = await Told(service, lambda task: said).asked(service, type="paid-question")
    assert findings["error"]["code"] == error  # type: ignore[index]
    assert spent(service) == {"held": 0, "uncertain": uncertain, "settled": settled}
