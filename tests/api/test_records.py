"""`/v1/records` over real HTTP: versions as entity tags, and writes that say what they rely on."""

from __future__ import annotations

import asyncio
from urllib.parse import quote as escaped

import pytest

from tests.api.conftest import Running
from tests.api.serving import Client, Reply, new_key, quote, rows


def put(client: Client, id: str, data: object, *preconditions: tuple[str, str], kind: str = "quote") -> Reply:
    return client.call("PUT", f"/v1/records/{kind}/{escaped(id, safe='')}", data, preconditions)


CREATE = ("If-None-Match", "*")


def test_a_record_is_created_replaced_and_shown(client: Client) -> None:
    id = new_key()
    created = put(client, id, {"hours": 1}, CREATE)
    assert (created.status, created.headers["etag"]) == (201, '"1"')
    replaced = put(client, id, {"hours": 2}, ("If-Match", '"1"'))
    assert (replaced.status, replaced.headers["etag"]) == (200, '"2"')
    shown = client.get(f"/v1/records/quote/{id}")
    assert shown.headers["etag"] == '"2"'
    assert shown.body == replaced.body
    assert shown.json == {"kind": "quote", "id": id, "version": 2, "data": {"hours": 2}}


def test_history_names_who_made_each_version(client: Client) -> None:
    id = new_key()
    put(client, id, {"hours": 1}, CREATE)
    decision = client.decide(quote(id, hours=5)).json["id"]
    items = client.get(f"/v1/records/quote/{id}/history").json["items"]
    assert [(item["version"], item["data"]["hours"]) for item in items] == [(2, 5), (1, 1)]
    assert items[0]["decision"] == decision
    assert items[0]["key"] is None
    assert items[1]["decision"] is None
    assert items[1]["key"] is not None


def test_history_is_paged(client: Client) -> None:
    id = new_key()
    put(client, id, {"hours": 1}, CREATE)
    for version in range(1, 5):
        put(client, id, {"hours": version}, ("If-Match", f'"{version}"'))
    seen, cursor = [], ""
    while True:
        page = client.get(f"/v1/records/quote/{id}/history?limit=2{cursor}").json
        seen += [item["version"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == [5, 4, 3, 2, 1]


def test_a_record_that_does_not_exist_yet_is_a_404(client: Client) -> None:
    id = new_key()
    assert client.get(f"/v1/records/quote/{id}").code == "not-found"
    assert client.get(f"/v1/records/quote/{id}/history").code == "not-found"
    client.decide(quote(id, hours=41))
    assert client.get(f"/v1/records/quote/{id}").code == "not-found"


def test_a_write_without_a_precondition_is_a_428(client: Client) -> None:
    refused = put(client, new_key(), {"hours": 1})
    assert (refused.status, refused.code) == (428, "precondition-required")


@pytest.mark.parametrize("precondition", [CREATE, ("If-Match", '"7"'), ("If-Match", '"0"')])
def test_a_stale_write_is_a_412_with_the_current_version(
    client: Client, precondition: tuple[str, str]
) -> None:
    id = new_key()
    put(client, id, {"hours": 1}, CREATE)
    refused = put(client, id, {"hours": 2}, precondition)
    assert (refused.status, refused.code) == (412, "precondition-failed")
    assert refused.json["current_version"] == 1


def test_of_two_writers_at_one_version_one_wins(client: Client) -> None:
    id = new_key()
    put(client, id, {"hours": 1}, CREATE)
    statuses = [put(client, id, {"hours": hours}, ("If-Match", '"1"')).status for hours in (2, 3)]
    assert statuses == [200, 412]
    assert client.get(f"/v1/records/quote/{id}").json["data"] == {"hours": 2}


@pytest.mark.parametrize("tag", ['W/"1"', "1", '"x"', "*"])
def test_a_precondition_that_is_not_exact_is_a_400(client: Client, tag: str) -> None:
    assert put(client, new_key(), {"hours": 1}, ("If-Match", tag)).code == "malformed-request"


def test_a_transition_that_the_kind_forbids_is_a_422(client: Client) -> None:
    id = new_key()
    put(client, id, {"hours": 5}, CREATE)
    refused = put(client, id, {"hours": 4}, ("If-Match", '"1"'))
    assert (refused.status, refused.code) == (422, "transition-refused")
    assert put(client, id, {"hours": "many"}, ("If-Match", '"1"')).code == "transition-refused"
    assert client.get(f"/v1/records/quote/{id}").json["version"] == 1


@pytest.mark.parametrize(
    "body", [b"[]", b'"text"', b"", b'{"a":1,"a":2}', b'{"hours":NaN}', b'{"hours":"\\u0000"}']
)
def test_data_that_is_not_a_strict_json_object_is_a_400_and_stores_nothing(
    running: Running, client: Client, body: bytes
) -> None:
    before = asyncio.run(rows(running.url))
    refused = put(client, new_key(), body, CREATE)
    assert (refused.status, refused.code) == (400, "malformed-request")
    assert asyncio.run(rows(running.url)) == before


@pytest.mark.parametrize(
    "id", ["a/b", "a%2Fb", "history", "a b", "ü", "a?b#c", "..", "a/history", "a//b", "+"]
)
def test_an_id_may_be_any_text(client: Client, id: str) -> None:
    unique = f"{id}~{new_key()}" if id != "history" else id
    put(client, unique, {"hours": 1}, CREATE)
    shown = client.get(f"/v1/records/quote/{escaped(unique, safe='')}")
    assert (shown.status, shown.json["id"]) == (200, unique)
    assert client.get(f"/v1/records/quote/{escaped(unique, safe='')}/history").status == 200


@pytest.mark.parametrize("path", ["quote/%00", "quote/%ff", "quote/%ED%A0%80", "quote/" + "x" * 256, "%00/x"])
def test_an_id_that_cannot_be_is_a_404(client: Client, path: str) -> None:
    assert client.get(f"/v1/records/{path}").code == "not-found"
