"""Several server processes on one database: a task is asked for in one, claimed and answered in another, and outlives the first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.config import Settings
from tests.api.serving import Client, server
from tests.support.postgres import Databases
from tests.support.waiting import eventually_now
from tests.workers.asking import COORDINATOR, LEASE_MS, Service, serving

SHORT = {"lease_ms": 1_000, "poll_ms": 100}


@pytest.fixture
def service(postgres: Databases) -> Iterator[Service]:
    """Where the questions are asked."""
    with serving(postgres, **SHORT) as made:
        yield made


@pytest.fixture
def elsewhere(service: Service) -> Iterator[Service]:
    """Where the workers poll."""
    limits = Settings(worker_lease_ms=LEASE_MS, worker_poll_ms=50, drain_s=1, **SHORT)
    with server(service.url, limits, path=COORDINATOR) as (address, pid):
        yield Service(service.url, address, Client(address, service.key), pid)


def test_a_poll_in_another_process_gets_the_task_and_its_answer_comes_back(
    service: Service, elsewhere: Service
) -> None:
    worker = elsewhere.register()
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(worker.claim, 20)
        eventually_now(lambda: elsewhere.workers()["w1"]["status"] == "idle")
        question = service.ask()
        (task,) = poll.result(10)
    assert worker.heartbeat(task, "here").status == 200
    assert worker.complete(task, "from elsewhere").status == 200
    assert question.findings()["value"] == {"summary": "from elsewhere"}


def test_whoever_takes_a_decision_over_waits_for_the_task_that_is_under_way(
    postgres: Databases, elsewhere: Service
) -> None:
    worker = elsewhere.register()
    limits = Settings(worker_lease_ms=LEASE_MS, worker_poll_ms=50, **SHORT)
    with server(elsewhere.url, limits, path=COORDINATOR, code=-signal.SIGKILL) as (address, pid):
        doomed = Service(elsewhere.url, address, Client(address, elsewhere.key), pid)
        body = {"type": "question", "input": {"topic": "bees"}}
        decision = doomed.client.decide(body, prefer="respond-async").json["id"]
        task = worker.one()
        os.kill(pid, signal.SIGKILL)

    def taken_over() -> bool:
        assert worker.heartbeat(task).status == 200, "it is wanted all the time"
        kinds = [item["kind"] for item in receipts(elsewhere, decision)]
        return kinds.count("decision.running") > 1 or "decision.taken-over" in kinds

    eventually_now(taken_over, 20)
    assert worker.complete(task, "made once").status == 200
    shown = eventually_now(lambda: rested(elsewhere, decision), 20)
    assert shown["status"] == "committed"
    assert shown["outcome"]["terms"]["found"] == [{"summary": "made once"}]
    assert [item["kind"] for item in receipts(elsewhere, decision)].count("task.waiting") == 1


def receipts(service: Service, decision: str) -> list[dict[str, object]]:
    items: list[dict[str, object]] = service.client.get(f"/v1/receipts?decision={decision}&limit=200").json[
        "items"
    ]
    return items


def rested(service: Service, decision: str) -> dict[str, dict[str, dict[str, object]]] | None:
    shown: dict[str, dict[str, dict[str, object]]] = service.client.get(f"/v1/decisions/{decision}").json
    return None if shown["status"] in ("queued", "running") else shown
