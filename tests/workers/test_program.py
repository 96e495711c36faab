"""`coordinator worker --exec`: a program per task, its streams, its end, its children."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.demo import lives
from tests.support.waiting import eventually_now
from tests.workers.asking import ByHand, Question, Service
from tests.workers.processes import ended, program_worker

ANSWER = """echo '{"summary": "done"}'"""


@pytest.fixture(autouse=True)
def drained(service: Service) -> Iterator[None]:
    """Nobody of another test takes anything."""
    yield
    for worker in service.workers().values():
        service.client.call("POST", f"/v1/workers/{worker['id']}/drain", {"limit_ms": 0})


class Running:
    """A worker that runs ``command``, and what its programs leave in the folder."""

    def __init__(
        self, service: Service, command: str, folder: Path, *options: str, max_tasks: int = 1
    ) -> None:
        self.folder = folder
        self.process = program_worker(service, command, folder / "logs", *options, max_tasks=max_tasks)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        ended(self.process)
        assert self.process.stderr is not None
        sys.stderr.write(self.process.stderr.read())  # pytest shows it if the test failed
        self.process.stderr.close()

    def log(self) -> str:
        """Of the one task there was."""
        (path,) = (self.folder / "logs").glob("*.log")
        assert path.stat().st_mode & 0o077 == 0, "for its owner alone"
        return path.read_text()

    def pids(self, name: str = "pids", count: int = 1) -> list[int]:
        """That programs wrote down."""
        path = self.folder / name
        eventually_now(lambda: path.exists() and len(path.read_text().split()) >= count, 20)
        return [int(pid) for pid in path.read_text().split()]


def test_a_program_gets_the_request_says_what_it_does_and_gives_the_result(
    service: Service, tmp_path: Path
) -> None:
    told = tmp_path / "told.json"
    command = f"""
        cat > {told}
        env > {tmp_path / "env"}
        echo "looking into it" >&2
        echo "found something" >&2
        echo '{{"summary": "bees dance"}}'
    """
    question = service.ask("bees")
    with Running(service, command, tmp_path) as running:
        findings = question.findings()
    assert (findings["state"], findings["value"]) == ("found", {"summary": "bees dance"})
    assert json.loads(told.read_text()) == {"input": {"topic": "bees"}, "evidence": {}, "record": None}
    assert running.log() == "looking into it\nfound something\n-- ended with exit status 0\n"
    environment = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    assert environment["COORDINATOR_ATTEMPT"] == "1"
    assert environment["TRACEPARENT"].startswith("00-")
    assert service.key not in (tmp_path / "env").read_text(), "the key is the worker's own"


def test_lines_on_stderr_reach_those_who_follow_the_decision(service: Service, tmp_path: Path) -> None:
    question = service.ask()
    (decision,) = eventually_now(lambda: service.client.get("/v1/decisions?status=running").json["items"])
    with ThreadPoolExecutor() as pool, Running(service, f"echo one >&2; echo two >&2; {ANSWER}", tmp_path):
        followed = pool.submit(progress, service, decision["id"])
        assert question.findings()["state"] == "found"
        assert followed.result(20) == ["one", "two"]


def progress(service: Service, decision: str) -> list[str]:
    """What a decision's workers say, followed to its end."""
    text = service.client.get(f"/v1/decisions/{decision}/events").body.decode()
    data = [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]
    return [line for event in data if isinstance(event, dict) for line in event.get("lines", ())]


@pytest.mark.parametrize(
    ("command", "state", "code", "message"),
    [
        ("echo null", "absent", None, ""),
        ("exit 3", "absent", None, ""),
        ("echo 'no route' >&2; exit 75", "failed", "temporary-failure", "no route"),
        ("echo 'bad luck' >&2; exit 1", "failed", "program-failed", "exit status 1: bad luck"),
        ("kill -9 $$", "failed", "program-killed", "SIGKILL"),
        ("/nowhere/at/all", "failed", "program-unusable", "not found"),
        ("echo '{'", "failed", "malformed-result", "JSON"),
        ("echo '{\"summary\": 7}'", "failed", "malformed-result", "/result/summary"),
        ('echo \'{"summary": "a", "summary": "b"}\'', "failed", "malformed-result", "summary"),
        ("yes | head -c 5000000", "failed", "result-too-large", "bytes"),
        ("""printf '{"summary": "%300000s"}' x""", "failed", "result-too-large", "bytes"),
    ],
)
def test_how_a_program_ends_is_typed_evidence(
    service: Service, tmp_path: Path, command: str, state: str, code: str | None, message: str
) -> None:
    question = service.ask()
    with Running(service, command, tmp_path):
        findings = question.findings()
    assert findings["state"] == state
    assert (findings["error"] or {"code": None})["code"] == code
    assert message in (findings["error"] or {"message": ""})["message"]


def test_an_envelope_says_more_of_the_result(service: Service, tmp_path: Path) -> None:
    envelope = {"result": {"summary": "x"}, "revision": "r7", "cost": {"amount_minor": 40, "currency": "SGD"}}
    question = service.ask()
    with Running(service, f"echo '{json.dumps(envelope)}'", tmp_path, "--envelope"):
        findings = question.findings()
    assert (findings["revision"], findings["cost"]) == ("r7", envelope["cost"])


def test_a_program_past_its_deadline_is_killed_with_its_children(service: Service, tmp_path: Path) -> None:
    command = f"""
        trap 'echo asked to end >&2' TERM
        sh -c 'trap "" TERM; echo $$ >> {tmp_path}/pids; while :; do sleep 0.1; done' &
        echo $$ >> {tmp_path}/pids
        while :; do sleep 0.1; done
    """
    with Running(service, command, tmp_path, "--kill-after", "0.3") as running:
        eventually_now(lambda: service.workers().get("programs", {}).get("draining") is False, 20)
        question = service.ask(type="short-question")
        pids = running.pids(count=2)
        assert question.findings()["state"] in ("timed_out", "failed")
        eventually_now(lambda: not any(map(lives, pids)))
        eventually_now(lambda: "ended with" in running.log())
        assert "asked to end" in running.log()


def test_what_a_program_leaves_running_ends_with_it(service: Service, tmp_path: Path) -> None:
    command = f"sleep 1000 & echo $! > {tmp_path}/pids; {ANSWER}"
    question = service.ask()
    with Running(service, command, tmp_path) as running:
        assert question.findings()["state"] == "found"
        (pid,) = running.pids()
        assert not lives(pid)


def test_a_program_that_leaves_a_daemon_behind_has_ended_all_the_same(
    service: Service, tmp_path: Path
) -> None:
    written = f"{tmp_path}/pids"  # by the daemon itself, once it is in a session of its own
    command = f"""
        setsid sh -c 'echo $$ > {written}; exec sleep 1000' &
        until [ -s {written} ]; do sleep 0.01; done; {ANSWER}
    """
    question = service.ask()
    with Running(service, command, tmp_path) as running:
        assert question.findings()["state"] == "found"
        (pid,) = running.pids()
    os.kill(pid, signal.SIGKILL)


def test_a_cancelled_decision_kills_the_program(service: Service, tmp_path: Path) -> None:
    question = service.ask()
    command = f"echo $$ > {tmp_path}/pids; sleep 1000"
    with Running(service, command, tmp_path) as running:
        (pid,) = running.pids()
        (decision,) = service.client.get("/v1/decisions?status=running").json["items"]
        service.client.call("POST", f"/v1/decisions/{decision['id']}/cancel", {})
        assert question.answer()["status"] == "cancelled"
        eventually_now(lambda: not lives(pid), what="the next heartbeat tells the worker")


def test_programs_of_a_killed_worker_do_not_outlive_it(service: Service, tmp_path: Path) -> None:
    question = service.ask()
    command = f"""sh -c 'trap "" TERM; echo $$ >> {tmp_path}/pids; sleep 1000' & echo $$ >> {tmp_path}/pids; sleep 1000"""
    with Running(service, command, tmp_path) as running:
        pids = running.pids(count=2)
        running.process.kill()
        eventually_now(lambda: not any(map(lives, pids)))
    worker = service.register("heir")
    assert worker.complete(worker.one()).status == 200
    assert question.findings()["state"] == "found"


def test_no_more_programs_run_at_once_than_the_worker_may(service: Service, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    command = f"echo $$ >> {tmp_path}/pids; until [ -e {gate} ]; do sleep 0.05; done; {ANSWER}"
    questions = [service.ask() for _ in range(5)]
    with Running(service, command, tmp_path, max_tasks=2) as running:
        assert len(running.pids(count=2)) == 2
        assert service.workers()["programs"]["capacity"] == {"current": 2, "max": 2, "available": 0}
        assert sum(map(lives, running.pids())) == 2
        gate.touch()
        assert [question.findings()["state"] for question in questions] == ["found"] * 5
    assert len(running.pids(count=5)) == 5


def test_a_worker_that_is_told_to_stop_lets_its_programs_finish(service: Service, tmp_path: Path) -> None:
    gate, question = tmp_path / "open", service.ask()
    command = f"echo $$ > {tmp_path}/pids; until [ -e {gate} ]; do sleep 0.05; done; {ANSWER}"
    with Running(service, command, tmp_path) as running:
        running.pids()
        running.process.terminate()
        eventually_now(lambda: service.workers()["programs"]["draining"])
        gate.touch()
        assert running.process.wait(20) == 0
    assert question.findings()["state"] == "found"


def test_a_second_signal_stops_the_programs_and_their_tasks_go_to_others(
    service: Service, tmp_path: Path
) -> None:
    question: Question = service.ask()
    with Running(service, f"echo $$ > {tmp_path}/pids; sleep 1000", tmp_path, "--drain", "60") as running:
        (pid,) = running.pids()
        running.process.terminate()
        eventually_now(lambda: service.workers()["programs"]["draining"])
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert not lives(pid)
    other: ByHand = service.register("other")
    assert other.complete(other.one()).status == 200
    assert question.findings()["state"] == "found"


def test_a_key_that_may_not_work_is_told_at_once(service: Service, tmp_path: Path) -> None:
    refused = Service(service.url, service.address, type(service.client)(service.address, "ck_nobody"), 0)
    process = program_worker(refused, "true", tmp_path)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "unauthenticated" in said
