"""What workers cost: every holder of a task may be billed for, also one that was superseded, and only those who had it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.postgres import Databases
from tests.support.waiting import eventually_now
from tests.workers.asking import Service, serving

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
