"""`/v1/receipts` and `/v1/operations` over real HTTP."""

from __future__ import annotations

import asyncio
from urllib.parse import quote as escaped

import pytest

from tests.api.conftest import Running
from tests.api.serving import Client, new_key, quote, tenant
from tests.support.waiting import eventually_now


def settled(client: Client, hours: int = 8) -> tuple[str, str]:
    """A committed decision whose operation has succeeded: their ids."""
    made = client.decide(quote(hours=hours)).json
    operation = made["operations"][0]["id"]
    eventually_now(lambda: client.get(f"/v1/operations/{operation}").json["state"] == "succeeded")
    return made["id"], operation


def test_an_operation_shows_what_was_sent_under_which_key_and_what_came_of_it(client: Client) -> None:
    decision, id = settled(client, hours=9)
    operation = client.get(f"/v1/operations/{id}").json
    assert operation["decision"] == decision
    assert operation["payload"] == {"hours": 9}
    assert operation["payload_hash"].startswith("sha256:")
    assert operation["guarantee"]["kind"] == "keyed"
    assert operation["reference"] == f"crm-{operation['key']}"
    assert operation["attempts"] == 1
    receipt = client.get(f"/v1/receipts/{operation['receipt']}").json
    assert (receipt["kind"], receipt["operation"]) == ("operation.succeeded", id)


def test_operations_are_listed_by_state(client: Client) -> None:
    _, id = settled(client)
    assert client.get("/v1/operations?state=succeeded&limit=1").json["items"][0]["id"] == id
    assert client.get("/v1/operations?state=uncertain").json["items"] == []
    assert client.get("/v1/operations?state=done").code == "malformed-request"


def test_receipts_are_found_by_decision_operation_kind_and_time(client: Client) -> None:
    decision, operation = settled(client)

    def kinds(query: str) -> list[str]:
        return [item["kind"] for item in client.get(f"/v1/receipts?{query}").json["items"]]

    own = client.get(f"/v1/receipts?decision={decision}").json["items"]
    assert [item["kind"] for item in own] == [
        "decision.running",
        "decision.committed",
        "operation.dispatching",
        "operation.succeeded",
    ]
    assert kinds(f"operation={operation}") == ["operation.dispatching", "operation.succeeded"]
    assert kinds(f"decision={decision}&kind=decision.committed") == ["decision.committed"]
    committed_at = escaped(own[1]["at"])
    assert kinds(f"decision={decision}&until={committed_at}") == ["decision.running"]
    assert kinds(f"decision={decision}&since={committed_at}")[0] == "decision.committed"


def test_the_log_is_contiguous_over_its_pages(running: Running) -> None:
    _, key = asyncio.run(tenant(running.url, new_key()))
    alone = Client(running.address, key)
    for _ in range(3):
        settled(alone)
    indices, cursor = [], ""
    while True:
        page = alone.get(f"/v1/receipts?limit=5{cursor}").json
        indices += [item["index"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert indices == list(range(12))
    assert alone.get("/v1/receipts/0").json["kind"] == "decision.running"


@pytest.mark.parametrize("index", ["999999", "-1", "01", "x", "1.0", "9" * 40, "%00"])
def test_a_receipt_that_is_not_there_is_a_404(client: Client, index: str) -> None:
    assert client.get(f"/v1/receipts/{index}").code == "not-found"


@pytest.mark.parametrize(
    "query", ["decision=x", "operation=1", "since=yesterday", "until=2026-11-29", "cursor=x"]
)
def test_a_filter_that_cannot_be_understood_is_a_400(client: Client, query: str) -> None:
    assert client.get(f"/v1/receipts?{query}").code == "malformed-request"


@pytest.mark.parametrize("id", ["x", "0", "01900000-0000-7000-8000-00000000000G", "%00", "%2F"])
def test_what_is_no_id_is_a_404(client: Client, id: str) -> None:
    assert client.get(f"/v1/operations/{id}").code == "not-found"
    assert client.get(f"/v1/decisions/{id}").code == "not-found"
