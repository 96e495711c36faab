"""`adapters.http_sink.HttpSink`: any method, address and body; sent once; statuses mean what the declaration says (I5, I7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from adapters.http_sink import HttpSink, Method
from adapters.statuses import Meaning
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Lookup,
    NotSent,
    Rejected,
    SendResult,
    Sink,
    Unguarded,
    keyed,
)
from coordinator.errors import DeclarationError
from tests.adapters.asking import TRACE, operation
from tests.adapters.servers import Heard, answering, hear, http_answer, web_server, wire_server

KEYED = keyed(hours=24)
PAYLOAD = msgspec.json.encode(
    {"order": {"id": "a/1", "tags": ["x", "y"]}, "amount_minor": 1200, "paid": True, "note": None}
)


async def seen_by(sink: Callable[[str], HttpSink], payload: bytes = PAYLOAD) -> tuple[web.Request, bytes]:
    seen: list[tuple[web.Request, bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request, await request.read()))
        return web.json_response({})

    async with web_server(handler) as url:
        assert isinstance(await sink(url).perform(operation(payload=payload)), Accepted)
    (only,) = seen
    return only


async def perform(answer: Callable[[], web.Response], **options: Any) -> SendResult:
    async with answering(answer) as url:
        return await HttpSink("pay", f"{url}/pay", **{"guarantee": KEYED, **options}).perform(operation())


def test_it_is_a_sink() -> None:
    declared: Sink = HttpSink("pay", "https://psp.example/{payload.order}", guarantee=KEYED)
    assert (declared.name, declared.provider, declared.timeout_ms) == ("pay", "psp.example", 10_000)


async def test_method_address_key_header_and_body_are_the_providers() -> None:
    request, body = await seen_by(
        lambda url: HttpSink(
            "pay",
            f"{url}/orders/{{payload.order.id}}/payment?tenant={{tenant}}",
            method="PUT",
            guarantee=KEYED,
            key_header="X-Request-Id",
            headers={"Authorization": "Bearer t"},
            body={
                "amount": "{payload.amount_minor}",
                "tags": "{payload.order.tags}",
                "all": ["{payload.paid}", 7, None],
                "text": "order {payload.order.id} of {decision}",
            },
        )
    )
    assert (request.method, request.raw_path) == ("PUT", "/orders/a%2F1/payment?tenant=acme")
    assert request.headers["X-Request-Id"] == operation().key
    assert "Idempotency-Key" not in request.headers
    assert request.headers["Authorization"] == "Bearer t"
    assert request.headers["traceparent"] == TRACE
    assert msgspec.json.decode(body) == {
        "amount": 1200,
        "tags": ["x", "y"],
        "all": [True, 7, None],
        "text": "order a/1 of d-1",
    }


async def test_without_a_body_the_payload_goes_out_as_it_is_and_with_delete_nothing() -> None:
    request, body = await seen_by(lambda url: HttpSink("pay", f"{url}/pay", guarantee=KEYED))
    assert (request.method, body) == ("POST", PAYLOAD)
    request, body = await seen_by(
        lambda url: HttpSink("pay", f"{url}/{{payload.order.id}}", method="DELETE", guarantee=KEYED)
    )
    assert (request.method, request.raw_path, body) == ("DELETE", "/a%2F1", b"")
    assert "Content-Type" not in request.headers


async def test_headers_may_depend_on_the_bytes_that_are_sent() -> None:
    request, body = await seen_by(
        lambda url: HttpSink(
            "pay",
            f"{url}/",
            guarantee=KEYED,
            body={"whole": "{payload}"},
            sign=lambda op, sent: {"X-Sum": f"{op.key}:{len(sent)}"},
        )
    )
    assert request.headers["X-Sum"] == f"{operation().key}:{len(body)}"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/{payload.nothing}", None),
        ("/{payload.note}", None),
        ("/{payload.order}", None),
        ("/x", {"a": "{payload.nothing}"}),
        ("/x", {"a": "for {payload.note}"}),
    ],
)
async def test_a_hole_in_address_or_body_is_never_sent(url: str, body: Any) -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)

    async with wire_server(talk, heard) as base:
        sink = HttpSink("pay", base + url, guarantee=KEYED, body=body)
        result = await sink.perform(operation(payload=PAYLOAD))
    assert isinstance(result, Rejected), result
    assert result.code == "no-value"
    assert heard.connections == 0


async def test_a_payload_that_is_no_json_is_refused_where_it_is_read() -> None:
    sink = HttpSink("pay", "http://127.0.0.1:9/{payload.a}", guarantee=KEYED)
    assert isinstance(await sink.perform(operation(payload=b"\xff")), Rejected)


@pytest.mark.parametrize(
    ("amended", "status", "kind"),
    [
        ({409: "accepted"}, 409, Accepted),
        ({404: "not-sent"}, 404, NotSent),
        ({"4xx": "ambiguous"}, 418, Ambiguous),
        ({"4xx": "ambiguous", 418: "rejected"}, 418, Rejected),
        ({202: "ambiguous"}, 202, Ambiguous),
        ({"5xx": "not-sent"}, 502, NotSent),
        ({409: "accepted"}, 422, Rejected),
    ],
)
async def test_statuses_mean_what_the_declaration_says(
    amended: dict[int | str, Meaning], status: int, kind: type[object]
) -> None:
    assert isinstance(await perform(lambda: web.Response(status=status), statuses=amended), kind)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_an_error_that_the_provider_stored_for_our_key_is_recognised(status: int) -> None:
    headers = {"Idempotent-Replayed": "True", "Retry-After": "1"}
    result = await perform(lambda: web.Response(status=status, headers=headers))
    assert result == Ambiguous("stored-error", str(status), replayed=True)


async def test_the_mark_of_a_stored_answer_may_have_another_name() -> None:
    answer = {"X-Cache": "true"}
    result = await perform(lambda: web.Response(status=500, headers=answer), replayed_header="x-cache")
    assert result == Ambiguous("stored-error", "500", replayed=True)
    result = await perform(lambda: web.Response(status=500, headers={"Idempotent-Replayed": "false"}))
    assert result == Ambiguous("provider-error", "500")


@pytest.mark.parametrize("status", [200, 422])
async def test_a_stored_answer_that_is_definite_stays_definite(status: int) -> None:
    result = await perform(lambda: web.Response(status=status, headers={"Idempotent-Replayed": "true"}))
    assert isinstance(result, Accepted | Rejected)


async def test_the_reference_may_stand_deep_in_the_answer() -> None:
    result = await perform(
        lambda: web.json_response({"data": {"id": "p-9"}}), reference_field="data.id", guarantee=Unguarded()
    )
    assert result == Accepted("p-9")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("guarantee", [KEYED, Unguarded()])
async def test_a_request_whose_connection_breaks_is_sent_once_whatever_its_method(
    method: Method, guarantee: Any
) -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)
        writer.write(http_answer(b"{}"))
        await hear(reader, heard)

    async with wire_server(talk, heard) as url:
        sink = HttpSink("pay", url, method=method, guarantee=guarantee)
        first, second = await sink.perform(operation("k-1")), await sink.perform(operation("k-2"))
    if isinstance(guarantee, Unguarded):  # a fresh connection each time: the second one is answered as well
        assert (first, second) == (Accepted("200 k-1"), Accepted("200 k-2"))
    else:
        assert isinstance(second, Ambiguous), second
    assert [request.count(b"k-2") > 0 for request in heard.requests] == [False, True]


async def test_a_put_whose_answer_is_lost_is_ambiguous_and_not_repeated() -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)

    async with wire_server(talk, heard) as url:
        result = await HttpSink(
            "pay", url, method="PUT", guarantee=Lookup(0), lookup_url=url + "/{key}"
        ).perform(operation())
    assert isinstance(result, Ambiguous), result
    assert (result.code, heard.connections, len(heard.requests)) == ("connection-lost", 1, 1)


async def test_a_lookup_may_need_the_payload() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.json_response({"reference": "p-1"})

    async with web_server(handler) as url:
        sink = HttpSink(
            "pay", url, guarantee=Lookup(0), lookup_url=f"{url}/{{payload.amount_minor}}?key={{key}}"
        )
        assert await sink.lookup(operation()) == Accepted("p-1")
    assert seen == ["/1200?key=d-1.send-quote.0"]


@pytest.mark.parametrize(
    "options",
    [
        {"method": "GET"},
        {"url": "https://{payload.host}/x"},
        {"url": "https://h/{input.site}"},
        {"body": {"a": "{nowhere}"}},
        {"body": {"a": "{payload"}},
        {"body": {"a": object()}},
        {"statuses": {"6xx": "accepted"}},
        {"statuses": {99: "accepted"}},
        {"statuses": {409: "fine"}},
        {"key_header": "Content-Length"},
        {"key_header": "no header"},
        {"headers": {"X-Key": "1"}, "key_header": "x-key"},
        {"lookup_url": "https://h/{key}"},
        {"timeout_ms": 0},
    ],
)
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_http_sink\.py"):
        HttpSink("pay", **{"url": "https://h/x", "guarantee": KEYED, **options})
