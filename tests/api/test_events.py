"""`/v1/decisions/{id}/events` over real connections: what is sent, resumed, held back, broken off, and given back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.config import Settings
from tests.api.following import Stream, all_events, following
from tests.api.serving import Client, new_key, server, tenant
from tests.support.postgres import Databases
from tests.support.waiting import eventually_now

PATH = "tests.api.streams:coordinator"
SETTINGS = Settings(
    max_streams=3, stream_heartbeat_s=0.2, stream_stall_ms=3_000, stream_buffer=16, follow_ms=50,
    lease_ms=1_500, poll_ms=100, max_evidence_bytes=2**24,
)  # fmt: skip


@dataclass(frozen=True)
class Two:
    """Two servers on one database, and clients of each."""

    one: Client
    other: Client
    stranger: Client
    pids: tuple[int, int]

    def text(self, client: Client | None = None, **input: Any) -> str:
        """A decision that is under way; its id."""
        body = {"type": "text", "input": input}
        reply = (client or self.one).call(
            "POST", "/v1/decisions", body, [("Idempotency-Key", new_key()), ("Content-Type", "application/json"),
                                            ("Prefer", "respond-async")],
        )  # fmt: skip
        assert reply.status == 202
        id: str = reply.json["id"]
        return id

    def metric(self, name: str) -> float:
        lines = self.one.get("/metrics").body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def open_streams(self) -> float:
        return self.metric("coordinator_streams")


@contextmanager
def serving_two(postgres: Databases, *, code: int = 0) -> Iterator[Two]:
    """``code`` is what the first one ends with."""
    url = postgres.create()
    _, key = asyncio.run(tenant(url, "acme"))
    _, other_key = asyncio.run(tenant(url, "globex"))
    with (
        server(url, SETTINGS, path=PATH, code=code) as (one, pid),
        server(url, SETTINGS, path=PATH) as (other, other_pid),
    ):
        yield Two(Client(one, key), Client(other, key), Client(one, other_key), (pid, other_pid))
    postgres.drop(url)


@pytest.fixture
def two(postgres: Databases) -> Iterator[Two]:
    with serving_two(postgres) as made:
        yield made


def until(stream: Stream, kind: str) -> int:
    """Read up to an event of that kind; its id."""
    for frame in stream.events():
        if frame.event == kind:
            return int(frame.id)
    raise AssertionError(f"the stream ended before {kind}")


def test_events_come_as_they_happen_until_the_decision_rests(two: Two, tmp_path: Path) -> None:
    gate, then = tmp_path / "gate", tmp_path / "then"
    id = two.text(gate=str(gate), then=str(then))
    with following(two.one, id) as stream:
        assert stream.status == 200
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-store"
        seen = []
        for frame in stream.events():
            seen.append(frame.event)
            if frame.event == "running":
                gate.touch()
            if frame.event == "part" and json.loads(frame.data)["part"] == 2:
                then.touch()
        assert stream.whole
    assert [kind for kind in seen if kind != "stage"] == [
        *["queued", "running", "part", "part", "part", "evidence", "outcome", "fence", "rest", "decision"]
    ]
    whole = all_events(two.one, id)
    assert [kind for _, kind, _ in whole] == seen
    assert whole[-1][2] == two.one.get(f"/v1/decisions/{id}").json
    assert all_events(two.other, id) == whole
    assert all_events(two.other, id, whole[4][0]) == whole[5:]


def test_there_is_nothing_after_the_last_event(two: Two) -> None:
    id = two.text()
    last = all_events(two.one, id)[-1][0]
    with following(two.other, id, last) as stream:
        assert stream.status == 204


def test_a_silent_stream_sends_comments(two: Two, tmp_path: Path) -> None:
    id = two.text(gate=str(tmp_path / "gate"))
    with following(two.one, id) as stream:
        for frame in stream.events():
            if frame.event == "running":
                break
        chunks = stream.chunks()
        assert [next(chunks), next(chunks)] == [b":\n\n"] * 2
        (tmp_path / "gate").touch()


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 30])
def test_an_id_that_is_none_is_refused(two: Two, after: str) -> None:
    reply = two.one.call("GET", f"/v1/decisions/{two.text()}/events", headers=[("Last-Event-ID", after)])
    assert (reply.status, reply.code) == (400, "malformed-request")


def test_what_another_tenant_has_is_not_there(two: Two) -> None:
    there, absent = (
        two.stranger.get(f"/v1/decisions/{id}/events")
        for id in (two.text(), "0" * 8 + "-0000-7000-8000-" + "0" * 12)
    )
    assert there.status == absent.status == 404
    assert there.body == absent.body


def test_there_are_only_so_many_streams_and_who_goes_away_makes_room_at_once(
    two: Two, tmp_path: Path
) -> None:
    id = two.text(gate=str(tmp_path / "gate"))
    with following(two.one, id) as first, following(two.one, id) as second:
        with following(two.one, id) as third:
            assert [first.status, second.status, third.status] == [200] * 3
            refused = two.one.get(f"/v1/decisions/{id}/events")
            assert (refused.status, refused.code) == (503, "streams-full")
            assert refused.headers["retry-after"] == "1"

        def there_is_room() -> bool:
            with following(two.one, id) as again:
                return again.status == 200

        eventually_now(there_is_room, 1.0)
        (tmp_path / "gate").touch()
    eventually_now(lambda: two.open_streams() == 0)


def test_a_stream_goes_on_at_another_process_when_the_first_one_is_killed(
    postgres: Databases, tmp_path: Path
) -> None:
    gate, then = tmp_path / "gate", tmp_path / "then"
    with serving_two(postgres, code=-signal.SIGKILL) as two:
        id = two.text(gate=str(gate), then=str(then))
        with following(two.other, id) as elsewhere:
            with following(two.one, id) as stream:
                last = until(stream, "running")
                until(elsewhere, "running")  # it was written down for the other process
                os.kill(two.pids[0], signal.SIGKILL)
                assert list(stream.events()) == []
                assert not stream.whole
            gate.touch()
            then.touch()
            rest = all_events(two.other, id, last)
            assert [kind for _, kind, _ in rest if kind not in ("stage", "part")] == [
                *["running", "evidence", "outcome", "fence", "rest", "decision"]
            ]
            assert rest[0][0] > 1_000_000, "the numbers of the second holder"
            assert [int(frame.id) for frame in elsewhere.events()] == [number for number, _, _ in rest]


def test_a_client_that_does_not_read_holds_the_source_back_and_then_gets_everything(
    two: Two, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    parts, size = 1_500, 8_192
    id = two.text(gate=str(gate), parts=parts, size=size)
    before = psutil.Process(two.pids[0]).memory_info().rss
    with following(two.one, id, receive_buffer=4_096) as stream:
        until(stream, "running")
        gate.touch()
        held = stands_still(lambda: two.metric("coordinator_parts_total"))
        assert 0 < held < parts / 2, "the source waits"
        assert psutil.Process(two.pids[0]).memory_info().rss - before < 24 * 2**20
        numbers = [json.loads(frame.data)["part"] for frame in stream.events() if frame.event == "part"]
        assert numbers == list(range(parts))
        assert stream.whole


def stands_still(measure: Any) -> float:
    """A value that is above 0 and the same five times in a row."""
    seen = [0.0]

    def still() -> bool:
        seen.append(measure())
        return seen[-1] > 0 and len(set(seen[-5:])) == 1

    eventually_now(still, interval=0.05)
    return seen[-1]


def test_a_client_that_never_reads_is_broken_off_and_the_decision_rests(two: Two, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    parts = 1_500
    id = two.text(gate=str(gate), parts=parts, size=8_192)
    with following(two.one, id, receive_buffer=4_096) as stream:
        last = until(stream, "running")
        gate.touch()
        eventually_now(lambda: two.one.get(f"/v1/decisions/{id}").json["status"] == "committed", 20)
        eventually_now(lambda: two.open_streams() == 0)
        assert two.metric("coordinator_streams_cut_total") >= 1
        port = stream.socket.getsockname()[1]
        server_side = psutil.Process(two.pids[0])
        eventually_now(
            lambda: port not in [end.raddr.port for end in server_side.net_connections() if end.raddr]
        )
        numbers = [last, *(int(frame.id) for frame in stream.events())]
        assert not stream.whole
    again = all_events(two.other, id, numbers[-1])
    assert [data["part"] for _, kind, data in again if kind == "part"][-1] == parts - 1
    assert again[0][0] == numbers[-1] + 1, "nothing was lost"
