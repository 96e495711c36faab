"""Who may call what; and that what is another tenant's looks like what is absent (I14)."""

from __future__ import annotations

import asyncio
import base64
from uuid import UUID

import pytest

from coordinator.config import Settings
from coordinator.store.database import open_database
from coordinator.store.keys import list_keys, revoke_key
from tests.api.conftest import Running
from tests.api.serving import Client, Reply, new_key, quote, tenant
from tests.support.waiting import eventually_now

UNKNOWN = "ck_" + base64.urlsafe_b64encode(bytes(16)).rstrip(b"=").decode() + ".c2VjcmV0"
ABSENT = "01900000-0000-7000-8000-000000000000"


def same(reply: Reply) -> tuple[int, bytes, dict[str, str]]:
    """All of a reply but its date."""
    return reply.status, reply.body, {name: value for name, value in reply.headers.items() if name != "date"}


def test_no_key_is_a_401(running: Running) -> None:
    refused = Client(running.address, None).get("/v1/decisions")
    assert (refused.status, refused.code) == (401, "unauthenticated")
    assert refused.headers["www-authenticate"] == "Bearer"


def test_every_key_that_is_not_valid_gets_the_same_answer(running: Running, client: Client) -> None:
    assert client.key is not None
    wrong_secret = client.key[:-1] + ("A" if client.key[-1] != "A" else "B")
    owner, revoked = asyncio.run(tenant(running.url, "first", "audit"))
    asyncio.run(revoke_newest(running.url, owner))
    replies = [
        Client(running.address, key).get("/v1/decisions")
        for key in ("x", "ck_", "ck_a.b", UNKNOWN, wrong_secret, revoked, "k" * 10_000, client.key + ".")
    ]
    assert {reply.code for reply in replies} == {"unauthenticated"}
    assert len({str(same(reply)) for reply in replies}) == 1


async def revoke_newest(url: str, owner: UUID) -> None:
    async with (
        open_database(url, Settings(pool_size=1)) as database,
        database.transaction(owner) as connection,
    ):
        newest = (await list_keys(connection, owner))[-1]
        assert await revoke_key(connection, owner, newest.id)


@pytest.mark.parametrize(
    "text", ["", "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer {key}, Bearer {key}"]
)
def test_other_spellings_of_the_header_are_a_401(running: Running, client: Client, text: str) -> None:
    header = ("Authorization", text.format(key=client.key))
    assert Client(running.address, None).call("GET", "/v1/decisions", headers=[header]).status == 401


def test_two_keys_in_one_request_are_a_401(client: Client) -> None:
    assert (
        client.call("GET", "/v1/decisions", headers=[("Authorization", f"Bearer {client.key}")]).status == 401
    )


def test_the_scheme_may_be_spelled_in_any_case(running: Running, client: Client) -> None:
    header = ("authorization", f"bearer {client.key}")
    assert Client(running.address, None).call("GET", "/v1/decisions", headers=[header]).status == 200


def test_a_revoked_key_stops_working_within_the_cache_time(running: Running) -> None:
    owner, key = asyncio.run(tenant(running.url, "first", "audit"))
    short_lived = Client(running.address, key)
    assert short_lived.get("/v1/decisions").status == 200
    asyncio.run(revoke_newest(running.url, owner))
    eventually_now(lambda: short_lived.get("/v1/decisions").status == 401, interval=0.2)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/decisions", {"decide"}),
        ("POST", f"/v1/decisions/{ABSENT}/cancel", {"decide"}),
        ("GET", "/v1/decisions", {"decide", "review", "operate", "audit", "admin"}),
        ("GET", f"/v1/decisions/{ABSENT}", {"decide", "review", "operate", "audit", "admin"}),
        ("GET", "/v1/records/quote/x", {"decide", "review", "operate", "audit", "admin"}),
        ("GET", "/v1/records/quote/x/history", {"decide", "review", "operate", "audit", "admin"}),
        ("PUT", "/v1/records/quote/x", {"decide", "admin"}),
        ("GET", "/v1/operations", {"decide", "review", "operate", "audit", "admin"}),
        ("GET", f"/v1/operations/{ABSENT}", {"decide", "review", "operate", "audit", "admin"}),
        ("POST", f"/v1/operations/{ABSENT}/resolve", {"operate"}),
        ("POST", f"/v1/operations/{ABSENT}/retry", {"operate"}),
        ("POST", f"/v1/operations/{ABSENT}/compensate", {"operate"}),
        ("POST", "/v1/operations/reconcile", {"operate"}),
        ("GET", "/v1/pools", {"decide", "review", "operate", "audit", "admin"}),
        ("GET", "/v1/receipts", {"audit"}),
        ("GET", "/v1/receipts/0", {"audit"}),
    ],
)
def test_each_endpoint_asks_for_its_scopes(
    running: Running, one_scope: dict[str, Client], method: str, path: str, allowed: set[str]
) -> None:
    replies = {scope: each.call(method, path) for scope, each in one_scope.items()}
    assert {scope for scope, reply in replies.items() if reply.status != 403} == allowed
    assert {reply.code for reply in replies.values() if reply.status == 403} == {"missing-scope"}


@pytest.fixture(scope="module")
def one_scope(running: Running) -> dict[str, Client]:
    return {
        scope: running.with_scopes(scope)
        for scope in ("decide", "review", "operate", "work", "audit", "admin")
    }


def test_another_tenants_things_and_absent_things_answer_alike(client: Client, stranger: Client) -> None:
    record = new_key()
    made = client.decide(quote(record)).json
    operation = made["operations"][0]["id"]
    for theirs, absent in [
        (f"/v1/decisions/{made['id']}", f"/v1/decisions/{ABSENT}"),
        (f"/v1/operations/{operation}", f"/v1/operations/{ABSENT}"),
        (f"/v1/records/quote/{record}", "/v1/records/quote/absent"),
        (f"/v1/records/quote/{record}/history", "/v1/records/quote/absent/history"),
    ]:
        assert client.get(theirs).status == 200
        assert stranger.get(theirs).status == 404
        assert same(stranger.get(theirs)) == same(stranger.get(absent))
    cancels = [stranger.call("POST", f"/v1/decisions/{id}/cancel") for id in (made["id"], ABSENT)]
    assert cancels[0].code == "not-found"
    assert same(cancels[0]) == same(cancels[1])


def test_lists_show_only_the_callers_own(running: Running, client: Client, stranger: Client) -> None:
    record = new_key()
    made = client.decide(quote(record)).json
    assert stranger.get(f"/v1/decisions?record=quote/{record}").json["items"] == []
    assert stranger.get(f"/v1/receipts?decision={made['id']}").json["items"] == []
    listed = stranger.get("/v1/operations?limit=200").json["items"]
    assert made["id"] not in {operation["decision"] for operation in listed}


def test_another_tenants_record_version_does_not_show_in_a_refusal(client: Client, stranger: Client) -> None:
    record = new_key()
    client.decide(quote(record))
    put = stranger.call("PUT", f"/v1/records/quote/{record}", {"hours": 1}, [("If-Match", '"1"')])
    assert (put.status, put.json["current_version"]) == (412, 0)
