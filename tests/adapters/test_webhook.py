"""`adapters.webhook.WebhookSink`: what it sends, once, and what it makes of the answer (I5, I7)."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks.webhooks import Webhook

from adapters.http import WebhookSink
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Guarantee,
    Keyed,
    Lookup,
    LookupResult,
    NotFound,
    NotSent,
    Rejected,
    SendResult,
    Sink,
    Unguarded,
    keyed,
)
from coordinator.errors import DeclarationError
from tests.adapters.asking import TRACE, operation
from tests.adapters.servers import (
    Heard,
    answering,
    hear,
    http_answer,
    saying,
    unused_port,
    web_server,
    wire_server,
)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEYED = keyed(hours=24)
ASKABLE = keyed(hours=24, lookup_lag=timedelta(seconds=1))
GUARANTEES: list[Guarantee] = [KEYED, Unguarded()]


def sink(url: str, guarantee: Guarantee = KEYED, **options: Any) -> WebhookSink:
    return WebhookSink("send-quote", f"{url}/quotes", guarantee=guarantee, **options)


async def perform(
    answer: Callable[[], web.Response], guarantee: Guarantee = KEYED, **options: Any
) -> SendResult:
    async with answering(answer) as url:
        return await sink(url, guarantee, **options).perform(operation())


async def look_up(answer: Callable[[], web.Response]) -> LookupResult:
    async with answering(answer) as url:
        return await sink(url, ASKABLE, lookup_url=f"{url}/quotes/{{key}}").lookup(operation())


def test_it_is_a_sink() -> None:
    declared: Sink = WebhookSink("send-quote", "https://crm.example/quotes", guarantee=keyed(hours=24))
    assert (declared.name, declared.provider, declared.timeout_ms) == ("send-quote", "crm.example", 10_000)


async def test_the_payload_goes_out_byte_for_byte_under_its_key() -> None:
    seen: list[tuple[web.Request, bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request, await request.read()))
        return web.json_response({"reference": "q-77"}, status=201)

    sent = operation()
    async with web_server(handler) as url:
        result = await sink(url, headers={"Authorization": "Bearer t"}, secret=SECRET).perform(sent)
    assert result == Accepted("q-77")
    request, body = seen[0]
    assert (request.method, request.path, body) == ("POST", "/quotes", sent.payload)
    assert request.headers["Idempotency-Key"] == request.headers["webhook-id"] == sent.key
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["traceparent"] == TRACE
    assert request.headers["Authorization"] == "Bearer t"
    assert Webhook(SECRET).verify(body, dict(request.headers)) == {"amount_minor": 1200, "b": "é"}


async def test_without_a_secret_nothing_is_signed() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=400 if "webhook-signature" in request.headers else 200)

    async with web_server(handler) as url:
        assert isinstance(await sink(url).perform(operation()), Accepted)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (lambda: web.json_response({"reference": "q-1"}), "q-1"),
        (lambda: web.json_response({"reference": 12}, status=202), "12"),
        (lambda: web.json_response({}, status=201, headers={"Location": "/quotes/9"}), "/quotes/9"),
        (lambda: web.json_response({"reference": None}), "200 d-1.send-quote.0"),
        (lambda: web.json_response({"reference": True}), "200 d-1.send-quote.0"),
        (lambda: web.Response(status=204), "204 d-1.send-quote.0"),
        (lambda: web.Response(body=b"\x00\xff<html>", content_type="text/html"), "200 d-1.send-quote.0"),
        (lambda: web.Response(body=b" " * 1_000_000), "200 d-1.send-quote.0"),
        (lambda: web.Response(body=b'{"reference":"a\\u0000b"}'), "200 d-1.send-quote.0"),
    ],
)
async def test_a_success_is_accepted_whatever_its_body_says(
    answer: Callable[[], web.Response], reference: str
) -> None:
    assert await perform(answer) == Accepted(reference)


async def test_the_reference_may_stand_in_another_field() -> None:
    assert await perform(lambda: web.json_response({"id": "q-2"}), reference_field="id") == Accepted("q-2")


async def test_a_success_whose_body_breaks_off_is_accepted() -> None:
    cut = b"HTTP/1.1 201 Created\r\nContent-Length: 900\r\n\r\n{"
    async with wire_server(saying(cut)) as url:
        assert await sink(url).perform(operation()) == Accepted("201 d-1.send-quote.0")


async def test_a_success_whose_body_never_ends_is_accepted() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
            await writer.drain()

    async with wire_server(talk) as url:
        assert await sink(url).perform(operation()) == Accepted("200 d-1.send-quote.0")


async def test_a_success_whose_body_never_comes_is_accepted_in_time() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        await asyncio.Event().wait()

    async with wire_server(talk) as url:
        assert await sink(url, timeout_ms=300).perform(operation()) == Accepted("200 d-1.send-quote.0")


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 410, 413, 415, 422])
@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_refusal_is_final(status: int, guarantee: Guarantee) -> None:
    result = await perform(lambda: web.json_response({"detail": "no\x00pe"}, status=status), guarantee)
    assert result == Rejected("provider-refused", f'{status}: {{"detail": "no\\u0000pe"}}')


@pytest.mark.parametrize("status", [408, 425, 500, 502, 503, 504])
@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_provider_in_trouble_may_have_acted(status: int, guarantee: Guarantee) -> None:
    result = await perform(lambda: web.Response(status=status), guarantee)
    assert result == Ambiguous("provider-error", str(status))


@pytest.mark.parametrize(
    ("status", "header", "pause_ms"),
    [(503, "3", 3000), (429, "3", 3000), (429, None, None), (429, "soon", None)],
)
async def test_a_busy_provider_that_says_when_has_not_acted(
    status: int, header: str | None, pause_ms: int | None
) -> None:
    headers = {"Retry-After": header} if header else {}
    assert await perform(lambda: web.Response(status=status, headers=headers)) == NotSent(
        "provider-busy", str(status), pause_ms
    )


async def test_unavailable_with_a_senseless_pause_is_no_proof() -> None:
    result = await perform(lambda: web.Response(status=503, headers={"Retry-After": "soon"}))
    assert isinstance(result, Ambiguous)


@pytest.mark.parametrize(
    ("guarantee", "meaning", "kind"),
    [
        (KEYED, None, Ambiguous),
        (KEYED, "refused", Rejected),
        (Unguarded(), None, Rejected),
        (Unguarded(), "in-flight", Ambiguous),
    ],
)
async def test_a_conflict_may_be_our_own_earlier_request_if_the_provider_knows_our_key(
    guarantee: Guarantee, meaning: str | None, kind: type[object]
) -> None:
    assert isinstance(
        await perform(lambda: web.Response(status=409), guarantee, conflict_means=meaning), kind
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [(301, Ambiguous), (303, Ambiguous), (304, Ambiguous), (307, Rejected), (308, Rejected)],
)
async def test_a_redirect_is_never_followed(status: int, kind: type[object]) -> None:
    heard = Heard()
    async with wire_server(saying(http_answer(b"{}")), heard) as other:
        result = await perform(lambda: web.Response(status=status, headers={"Location": f"{other}/x"}))
    assert isinstance(result, kind)
    assert heard.connections == 0


async def test_nobody_listening_means_not_sent() -> None:
    result = await sink(f"http://127.0.0.1:{await unused_port()}").perform(operation())
    assert isinstance(result, NotSent)
    assert result.code == "unreachable"


async def test_an_unknown_host_means_not_sent() -> None:
    result = await WebhookSink("s", "http://nowhere.invalid/x", guarantee=KEYED).perform(operation())
    assert isinstance(result, NotSent)


async def test_a_failed_tls_handshake_means_not_sent() -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.requests.append(await reader.read(65_536))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with wire_server(talk) as url:
        result = await sink(url.replace("http:", "https:")).perform(operation())
    assert isinstance(result, NotSent)
    assert operation().payload not in b"".join(heard.requests)


async def test_a_connection_that_is_never_made_means_not_sent() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [await begin_connecting(full.getsockname()) for _ in range(3)]
        try:
            result = await sink(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_ms=500).perform(
                operation()
            )
        finally:
            for one in waiting:
                one.close()
    assert isinstance(result, NotSent), result


async def begin_connecting(address: tuple[str, int]) -> socket.socket:
    """Fills one place of a listen queue that nobody serves."""
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(address)
    return one


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_silence_after_sending_is_ambiguous_and_sent_once(guarantee: Guarantee) -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)
        await asyncio.Event().wait()

    async with wire_server(talk, heard) as url:
        result = await sink(url, guarantee, timeout_ms=200).perform(operation())
    assert result == Ambiguous("timed-out", "no answer within 200 ms")
    assert len(heard.requests) == 1


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("reset", [False, True])
async def test_a_dropped_connection_is_ambiguous_and_sent_once(guarantee: Guarantee, reset: bool) -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)
        if reset:
            hard_close(writer)

    async with wire_server(talk, heard) as url:
        result = await sink(url, guarantee).perform(operation())
    assert isinstance(result, Ambiguous)
    assert result.code == "connection-lost"
    assert (heard.connections, len(heard.requests)) == (1, 1)


def hard_close(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_kept_connection_dropped_on_the_second_request_is_not_tried_again_unseen(reset: bool) -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)
        writer.write(http_answer(b"{}"))
        await hear(reader, heard)
        if reset:
            hard_close(writer)

    async with wire_server(talk, heard) as url:
        sending = sink(url)
        assert isinstance(await sending.perform(operation("k-1")), Accepted)
        assert isinstance(await sending.perform(operation("k-2")), Ambiguous)
    assert heard.connections == 1
    assert [request.count(b"k-2") > 0 for request in heard.requests] == [False, True]


@pytest.mark.parametrize("guarantee", [Lookup(1_000), Unguarded()])
async def test_a_provider_that_would_act_twice_gets_a_fresh_connection_each_time(
    guarantee: Guarantee,
) -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await hear(reader, heard)
            writer.write(http_answer(b"{}"))

    async with wire_server(talk, heard) as url:
        lookup_url = f"{url}/{{key}}" if isinstance(guarantee, Lookup) else None
        sending = sink(url, guarantee, lookup_url=lookup_url)
        for _ in range(3):
            assert isinstance(await sending.perform(operation()), Accepted)
    assert heard.connections == 3


async def test_what_is_not_http_is_ambiguous() -> None:
    async with wire_server(saying(b"\x00\x01\x02 nonsense\r\n\r\n")) as url:
        result = await sink(url).perform(operation())
    assert isinstance(result, Ambiguous)
    assert result.message.isprintable()


async def test_cancelling_midway_is_passed_on_and_nothing_is_sent_again() -> None:
    heard, asked = Heard(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader, heard)
        asked.set()
        await reader.read()

    async with wire_server(talk, heard) as url:
        sending = asyncio.create_task(sink(url).perform(operation()))
        await asyncio.wait_for(asked.wait(), 5)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert len(heard.requests) == 1


async def test_a_lookup_asks_by_key_and_finds_the_effect() -> None:
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"reference": "q-3"})

    async with web_server(handler) as url:
        asking = sink(
            url, Lookup(1_000), lookup_url=f"{url}/quotes/{{key}}?tenant={{tenant}}", headers={"X-Key": "k"}
        )
        assert await asking.lookup(operation("a/b")) == Accepted("q-3")
    assert (seen[0].method, seen[0].raw_path) == ("GET", "/quotes/a%2Fb?tenant=acme")
    assert seen[0].headers["X-Key"] == "k"


async def test_a_lookup_that_finds_nothing_says_so() -> None:
    assert await look_up(lambda: web.Response(status=404)) == NotFound()


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(status=500),
        lambda: web.Response(status=401),
        lambda: web.Response(status=429),
        lambda: web.Response(status=204),
        lambda: web.Response(status=302, headers={"Location": "/login"}),
        lambda: web.Response(text="<html>Please log in</html>", content_type="text/html"),
        lambda: web.Response(body=b" " * 1_000_000),
    ],
)
async def test_any_other_answer_to_a_lookup_proves_nothing(answer: Callable[[], web.Response]) -> None:
    assert isinstance(await look_up(answer), Ambiguous)


async def test_a_provider_that_cannot_be_asked_proves_nothing() -> None:
    url = f"http://127.0.0.1:{await unused_port()}"
    asking = sink(url, ASKABLE, lookup_url=f"{url}/{{key}}")
    assert isinstance(await asking.lookup(operation()), Ambiguous)
    assert isinstance(await sink(url).lookup(operation()), Ambiguous)


@pytest.mark.parametrize(
    ("guarantee", "options"),
    [
        (ASKABLE, {}),
        (Lookup(0), {}),
        (KEYED, {"lookup_url": "https://h/{key}"}),
        (Unguarded(), {"lookup_url": "https://h/{key}"}),
        (ASKABLE, {"lookup_url": "https://h/all"}),
        (ASKABLE, {"lookup_url": "https://h/{input.site}/{key}"}),
        (ASKABLE, {"lookup_url": "https://{key}.h/"}),
        (KEYED, {"secret": ""}),
        (KEYED, {"secret": "whsec_s3cret\N{BULLET}"}),
        (KEYED, {"timeout_ms": 0}),
        (KEYED, {"headers": {"idempotency-key": "x"}}),
    ],
)
def test_a_wrong_declaration_names_the_line(guarantee: Keyed, options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_webhook\.py") as caught:
        sink("https://h", guarantee, **options)
    assert "s3cret" not in str(caught.value)


def test_a_sinks_url_has_no_placeholders() -> None:
    with pytest.raises(DeclarationError, match="placeholders"):
        WebhookSink("s", "https://h/{key}", guarantee=KEYED)


def test_secrets_are_in_no_text_about_the_sink() -> None:
    declared = WebhookSink(
        "s", "https://h/x?k=s3cret", guarantee=KEYED, secret=SECRET, headers={"X-Api-Key": "s3cret"}
    )
    assert "s3cret" not in repr(declared)
    assert SECRET not in repr(declared)
