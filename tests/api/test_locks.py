"""`/v1/locks` over real HTTP, and `coordinator locks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Running
from tests.api.serving import Client, new_key
from tests.support.demo import as_json, coordinator_here
from tests.support.waiting import eventually_now


def locks(client: Client) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get("/v1/locks").json["items"]
    return items


@pytest.fixture
def holder(client: Client, tmp_path: Path) -> Iterator[str]:
    """The id of a decision that holds two locks until the test has ended."""
    gate = tmp_path / "gate"
    body = {"type": "timetable", "input": {"site": "sg-1", "hours": 1, "gate": str(gate)}}
    key = new_key()
    id: str = client.decide(body, key=key, prefer="respond-async").json["id"]
    eventually_now(lambda: len(locks(client)) == 2)
    yield id
    gate.touch()
    eventually_now(lambda: locks(client) == [])
    assert client.decide(body, key=key).json["status"] == "declined"


def test_locks_that_are_held_are_listed_by_name_with_their_decision(client: Client, holder: str) -> None:
    first, second = locks(client)
    assert [first["name"], second["name"]] == ["region/sg-1", "timetable"]
    for lock in (first, second):
        assert (lock["decision"], lock["decision_type"]) == (holder, "timetable")
        assert lock["fencing_token"] >= 1
        assert lock["since"] < lock["expires"]


def test_another_tenants_locks_are_not_listed(stranger: Client, holder: str) -> None:
    assert locks(stranger) == []


def test_locks_come_in_pages(client: Client, holder: str) -> None:
    first = client.get("/v1/locks?limit=1").json
    assert [lock["name"] for lock in first["items"]] == ["region/sg-1"]
    rest = client.get(f"/v1/locks?limit=1&cursor={first['next_cursor']}").json
    assert [lock["name"] for lock in rest["items"]] == ["timetable"]
    assert rest["next_cursor"] is None
    assert client.get(f"/v1/operations?cursor={first['next_cursor']}").code == "malformed-request"


def test_the_command_line_shows_them(running: Running, holder: str) -> None:
    env = {"COORDINATOR_URL": running.address, "COORDINATOR_KEY": running.client.key or ""}
    shown = coordinator_here("locks", env=env)
    assert shown.returncode == 0, shown
    assert "timetable" in shown.stdout
    listed = as_json(coordinator_here("locks", "--json", env=env))
    assert [lock["decision"] for lock in listed["items"]] == [holder, holder]


def test_a_request_that_names_no_lock_is_refused_with_the_place_in_it(client: Client) -> None:
    answer = client.decide({"type": "timetable", "input": {"site": "", "hours": 1}})
    assert (answer.status, answer.code) == (400, "malformed-request")
    assert answer.json["errors"][0]["pointer"] == "/input/site"
