"""The contract of remote workers over HTTP: claims within capacity, fencing tokens, leases, drains, pins."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.serving import Client
from tests.support.waiting import eventually_now
from tests.workers.asking import LEASE_MS, ByHand, Service


@pytest.fixture(autouse=True)
def drained(service: Service) -> None:
    """Workers of other tests take nothing any more."""
    for worker in service.workers().values():
        ByHand(service.client, worker["id"], None).drain(0)  # type: ignore[arg-type]


def test_a_worker_registers_once_by_name_and_later_updates_what_it_can_do(service: Service) -> None:
    first = service.register("again", max_tasks=1).registered
    second = service.register("again", capabilities=["forecasting", "research"], max_tasks=20).registered
    assert (first.status, second.status) == (201, 200)
    assert first.json["id"] == second.json["id"]
    assert second.json["capabilities"] == ["forecasting", "research"]
    assert second.json["capacity"] == {"current": 0, "max": 20, "available": 20}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tasks": 0},
        {"max_tasks": 21},
        {"max_tasks": 1.5},
        {"capabilities": []},
        {"capabilities": ["Research"]},
        {"capabilities": ["research\n"]},
        {"name": ""},
        {"name": "w1\n"},
        {"name": "x" * 64},
        {"more": 1},
    ],
)
def test_a_registration_that_makes_no_sense_stores_nothing(service: Service, wrong: dict[str, Any]) -> None:
    before = len(service.receipts("worker.registered"))
    body = {"name": "wrong", "capabilities": ["research"], "max_tasks": 1} | wrong
    assert service.client.call("POST", "/v1/workers", body).code == "malformed-request"
    assert len(service.receipts("worker.registered")) == before


def test_a_worker_that_does_not_say_gets_one_task_at_a_time(service: Service) -> None:
    body = {"name": "modest", "capabilities": ["research"]}
    assert service.client.call("POST", "/v1/workers", body).json["capacity"]["max"] == 1


def test_a_worker_is_told_its_part_of_the_request_and_nothing_else(service: Service) -> None:
    worker, question = service.register(), service.ask("ants")
    task = worker.one()
    assert task["request"] == {"input": {"topic": "ants"}, "evidence": {}, "record": None}
    assert (task["source"], task["attempt"], task["fencing_token"]) == ("research", 1, 1)
    assert worker.complete(task, "they march", cost={"amount_minor": 3, "currency": "SGD"}).status == 200
    findings = question.findings()
    assert (findings["state"], findings["value"]) == ("found", {"summary": "they march"})
    assert findings["cost"] == {"amount_minor": 3, "currency": "SGD"}
    assert question.answer()["status"] == "committed"


def test_a_worker_gets_only_tasks_of_its_capabilities(service: Service) -> None:
    researcher = service.register()
    forecaster = service.register("seer", capabilities=["forecasting"])
    anybody = service.register("anybody", capabilities=["*"])
    question = service.ask(type="forecast")
    eventually_now(lambda: service.receipts("task.waiting")[-1]["capability"] == "forecasting")
    assert researcher.claim(0) == []
    (task,) = forecaster.claim()
    assert anybody.claim(0) == []
    assert forecaster.complete(task).status == 200
    assert question.findings()["state"] == "found"
    question = service.ask(type="forecast")
    assert anybody.complete(anybody.one()).status == 200
    assert question.findings()["state"] == "found"


def test_a_poll_that_waits_gets_the_task_as_soon_as_it_is_asked_for(service: Service) -> None:
    worker = service.register()
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(worker.claim, 20)
        eventually_now(lambda: service.workers()["w1"]["status"] == "idle")
        question = service.ask()
        (task,) = poll.result(10)
    worker.complete(task)
    assert question.findings()["state"] == "found"


@pytest.mark.parametrize("wait", ["61", "-1", "1.5", "x", ""])
def test_a_poll_beyond_its_bounds_is_told_them(service: Service, wait: str) -> None:
    worker = service.register()
    refused = service.client.call("POST", f"/v1/workers/{worker.id}/claim?wait={wait}")
    assert (refused.status, refused.code) == (400, "malformed-request")
    assert "0..60" in refused.json["detail"]


def test_a_poll_may_last_as_long_as_its_bound(service: Service) -> None:
    worker, question = service.register(), service.ask()
    (task,) = worker.claim(60)
    worker.complete(task)
    assert question.findings()["state"] == "found"


def test_concurrent_polls_never_get_more_than_the_worker_has_free(service: Service) -> None:
    worker = service.register(max_tasks=3)
    questions = [service.ask(str(n)) for n in range(12)]
    waiting = len(questions)
    eventually_now(lambda: len(service.receipts("task.waiting")) >= waiting)
    start = threading.Barrier(8)

    def poll(_: int) -> list[dict[str, Any]]:
        start.wait()
        return worker.claim(0)

    done = 0
    while done < len(questions):
        with ThreadPoolExecutor(8) as pool:
            tasks = [task for got in pool.map(poll, range(8)) for task in got]
        assert len({task["id"] for task in tasks}) == len(tasks)
        assert len(tasks) == min(3, len(questions) - done)
        assert service.workers()["w1"]["capacity"] == {
            "current": len(tasks),
            "max": 3,
            "available": 3 - len(tasks),
        }
        for task in tasks:
            assert worker.complete(task, task["request"]["input"]["topic"]).status == 200
        done += len(tasks)
    for n, question in enumerate(questions):
        assert question.findings()["value"] == {"summary": str(n)}


def test_a_worker_may_ask_for_fewer_tasks_than_it_has_free(service: Service) -> None:
    worker = service.register(max_tasks=20)
    questions = [service.ask() for _ in range(3)]
    tasks = worker.claim(limit=1)
    assert len(tasks) == 1
    while len(tasks) < 3:
        tasks += worker.claim()
    for task in tasks:
        worker.complete(task)
    assert [question.findings()["state"] for question in questions] == ["found"] * 3


def test_idle_busy_and_offline_are_derived_from_tasks_and_the_last_sign_of_life(service: Service) -> None:
    worker, question = service.register("seen"), service.ask()
    assert service.workers()["seen"]["status"] == "idle"
    task = worker.one()
    assert service.workers()["seen"]["status"] == "busy"
    worker.complete(task)
    question.answer()
    assert service.workers()["seen"]["status"] == "idle"
    eventually_now(lambda: service.workers()["seen"]["status"] == "offline")


def test_a_poll_that_is_open_is_a_sign_of_life(service: Service) -> None:
    worker = service.register("patient")
    seen = []
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(worker.claim, 4)
        while not poll.done():
            seen.append(service.workers()["patient"]["status"])
    assert set(seen) == {"idle"}


def test_a_task_is_not_given_to_a_connection_that_nobody_reads(service: Service) -> None:
    gone = service.register("gone")
    place = urlsplit(service.address)
    with socket.create_connection((place.hostname, place.port)) as connection:
        request = f"POST /v1/workers/{gone.id}/claim?wait=60 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}"
        connection.sendall(f"{request}\r\nContent-Length: 0\r\n\r\n".encode())
        heard = service.workers()["gone"]["heartbeat_at"]
        eventually_now(lambda: service.workers()["gone"]["heartbeat_at"] > heard, what="the poll is open")
    eventually_now(lambda: service.workers()["gone"]["status"] == "offline")
    question, other = service.ask(), service.register("other")
    task = other.one()
    assert task["attempt"] == 1
    other.complete(task)
    assert question.findings()["state"] == "found"


def test_a_task_whose_worker_falls_silent_goes_to_another_and_the_late_answer_changes_nothing(
    service: Service,
) -> None:
    silent, question = service.register("silent"), service.ask()
    lost = silent.one()
    other = service.register("other")
    (task,) = other.claim()
    assert (task["id"], task["attempt"]) == (lost["id"], 2)
    assert task["fencing_token"] > lost["fencing_token"]
    late = silent.complete(lost, "too late", cost={"amount_minor": 7, "currency": "SGD"})
    assert (late.status, late.code) == (409, "superseded")
    assert silent.complete(lost, "too late").code == "superseded"
    assert silent.heartbeat(lost).code == "superseded"
    assert silent.fail(lost, code="broken").code == "superseded"
    assert other.complete(task, "in time").status == 200
    assert question.findings()["value"] == {"summary": "in time"}
    kept = [body for body in service.receipts("task.late-answer") if body["task"] == lost["id"]]
    assert len(kept) == 1, "kept once"
    assert kept[0]["answered_under"] == lost["fencing_token"]
    assert kept[0]["answer"]["result"] == {"summary": "too late"}
    assert kept[0]["answer"]["cost"] == {"amount_minor": 7, "currency": "SGD"}


def test_heartbeats_keep_a_task_beyond_its_lease(service: Service) -> None:
    worker, question = service.register("steady"), service.ask()
    task = worker.one()
    envious = service.register("envious")
    first = until = datetime.fromisoformat(worker.heartbeat(task).json["lease_expires_at"])
    while until - first < timedelta(milliseconds=LEASE_MS + 500):
        assert envious.claim(0) == []
        until = datetime.fromisoformat(worker.heartbeat(task, "still here").json["lease_expires_at"])
    assert worker.complete(task).status == 200
    assert question.findings()["state"] == "found"


def test_a_token_that_was_never_given_out_is_refused_and_leaves_no_trace(service: Service) -> None:
    worker, question = service.register(), service.ask()
    task = worker.one()
    for token in (0, 2, 2**53 - 1):
        assert worker.complete(task | {"fencing_token": token}, "forged").code == "superseded"
    assert [body for body in service.receipts("task.late-answer") if body["task"] == task["id"]] == []
    worker.complete(task, "true")
    assert question.findings()["value"] == {"summary": "true"}


def test_the_same_report_again_is_answered_like_the_first(service: Service) -> None:
    worker, question = service.register(), service.ask()
    task = worker.one()
    replies = [worker.complete(task) for _ in range(3)]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    question.answer()
    ended = [body for body in service.receipts("task.completed") if body["task"] == task["id"]]
    assert len(ended) == 1


def test_what_a_worker_could_not_do_is_typed_evidence(service: Service) -> None:
    worker, question = service.register(), service.ask()
    worker.fail(worker.one(), code="site-unreachable", message="no answer")
    findings = question.findings()
    assert (findings["state"], findings["error"]) == (
        "failed",
        {"code": "site-unreachable", "message": "no answer"},
    )
    assert question.answer()["status"] == "unresolved"


def test_no_result_is_absence(service: Service) -> None:
    worker, question = service.register(), service.ask()
    worker.complete(worker.one(), result=None)
    assert question.findings()["state"] == "absent"


@pytest.mark.parametrize(
    ("result", "pointer"),
    [({"summary": 7}, "/result/summary"), ({}, "/result/summary"), (7, "/result"), ([], "/result")],
)
def test_a_result_of_another_type_is_refused_where_it_is_wrong_and_may_be_corrected(
    service: Service, result: object, pointer: str
) -> None:
    worker, question = service.register(), service.ask()
    task = worker.one()
    refused = worker.complete(task, result=result)
    assert (refused.status, refused.code) == (400, "malformed-request")
    assert [error["pointer"] for error in refused.json["errors"]] == [pointer]
    assert service.workers()["w1"]["capacity"]["current"] == 1, "the task is still its worker's"
    assert worker.complete(task, "corrected").status == 200
    findings = question.findings()
    assert (findings["state"], findings["value"]) == ("found", {"summary": "corrected"})
    told = [body for kind in ("completed", "late-answer") for body in service.receipts(f"task.{kind}")]
    assert sum(body["task"] == task["id"] for body in told) == 1, "what was refused left no trace"


def test_a_result_that_is_wrong_and_too_late_is_kept_all_the_same(service: Service) -> None:
    silent, question = service.register("silent"), service.ask()
    lost = silent.one()
    other = service.register("other")
    task = other.one()
    late = silent.complete(lost, result={"summary": 7}, cost={"amount_minor": 7, "currency": "SGD"})
    assert (late.status, late.code) == (409, "superseded")
    assert other.complete(task).status == 200
    assert other.complete(task, result={"summary": 7}).code == "superseded"
    assert question.findings()["state"] == "found"
    kept = [body for body in service.receipts("task.late-answer") if body["task"] == task["id"]]
    assert [body["answered_under"] for body in kept] == [lost["fencing_token"], task["fencing_token"]]
    assert kept[0]["answer"]["cost"] == {"amount_minor": 7, "currency": "SGD"}


def test_another_process_under_the_same_name_takes_over_at_once(service: Service) -> None:
    old, question = service.register("phoenix", incarnation="1"), service.ask()
    lost = old.one()
    new = service.register("phoenix", incarnation="2")
    assert new.id == old.id
    (task,) = new.claim(0, incarnation="2")
    assert (task["id"], task["attempt"]) == (lost["id"], 2)
    assert old.heartbeat(lost).code == "superseded"
    assert old.polled(0, incarnation="1").code == "superseded"
    new.complete(task)
    assert question.findings()["state"] == "found"


def test_registering_again_as_the_same_process_takes_nothing_away(service: Service) -> None:
    worker, question = service.register("same", incarnation="1"), service.ask()
    task = worker.one()
    service.register("same", incarnation="1", max_tasks=5)
    assert worker.complete(task).status == 200
    assert question.findings()["state"] == "found"


def test_a_task_that_kills_every_worker_fails_after_its_last_attempt(service: Service) -> None:
    question = service.ask()
    for attempt in (1, 2, 3):
        worker = service.register("doomed", incarnation=str(attempt))
        assert worker.one()["attempt"] == attempt
    service.register("doomed", incarnation="4")
    findings = question.findings()
    assert (findings["state"], findings["error"]["code"]) == ("failed", "worker-lost")
    assert findings["attempts"] == 3


def test_the_evidence_says_how_often_its_task_was_begun(service: Service) -> None:
    question = service.ask()
    for attempt in (1, 2):
        worker = service.register("clumsy", incarnation=str(attempt))
        task = worker.one()
    worker.complete(task)
    assert question.findings()["attempts"] == 2


def test_tasks_that_were_asked_for_again_count_together(service: Service) -> None:
    question = service.ask(type="repeated-question")
    for attempt in (1, 2):
        worker = service.register("clumsy", incarnation=str(attempt))
        task = worker.one()
    assert worker.fail(task, retryable=True).status == 200
    again = worker.one()
    assert (again["id"] != task["id"], again["attempt"]) == (True, 1)
    worker.complete(again)
    assert question.findings()["attempts"] == 3


def test_what_no_worker_began_was_attempted_by_nobody(service: Service) -> None:
    findings = service.ask(type="short-question").findings()
    assert (findings["state"], findings["attempts"]) == ("timed_out", 0)


def test_a_draining_worker_gets_nothing_new_and_hands_back_what_it_has_left(service: Service) -> None:
    worker = service.register("leaving")
    first, second = service.ask("first"), service.ask("second")
    tasks = {}
    while len(tasks) < 2:
        tasks |= {task["request"]["input"]["topic"]: task for task in worker.claim()}
    third = service.ask("third")
    drained = worker.drain(1_000).json
    assert (drained["draining"], drained["capacity"]) == (True, {"current": 2, "max": 3, "available": 0})
    poll = worker.polled(20).json
    assert (poll["tasks"], poll["draining"]) == ([], True)
    assert worker.complete(tasks["first"]).status == 200
    beat = worker.heartbeat(tasks["second"]).json
    assert beat["draining"]
    assert beat["lease_expires_at"] <= drained["drain_until"], "no heartbeat goes beyond the drain"
    other = service.register("staying")
    left: dict[str, Any] = {}
    while len(left) < 2:
        left |= {task["request"]["input"]["topic"]: task for task in other.claim()}
    assert left["second"]["id"] == tasks["second"]["id"]
    assert [other.complete(task).status for task in left.values()] == [200, 200]
    for question in (first, second, third):
        assert question.findings()["state"] == "found"


def test_a_poll_that_waits_ends_when_its_worker_drains_or_registers_again(service: Service) -> None:
    worker = service.register("waiting")
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(worker.polled, 60)
        eventually_now(lambda: service.workers()["waiting"]["status"] == "idle")
        worker.drain(1_000)
        assert poll.result(10).json["draining"]
    assert service.register("waiting").polled(0).json["draining"] is False


def test_a_reading_out_of_time_is_given_up_and_its_worker_hears_of_it(service: Service) -> None:
    worker, question = service.register(), service.ask(type="short-question")
    task = worker.one()
    findings = question.findings()
    assert (findings["state"], findings["attempts"]) == ("timed_out", 1)
    assert worker.heartbeat(task).code == "superseded"
    late = worker.complete(task, "late", cost={"amount_minor": 5, "currency": "SGD"})
    assert late.code == "superseded"
    assert [body for body in service.receipts("task.late-answer") if body["task"] == task["id"]]
    assert service.workers()["w1"]["capacity"]["current"] == 0


def test_a_cancelled_decision_gives_up_its_tasks(service: Service) -> None:
    worker, question = service.register(), service.ask()
    task = worker.one()
    (decision,) = service.client.get("/v1/decisions?status=running").json["items"]
    service.client.call("POST", f"/v1/decisions/{decision['id']}/cancel", {})
    assert question.answer()["status"] == "cancelled"
    assert worker.heartbeat(task).json["state"] == "cancelled"


def test_a_pinned_task_goes_to_its_worker_alone(service: Service) -> None:
    chosen, other = service.register("chosen"), service.register("other")
    question = service.ask(type="pinned-question", worker="chosen")
    eventually_now(lambda: service.receipts("task.waiting")[-1].get("pinned") == "chosen")
    assert other.claim(0) == []
    task = chosen.one()
    chosen.complete(task)
    assert question.findings()["state"] == "found"


def test_a_pinned_worker_at_capacity_is_refused_with_the_counts(service: Service) -> None:
    chosen = service.register("full", max_tasks=1)
    first = service.ask(type="pinned-question", worker="full")
    task = chosen.one()
    refused = service.ask(type="pinned-question", worker="full").findings()
    assert refused["state"] == "failed"
    assert refused["error"]["code"] == "worker-at-capacity"
    assert "1 of 1 tasks in progress" in refused["error"]["message"]
    chosen.complete(task)
    assert first.findings()["state"] == "found"


def test_a_pinned_task_that_may_fall_back_is_offered_to_any_capable_worker(service: Service) -> None:
    chosen, other = service.register("busy", max_tasks=1), service.register("free")
    first = service.ask(type="preferred-question", worker="busy")
    mine = chosen.one()
    second = service.ask(type="preferred-question", worker="busy")
    theirs = other.one()
    for worker, task in ((chosen, mine), (other, theirs)):
        assert worker.complete(task).status == 200
    assert [question.findings()["state"] for question in (first, second)] == ["found", "found"]


@pytest.mark.parametrize(
    ("worker", "code"),
    [("nobody", "worker-unknown"), ("gone", "worker-offline"), ("seer", "worker-incapable")],
)
def test_a_task_pinned_to_a_worker_that_cannot_have_it_fails_at_once(
    service: Service, worker: str, code: str
) -> None:
    service.register("gone").drain(0)
    service.register("seer", capabilities=["forecasting"])
    findings = service.ask(type="pinned-question", worker=worker).findings()
    assert (findings["state"], findings["error"]["code"]) == ("failed", code)


def test_workers_need_the_scope_work_and_see_their_own_tenant_alone(
    service: Service, make_client: Any
) -> None:
    worker, question = service.register(), service.ask()
    task = worker.one()
    decider, stranger = make_client("first", "decide"), make_client("second")
    body = {"name": "x", "capabilities": ["research"]}
    assert decider.call("POST", "/v1/workers", body).code == "missing-scope"
    assert decider.get("/v1/workers").status == 200
    foreign = ByHand(stranger, worker.id, worker.registered)
    assert foreign.polled(0).code == "not-found"
    assert foreign.complete(task, "forged").code == "not-found"
    assert foreign.drain(0).code == "not-found"
    absent = stranger.call("POST", f"/v1/tasks/{worker.id}/complete", {"fencing_token": 1, "result": {}})
    assert absent.json == foreign.complete(task, "forged").json
    assert stranger.get("/v1/workers").json["items"] == []
    worker.complete(task)
    assert question.findings()["value"] == {"summary": "buzz"}


@pytest.fixture(scope="module")
def make_client(service: Service) -> Any:
    import asyncio

    from tests.api.serving import tenant

    def make(name: str, *scopes: str) -> Client:
        return Client(service.address, asyncio.run(tenant(service.url, name, *scopes))[1])

    return make
