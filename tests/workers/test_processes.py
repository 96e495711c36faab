"""Real workers that are killed, stopped and blocked: every task is answered once, capacity is never exceeded, no late write counts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.support.postgres import Databases, with_database
from tests.support.waiting import eventually_now
from tests.workers.asking import LEASE_MS, Service, serving
from tests.workers.processes import Researcher, ended, researchers

IN_PROGRESS = """
SELECT w.name, count(*) FROM tasks t JOIN workers w ON w.id = t.worker_id WHERE t.state = 'in_progress' GROUP BY w.name
"""
TASKS = "SELECT id::text, state, fencing_token, attempts, convert_from(answer::text::bytea, 'UTF8') AS answer FROM tasks"


@pytest.fixture
def service(postgres: Databases) -> Iterator[Service]:
    """A server for one test alone."""
    with serving(postgres) as made:
        yield made


def rows(postgres: Databases, service: Service, query: str) -> list[asyncpg.Record]:
    """As a superuser, whom no row-level security holds back."""

    async def fetch() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(root_url(postgres, service))
        try:
            return list(await connection.fetch(query))
        finally:
            await connection.close()

    return asyncio.run(fetch())


def root_url(postgres: Databases, service: Service) -> str:
    return with_database(postgres.superuser_url, urlsplit(service.url).path[1:])


@contextmanager
def sampled(postgres: Databases, service: Service) -> Iterator[dict[str, list[int]]]:
    """How many tasks each worker has in progress, at as many instants as can be looked at meanwhile."""
    seen: dict[str, list[int]] = {}
    over = threading.Event()

    async def sample() -> None:
        connection = await asyncpg.connect(root_url(postgres, service))
        try:
            while not over.is_set():
                for name, count in await connection.fetch(IN_PROGRESS):
                    seen.setdefault(name, []).append(count)
        finally:
            await connection.close()

    thread = threading.Thread(target=lambda: asyncio.run(sample()))
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_one_worker_killed_and_one_stopped_past_its_lease_among_three(
    service: Service, postgres: Databases, tmp_path: Path
) -> None:
    names = ["killed", "stopped", "steady"]
    with researchers(service, names, 3, tmp_path) as workers, sampled(postgres, service) as seen:
        killed, stopped, steady = workers
        eventually_now(lambda: set(service.workers()) == set(names), 20)
        questions = [service.ask(str(n)) for n in range(40)]
        eventually_now(lambda: all(len(worker.began()) == 3 for worker in workers), 20)
        lost = {(id, token) for id, token, _ in stopped.began()}
        stopped.signal(signal.SIGSTOP)
        killed.signal(signal.SIGKILL)
        steady.open()
        taken_back = {(id, token) for worker in (killed, stopped) for id, token, _ in worker.began()}
        eventually_now(
            lambda: (
                taken_back
                <= {(body["task"], body["fencing_token"]) for body in service.receipts("task.requeued")}
            ),
            20,
            what="what they had is taken from them",
        )
        stopped.open()
        stopped.signal(signal.SIGCONT)
        answers = [question.answer() for question in questions]
        late = eventually_now(
            lambda: len(service.receipts("task.late-answer")) >= 3 and service.receipts("task.late-answer"),
            20,
        )
    assert all(answer["status"] == "committed" for answer in answers)
    assert sorted(int(answer["outcome"]["terms"]["topic"]) for answer in answers) == list(range(40))
    tasks = rows(postgres, service, TASKS)
    assert [task["state"] for task in tasks] == ["completed"] * 40
    assert {(body["task"], body["answered_under"]) for body in late} == lost
    by = {task["id"]: task for task in tasks}
    for id, token in lost:
        assert by[id]["fencing_token"] > token
        assert f"stopped {token}" not in by[id]["answer"], "no late write was accepted"
    assert len(service.receipts("task.completed")) == 40, "every task was answered once"
    assert {name: max(counts) for name, counts in seen.items()} == {"killed": 3, "stopped": 3, "steady": 3}
    for worker in workers:
        assert max(at_once for _, _, at_once in worker.began()) <= 3, "nor does the process itself do more"


def test_a_worker_started_again_under_its_name_gets_its_old_tasks_back_at_once(
    service: Service, tmp_path: Path
) -> None:
    first = Researcher(service, "phoenix", 3, tmp_path)
    try:
        questions = [service.ask(str(n)) for n in range(3)]
        eventually_now(lambda: len(first.began()) == 3, 20)
    finally:
        ended(first.process)
    first.open()
    second = Researcher(service, "phoenix", 3, tmp_path)
    try:
        answers = [question.findings() for question in questions]
    finally:
        ended(second.process)
    assert [answer["value"]["summary"] for answer in answers] == ["phoenix 2"] * 3
    assert {body["reason"] for body in service.receipts("task.requeued")} <= {
        "its worker was started anew",
        "its lease ran out",
    }


@contextmanager
def saturated() -> Iterator[None]:
    """Every processor has something else to do, too."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for burner in burners:
            ended(burner)


def test_a_worker_whose_loop_is_blocked_on_saturated_processors_is_not_judged_dead(
    service: Service, tmp_path: Path
) -> None:
    worker = Researcher(service, "blocked", 1, tmp_path, kind="blocking")
    try:
        question = service.ask()
        eventually_now(worker.began, 20)
        with saturated():
            since = until = heard_of(service)
            while until - since < timedelta(milliseconds=3 * LEASE_MS):
                until = heard_of(service)
        worker.open()
        assert question.findings()["value"] == {"summary": "blocked"}
    finally:
        ended(worker.process)
    assert service.receipts("task.requeued") == []


def heard_of(service: Service) -> datetime:
    shown = service.workers()["blocked"]
    assert shown["status"] == "busy"
    return datetime.fromisoformat(shown["heartbeat_at"])


def test_a_worker_that_is_told_to_stop_finishes_what_it_has_and_takes_nothing_new(
    service: Service, tmp_path: Path
) -> None:
    worker = Researcher(service, "leaving", 2, tmp_path)
    try:
        begun = [service.ask("a"), service.ask("b")]
        eventually_now(lambda: len(worker.began()) == 2, 20)
        worker.signal(signal.SIGTERM)
        eventually_now(lambda: service.workers()["leaving"]["draining"])
        later = service.ask("c")
        worker.open()
        assert worker.process.wait(20) == 0
    finally:
        ended(worker.process)
    assert [question.findings()["state"] for question in begun] == ["found", "found"]
    assert not later.answered
    assert len(worker.began()) == 2
    (task,) = service.register("other").claim()
    assert task["attempt"] == 1
