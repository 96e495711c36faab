"""`/v1/decisions` over real HTTP: the table of answers, row by row."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.app import ENDPOINTS
from coordinator.config import Settings
from coordinator.core.fairness import ClassLimits
from tests.api.conftest import Running
from tests.api.serving import Client, new_key, quote, rows, server, tenant
from tests.support.waiting import eventually_now

NUL = "\\u0000"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Opened at the end, so that no decision is left behind."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def count(running: Running) -> dict[str, int]:
    """Rows of each table, once nothing that an earlier test began moves them any more."""

    def at_rest() -> dict[str, int] | None:
        counted = asyncio.run(rows(running.url))
        return counted if counted == asyncio.run(rows(running.url)) else None

    return eventually_now(at_rest)


def test_a_decision_that_rests_is_a_201_and_is_shown_at_its_location(client: Client) -> None:
    made = client.decide(quote())
    assert made.status == 201
    assert made.json["status"] == "committed"
    shown = client.get(made.headers["location"])
    assert shown.status == 200
    assert {**shown.json, "operations": []} == {**made.json, "operations": []}
    assert made.headers["cache-control"] == shown.headers["cache-control"] == "no-store"
    assert made.headers["x-content-type-options"] == "nosniff"


def test_the_same_key_and_request_get_the_same_bytes(client: Client) -> None:
    key, body = new_key(), quote()
    first = client.decide(body, key=key)
    again = client.decide(body, key=f'"{key}"')
    assert (first.status, again.status) == (201, 200)
    assert again.body == first.body
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert again.headers["location"] == first.headers["location"]


def test_another_spelling_of_the_same_json_is_the_same_request(client: Client) -> None:
    key, body = new_key(), quote(hours=16)
    first = client.decide(body, key=key)
    turned = {name: body[name] for name in reversed(body)}
    spelled = json.dumps(turned, indent=3).replace(": 16", ": 1.6e1").encode()
    assert client.decide(spelled, key=key).body == first.body


def test_the_same_key_with_another_request_is_refused_and_changes_nothing(
    running: Running, client: Client
) -> None:
    key, body = new_key(), quote(hours=8)
    first = client.decide(body, key=key)
    eventually_now(
        lambda: client.get(first.headers["location"]).json["operations"][0]["state"] == "succeeded"
    )
    before = count(running)
    other = client.decide(quote(body["record"]["id"], hours=9), key=key)
    assert (other.status, other.code, other.json["retry"]) == (422, "idempotency-key-reused", "new-key")
    assert count(running) == before
    assert client.decide(body, key=key).body == first.body


def test_another_tenant_may_use_the_same_key(client: Client, stranger: Client) -> None:
    key = new_key()
    ours, theirs = client.decide(quote(), key=key), stranger.decide(quote(), key=key)
    assert (ours.status, theirs.status) == (201, 201)
    assert ours.json["id"] != theirs.json["id"]


def test_a_stale_version_is_refused_with_the_current_one_and_replayed_so(client: Client) -> None:
    record = new_key()
    client.decide(quote(record))
    body = quote(record)
    body["record"]["expected_version"] = 0
    key = new_key()
    refused = client.decide(body, key=key)
    assert (refused.status, refused.code, refused.json["retry"]) == (409, "stale-version", "new-key")
    assert refused.json["current_version"] == 1
    assert client.get(refused.headers["location"]).json["status"] == "conflicted"
    again = client.decide(body, key=key)
    assert (again.status, again.body) == (409, refused.body)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == refused.headers["location"]


def test_respond_async_is_a_202_and_the_decision_goes_on_without_a_caller(client: Client, gate: Path) -> None:
    key, body = new_key(), quote(gate=str(gate))
    pending = client.decide(body, key=key, prefer="respond-async")
    assert pending.status == 202
    assert pending.headers["preference-applied"] == "respond-async"
    assert pending.json["status"] == "running"
    assert pending.json["queue_position"] == 0
    assert pending.json["estimated_start_ms"] == 0
    gate.touch()
    shown = eventually_now(
        lambda: (got := client.get(pending.headers["location"])).json["status"] == "committed" and got
    )
    assert client.decide(body, key=key).json["id"] == shown.json["id"] == pending.json["id"]


def test_a_key_in_flight_is_a_409_after_the_wait_that_says_where_to_look(client: Client, gate: Path) -> None:
    key, body = new_key(), quote(gate=str(gate))
    first = client.decide(body, key=key, prefer="respond-async")
    second = client.decide(body, key=key, prefer="wait=0")
    assert (second.status, second.code, second.json["retry"]) == (409, "decision-in-flight", "same-key")
    assert second.headers["location"] == first.headers["location"]
    assert second.json["decision"] == first.json["id"]
    assert second.headers["retry-after"] == "1"


def test_a_caller_that_comes_while_it_runs_joins_and_gets_the_same_answer(client: Client, gate: Path) -> None:
    key, body = new_key(), quote(gate=str(gate))
    client.decide(body, key=key, prefer="respond-async")
    with ThreadPoolExecutor(4) as pool:
        joined = [pool.submit(client.decide, body, key=key, prefer="wait=20") for _ in range(4)]
        gate.touch()
        replies = [each.result() for each in joined]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1


def test_a_declined_decision_is_an_answer_not_an_error(client: Client) -> None:
    made = client.decide(quote(hours=41))
    assert (made.status, made.json["status"]) == (201, "declined")


GOOD = json.dumps(quote("never-made")).encode()
DEEP = b'{"type":"quote","input":' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe{}",
        GOOD.replace(b'"type"', b'"type":"quote","type"'),
        GOOD.replace(b"8", b"NaN"),
        GOOD.replace(b"8", b"Infinity"),
        GOOD.replace(b"8", b"1e400"),
        GOOD.replace(b"8", b"1e-30"),
        GOOD.replace(b"8", b"8.5"),
        GOOD.replace(b"8", b"9007199254740993"),
        GOOD.replace(b"8", b'"8"'),
        GOOD.replace(b"sg-1", NUL.encode()),
        GOOD.replace(b"sg-1", b"\\ud800"),
        GOOD.replace(b"never-made", NUL.encode()),
        GOOD.replace(b"never-made", b""),
        GOOD.replace(b"never-made", b"x" * 256),
        GOOD.replace(b'"hours"', b'"hour"'),
        GOOD.replace(b'"hours"', b'"extra":1,"hours"'),
        GOOD.replace(b'"input"', b'"extra":1,"input"'),
        GOOD.replace(b'"input"', b'"class":"platinum","input"'),
        GOOD.replace(b'"input"', b'"time_limit_ms":0,"input"'),
        GOOD.replace(b'"input"', b'"ceiling":{"amount_minor":9007199254740992,"currency":"SGD"},"input"'),
        GOOD.replace(b'"input"', b'"ceiling":{"amount_minor":1,"currency":"sgd"},"input"'),
        GOOD.replace(b'"input"', b'"ceiling":{"amount_minor":-1,"currency":"SGD"},"input"'),
        GOOD.replace(b'"kind": "quote"', b'"kind": "order"'),
        json.dumps({"type": "quote", "input": {"site": "sg-1", "hours": 1}}).encode(),
        DEEP,
        b"[" * 100_000,
        b'{"a":' * 40_000,
    ],
)
def test_a_hostile_body_is_a_400_stores_nothing_and_leaves_the_key_usable(
    running: Running, client: Client, body: bytes
) -> None:
    before, key = count(running), new_key()
    refused = client.decide(body, key=key)
    assert (refused.status, refused.code) == (400, "malformed-request")
    assert refused.json["errors"][0]["pointer"] is not None
    assert count(running) == before
    assert client.decide(quote(), key=key).status == 201


def test_errors_in_the_input_are_pointed_at(client: Client) -> None:
    refused = client.decide(quote() | {"input": {"site": 1, "hours": 8}})
    assert [error["pointer"] for error in refused.json["errors"]] == ["/input/site"]


def test_an_unknown_type_is_a_404_and_the_key_stays_usable(running: Running, client: Client) -> None:
    before, key = count(running), new_key()
    refused = client.decide(quote() | {"type": "no-such-type"}, key=key)
    assert (refused.status, refused.code) == (404, "unknown-decision-type")
    assert count(running) == before
    assert client.decide(quote(), key=key).status == 201


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_256_kib_is_a_413(running: Running, client: Client, chunked: bool) -> None:
    before = count(running)
    body = b'{"type":"' + b"x" * (256 * 1024) + b'"}'
    parts = (body[at : at + 16_384] for at in range(0, len(body), 16_384))
    refused = client.decide(parts if chunked else body)
    assert (refused.status, refused.code) == (413, "body-too-large")
    assert count(running) == before


def test_twenty_megabytes_are_refused_before_they_are_read(client: Client) -> None:
    headers = [
        ("Idempotency-Key", new_key()),
        ("Content-Length", str(20_000_000)),
        ("Expect", "100-continue"),
    ]
    refused = client.call("POST", "/v1/decisions", headers=headers)
    assert (refused.status, refused.code) == (413, "body-too-large")


def test_a_chunked_body_within_the_limit_is_read(client: Client) -> None:
    body = json.dumps(quote()).encode()
    assert client.decide(iter([body[:10], body[10:]])).status == 201


def test_a_body_that_is_not_json_is_a_415(client: Client) -> None:
    headers = [("Idempotency-Key", new_key()), ("Content-Type", "text/plain")]
    refused = client.call("POST", "/v1/decisions", quote(), headers)
    assert (refused.status, refused.code) == (415, "unsupported-media-type")


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ([], "idempotency-key-missing"),
        ([""], "idempotency-key-invalid"),
        (["a b"], "idempotency-key-invalid"),
        (["k" * 256], "idempotency-key-invalid"),
        (["same", "same"], "idempotency-key-invalid"),
    ],
)
def test_a_key_that_is_missing_or_invalid_is_a_400(
    running: Running, client: Client, keys: list[str], code: str
) -> None:
    before = count(running)
    refused = client.call("POST", "/v1/decisions", quote(), [("Idempotency-Key", key) for key in keys])
    assert (refused.status, refused.code) == (400, code)
    assert count(running) == before


def test_a_trace_is_continued(client: Client) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = [("Idempotency-Key", new_key()), ("traceparent", f"00-{trace}-00f067aa0ba902b7-01")]
    assert client.call("POST", "/v1/decisions", quote(), headers).json["trace_id"] == trace


def test_cancelling_says_what_was_stopped(client: Client, gate: Path) -> None:
    pending = client.decide(quote(gate=str(gate)), prefer="respond-async")
    cancelled = client.call("POST", pending.headers["location"] + "/cancel")
    assert (cancelled.status, cancelled.json["stopped"], cancelled.json["operations"]) == (200, True, [])
    assert client.get(pending.headers["location"]).json["status"] == "cancelled"


def test_cancelling_what_rests_says_what_had_happened(client: Client) -> None:
    made = client.decide(quote())
    cancelled = client.call("POST", made.headers["location"] + "/cancel")
    assert (cancelled.status, cancelled.json["stopped"], cancelled.json["status"]) == (
        200,
        False,
        "committed",
    )
    assert [operation["effect"] for operation in cancelled.json["operations"]] == ["send-quote"]


def test_lists_are_filtered(client: Client) -> None:
    record = new_key()
    made = client.decide(quote(record)).json["id"]
    declined = client.decide(quote(record, hours=41)).json["id"]

    def listed(query: str) -> list[str]:
        return [item["id"] for item in client.get(f"/v1/decisions?{query}").json["items"]]

    assert listed(f"record=quote/{record}") == [declined, made]
    assert listed(f"record=quote%2F{record}&status=declined") == [declined]
    assert listed(f"record=quote/{record}&type=quote&class=interactive") == [declined, made]
    assert listed(f"record=quote/{record}&class=bulk") == listed("type=other") == []


def test_pages_are_stable_while_decisions_are_added(client: Client) -> None:
    record = new_key()
    made = [client.decide(quote(record)).json["id"] for _ in range(5)]
    seen, cursor = [], ""
    while True:
        page = client.get(f"/v1/decisions?record=quote/{record}&limit=2{cursor}").json
        seen += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
        client.decide(quote(record))
    assert seen == made[::-1]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=201",
        "limit=x",
        "cursor=abc",
        "status=done",
        "record=quote",
        "record=/x",
        "page=2",
        "limit=1&limit=2",
        "type=%00",
    ],
)
def test_a_query_that_cannot_be_understood_is_a_400(client: Client, query: str) -> None:
    refused = client.get(f"/v1/decisions?{query}")
    assert (refused.status, refused.code) == (400, "malformed-request")


def test_a_query_where_none_is_known_is_a_400(client: Client) -> None:
    headers = [("Idempotency-Key", new_key())]
    assert client.call("POST", "/v1/decisions?dry_run=1", quote(), headers).code == "malformed-request"


def test_a_full_queue_is_a_429_with_retry_after_and_stores_nothing(database_url: str, gate: Path) -> None:
    settings = Settings(
        max_running=1, classes={"interactive": ClassLimits(weight=1, reserved=0, queue_depth=1)}
    )
    _, key = asyncio.run(tenant(database_url, "only"))
    with server(database_url, settings) as (address, _):
        client = Client(address, key)
        client.decide(quote(gate=str(gate)), prefer="respond-async")
        queued = client.decide(quote(), prefer="respond-async")
        assert (queued.status, queued.json["status"], queued.json["queue_position"]) == (202, "queued", 1)
        before = asyncio.run(rows(database_url))
        refused = client.decide(quote())
        assert (refused.status, refused.code, refused.json["retry"]) == (429, "queue-full", "same-key")
        assert int(refused.headers["retry-after"]) >= 1
        assert asyncio.run(rows(database_url)) == before
        gate.touch()


def test_fifty_posts_of_one_key_over_two_processes_are_one_decision(database_url: str) -> None:
    _, secret = asyncio.run(tenant(database_url, "only"))
    with server(database_url, processes=2) as (address, _), ThreadPoolExecutor(50) as pool:
        client, key, body = Client(address, secret), new_key(), quote()
        replies = list(pool.map(lambda _: client.decide(body, key=key), range(50)))
    assert sorted({reply.status for reply in replies}) == [200, 201]
    assert len({reply.body for reply in replies}) == 1
    assert asyncio.run(rows(database_url))["decisions"] == 1


BODILESS = [f"{one.method} {one.path}" for one in ENDPOINTS if one.method == "POST" and one.body is None]


def test_claims_and_cancellations_take_no_body() -> None:
    assert {
        "POST /v1/workers/{id}/claim",
        "POST /v1/decisions/{id}/cancel",
        "POST /v1/sessions/{session}/cancel",
    } <= set(BODILESS)


@pytest.mark.parametrize("endpoint", BODILESS)
@pytest.mark.parametrize(
    ("body", "pointer"),
    [(b'{"resaon": "typo"}', "/resaon"), (b"[]", ""), (b"null", ""), (b"{", ""), (b"not json", "")],
)
def test_what_an_endpoint_without_a_body_does_not_know_is_refused(
    client: Client, endpoint: str, body: bytes, pointer: str
) -> None:
    path = re.sub(r"{[a-z_]+}", "01a22969-a728-7669-8b99-5ac5ff272df1", endpoint.removeprefix("POST "))
    answer = client.call("POST", path, body)
    assert (answer.status, answer.code) == (400, "malformed-request"), answer.body
    assert [error["pointer"] for error in answer.json["errors"]] == [pointer]
    for nothing in (None, b"", b"{}"):
        assert client.call("POST", path, nothing).status in (200, 404)
