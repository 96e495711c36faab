"""Sessions over real HTTP: what one caller asked for under one name is cancelled together, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Running
from tests.api.serving import Client, Reply, new_key, quote


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Holds every reading of the test back until it has ended."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def ask(client: Client, gate: Path, *sessions: str) -> Reply:
    headers = [
        ("Idempotency-Key", new_key()),
        ("Content-Type", "application/json"),
        ("Prefer", "respond-async"),
    ]
    named = [("Coordinator-Session", session) for session in sessions]
    return client.call("POST", "/v1/decisions", quote(gate=str(gate)), [*headers, *named])


def started(client: Client, gate: Path, *sessions: str) -> str:
    answer = ask(client, gate, *sessions)
    assert answer.status == 202, answer.body
    id: str = answer.json["id"]
    return id


def status(client: Client, id: str) -> str:
    found: str = client.get(f"/v1/decisions/{id}").json["status"]
    return found


def test_the_unfinished_decisions_of_a_session_are_cancelled_together_and_no_others(
    running: Running, gate: Path
) -> None:
    client, stranger = running.client, running.stranger
    mine = [started(client, gate, "run/1") for _ in range(3)]
    others = [started(client, gate, "run/2"), started(client, gate)]
    foreign = started(stranger, gate, "run/1")
    answer = client.call("POST", "/v1/sessions/run%2F1/cancel")
    assert answer.status == 200, answer.body
    said = answer.json
    assert said["session"] == "run/1"
    assert [each["id"] for each in said["decisions"]] == sorted(mine)
    assert {(each["status"], each["stopped"]) for each in said["decisions"]} == {("cancelled", True)}
    assert {status(client, id) for id in mine} == {"cancelled"}
    assert {status(client, id) for id in others} == {"running"}
    assert status(stranger, foreign) == "running"


def test_a_session_that_is_over_or_another_tenants_or_nobodys_has_nothing_to_cancel(
    running: Running, gate: Path
) -> None:
    client = running.client
    started(running.stranger, gate, "theirs")
    started(client, gate, "over")
    client.call("POST", "/v1/sessions/over/cancel")
    for session in ("over", "theirs", "nobodys"):
        answer = client.call("POST", f"/v1/sessions/{session}/cancel")
        assert (answer.status, answer.json["decisions"]) == (200, [])


def test_a_session_is_kept_in_the_receipt_of_its_decisions(client: Client, gate: Path) -> None:
    id = started(client, gate, "agent-run-17")
    (first, *_) = client.get(f"/v1/receipts?decision={id}").json["items"]
    assert first["body"]["session"] == "agent-run-17"


@pytest.mark.parametrize("sessions", [("",), ("two words",), ("x" * 256,), ("a", "b")])
def test_a_session_that_is_no_name_is_refused(client: Client, gate: Path, sessions: tuple[str, ...]) -> None:
    assert ask(client, gate, *sessions).code == "malformed-request"


@pytest.mark.parametrize("session", ["x" * 256, "two%20words", "caf%C3%A9", "%FF", "a%00b", "line%0A"])
def test_a_session_that_can_have_no_decision_is_not_cancelled(client: Client, session: str) -> None:
    answer = client.call("POST", f"/v1/sessions/{session}/cancel")
    assert (answer.status, answer.code) == (400, "malformed-request")
    assert "255" in answer.json["detail"]


def test_only_a_key_that_may_decide_cancels_a_session(running: Running) -> None:
    assert running.with_scopes("audit").call("POST", "/v1/sessions/s/cancel").code == "missing-scope"
