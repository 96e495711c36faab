"""`/v1/notices` over real HTTP: nothing is looked up or told before the sender is proven, and an event counts once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from uuid_utils.compat import uuid7

from tests.api.ordering import Ordering
from tests.api.orders import OTHER_SECRET, signed
from tests.api.serving import Client, Reply, new_key, tenant
from tests.support.waiting import eventually_now

COURIER = "book-courier"
ABSENT = "01900000-0000-7000-8000-000000000000.book-courier.0"


def booked(ordering: Ordering, type: str = "order") -> dict[str, Any]:
    """An operation whose provider has not told yet what became of it. The mail that goes before it keeps the courier's circuit
    breaker closed: they are one provider."""
    ordering.faults()
    ordering.once(ordering.order("mail"), mail="succeeded")
    decision = ordering.order(COURIER, type=type)
    return ordering.once(decision, book_courier="uncertain")[COURIER]


def event(key: str, *, happened: bool = True, **more: str) -> bytes:
    return json.dumps({"key": key, "happened": happened, **more}).encode()


def send(
    ordering: Ordering,
    body: bytes,
    headers: Sequence[tuple[str, str]],
    *,
    tenant: object = None,
    effect: str = COURIER,
) -> Reply:
    """Without an API key."""
    path = f"/v1/notices/{tenant or ordering.tenant}/{effect}"
    return Client(ordering.address, None).call("POST", path, body, headers)


def same(reply: Reply) -> tuple[int, bytes, list[tuple[str, str]]]:
    return reply.status, reply.body, sorted((n, v) for n, v in reply.headers.items() if n != "date")


def state(ordering: Ordering, operation: dict[str, Any]) -> str:
    found: str = ordering.client.get(f"/v1/operations/{operation['id']}").json["state"]
    return found


def test_a_signed_notice_settles_the_operation_without_any_key(ordering: Ordering) -> None:
    operation = booked(ordering)
    body, id = event(operation["key"], reference="van-12"), new_key()
    answer = send(ordering, body, signed(body, id))
    assert (answer.status, answer.json) == (200, {"operation": operation["id"], "state": "succeeded"})
    now = ordering.client.get(f"/v1/operations/{operation['id']}").json
    assert (now["reference"], now["in_doubt"], now["due_at"]) == ("van-12", False, None)
    assert ordering.last_receipt(operation["id"])["event"] == id


def test_a_notice_that_it_did_not_happen_fails_it_with_the_providers_reason(ordering: Ordering) -> None:
    operation = booked(ordering)
    body = event(operation["key"], happened=False, reason="no van is free")
    assert send(ordering, body, signed(body, new_key())).json["state"] == "failed"
    assert ordering.client.get(f"/v1/operations/{operation['id']}").json["reason"] == "no van is free"


def test_what_waited_for_the_providers_word_goes_on(ordering: Ordering) -> None:
    ordering.faults()
    decision = ordering.order(COURIER, "mail", in_order=True)
    operation = ordering.once(decision, book_courier="uncertain", mail="ready")[COURIER]
    body = event(operation["key"])
    assert send(ordering, body, signed(body, new_key())).status == 200
    ordering.once(decision, mail="succeeded")


def test_an_event_that_comes_twice_counts_once(ordering: Ordering) -> None:
    operation = booked(ordering)
    body, id = event(operation["key"]), new_key()
    first = send(ordering, body, signed(body, id))
    kinds = ordering.kinds(operation["id"])
    again = send(ordering, body, signed(body, id))
    assert (again.status, again.json) == (first.status, first.json)
    assert ordering.kinds(operation["id"]) == kinds
    other = event(operation["key"], happened=False)
    assert send(ordering, other, signed(other, id)).json == first.json
    assert ordering.kinds(operation["id"]) == kinds


def test_an_event_after_the_end_is_kept_as_a_receipt_and_changes_nothing(ordering: Ordering) -> None:
    operation = booked(ordering)
    for happened in (True, False):
        body = event(operation["key"], happened=happened)
        assert send(ordering, body, signed(body, new_key())).json["state"] == "succeeded"
    assert ordering.kinds(operation["id"])[-2:] == ["operation.succeeded", "operation.late-evidence"]


def test_whatever_is_wrong_with_a_notice_the_answer_is_the_same(ordering: Ordering) -> None:
    operation = booked(ordering)
    body, now = event(operation["key"]), datetime.now(UTC)
    good = signed(body, new_key())
    replies = [
        send(ordering, body, []),
        send(ordering, body, good[:2]),
        send(ordering, body, [*good[:2], ("webhook-signature", "v1,AAAA")]),
        send(ordering, body, [*good[:2], ("webhook-signature", "nonsense")]),
        send(ordering, body, [*good, good[0]]),
        send(ordering, body, signed(body, new_key(), secret=OTHER_SECRET.replace("Z", "Y"))),
        send(ordering, body + b" ", good),
        send(ordering, event(ABSENT), good),
        send(ordering, body, signed(body, new_key(), at=now - timedelta(minutes=6))),
        send(ordering, body, signed(body, new_key(), at=now + timedelta(minutes=6))),
        send(ordering, b"\xff\xfe", good),
        *(send(ordering, each, signed(each, new_key())) for each in (b"", b"{", b"[]", b'{"key":1}')),
        send(ordering, body, signed(body, new_key()), tenant=uuid7()),
        send(ordering, body, [], tenant=uuid7()),
        send(ordering, body, signed(body, new_key()), tenant="nobody"),
        send(ordering, body, signed(body, "x" * 256)),
    ]
    assert [reply.status for reply in replies] == [401] * len(replies)
    assert {reply.code for reply in replies} == {"notice-refused"}
    assert len({str(same(reply)) for reply in replies}) == 1
    assert state(ordering, operation) == "uncertain"


def test_an_unknown_key_is_a_404_for_a_proven_sender_only(ordering: Ordering) -> None:
    for key in (ABSENT, "x", "", "\x00", "k" * 5000):
        body = event(key)
        refused = send(ordering, body, signed(body, new_key()))
        assert (refused.status, refused.code) == (404, "not-found"), key
        assert send(ordering, body, []).code == "notice-refused"


def test_a_key_of_another_tenant_and_an_unknown_one_answer_alike(ordering: Ordering) -> None:
    operation = booked(ordering)
    other, _ = asyncio.run(tenant(ordering.url, "second"))
    replies = [
        send(ordering, body, signed(body, new_key()), tenant=other)
        for body in (event(operation["key"]), event(ABSENT))
    ]
    assert replies[0].code == "not-found"
    assert same(replies[0]) == same(replies[1])
    assert state(ordering, operation) == "uncertain"


def test_a_key_of_another_effect_is_unknown(ordering: Ordering) -> None:
    charge = ordering.uncertain_charge()
    body = event(charge["key"])
    assert send(ordering, body, signed(body, new_key())).code == "not-found"
    assert state(ordering, charge) == "uncertain"


def test_where_two_types_declare_the_effect_each_provider_speaks_of_its_own_keys(ordering: Ordering) -> None:
    operation = booked(ordering, "courier-order")
    body = event(operation["key"])
    assert send(ordering, body, signed(body, new_key())).code == "not-found"
    assert state(ordering, operation) == "uncertain"
    answer = send(ordering, body, signed(body, new_key(), secret=OTHER_SECRET))
    assert answer.json == {"operation": operation["id"], "state": "succeeded"}


@pytest.mark.parametrize("effect", ["no-such-effect", "%00", "%FF", "charge%2F"])
def test_an_effect_that_nobody_declares_is_a_404(ordering: Ordering, effect: str) -> None:
    body = event(ABSENT)
    assert send(ordering, body, signed(body, new_key()), effect=effect).status == 404


def test_a_webhook_with_a_secret_for_this_direction_reads_the_providers_notices(ordering: Ordering) -> None:
    ordering.faults(ship={"lose_answer": True, "times": 1})
    ship = ordering.once(ordering.order("ship"), ship="uncertain")["ship"]
    body = event(ship["key"], reference="track-9")
    assert send(ordering, body, [], effect="ship").code == "notice-refused"
    answer = send(ordering, body, signed(body, new_key()), effect="ship")
    assert answer.json == {"operation": ship["id"], "state": "succeeded"}
    assert ordering.client.get(f"/v1/operations/{ship['id']}").json["reference"] == "track-9"


def test_a_webhook_without_one_takes_no_notices(ordering: Ordering) -> None:
    charge = ordering.uncertain_charge()
    body = event(charge["key"])
    assert send(ordering, body, signed(body, new_key()), effect="charge").code == "notice-refused"
    assert state(ordering, charge) == "uncertain"


def test_a_body_that_is_too_large_is_refused_unread(ordering: Ordering) -> None:
    body = b" " * (256 * 1024 + 1)
    refused = send(ordering, body, signed(body, new_key()))
    assert (refused.status, refused.code) == (413, "body-too-large")


def test_a_notice_may_have_any_content_type(ordering: Ordering) -> None:
    operation = booked(ordering)
    body = event(operation["key"])
    headers = [*signed(body, new_key()), ("Content-Type", "text/plain")]
    assert send(ordering, body, headers).json["state"] == "succeeded"


def test_only_post_is_allowed(ordering: Ordering) -> None:
    refused = Client(ordering.address, None).get(f"/v1/notices/{ordering.tenant}/{COURIER}")
    assert (refused.status, refused.headers["allow"]) == (405, "OPTIONS, POST")


def test_events_that_come_at_once_count_once_each(ordering: Ordering) -> None:
    operation = booked(ordering)
    body = event(operation["key"])

    async def all_at_once() -> list[Reply]:
        ids = [new_key()] * 4 + [new_key() for _ in range(4)]
        return await asyncio.gather(
            *(asyncio.to_thread(send, ordering, body, signed(body, id)) for id in ids)
        )

    replies = asyncio.run(all_at_once())
    assert {reply.json["state"] for reply in replies} == {"succeeded"}
    kinds = ordering.kinds(operation["id"])
    assert kinds.count("operation.succeeded") == 1
    assert kinds.count("operation.late-evidence") == 4
    eventually_now(lambda: state(ordering, operation) == "succeeded")
