"""`adapters.http.HttpSource`: what it makes of a provider's answers, the good, the bad and the endless."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from adapters.client import session
from adapters.http import HttpSource
from coordinator.core.canonical import digest
from coordinator.core.evidence import Absent, Answer, Failed, Found, Source, Unchanged
from coordinator.core.money import Money
from coordinator.errors import DeclarationError
from tests.adapters.asking import TRACE, Capacity, Site, ask
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

GOOD = b'{"site":"sg-1","available_hours":40}'
VALUE = Capacity("sg-1", 40)


def source(url: str, **options: Any) -> HttpSource[Capacity]:
    return HttpSource("capacity", f"{url}/sites/{{input.site}}", returns=Capacity, **options)


def json_response(body: bytes = GOOD, status: int = 200, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(body=body, status=status, content_type="application/json", headers=named)


async def read_from(answer: Callable[[], web.Response], **options: Any) -> Answer[Capacity]:
    async with answering(answer) as url:
        return await source(url, **options).read(ask())


async def read_bytes(answer: bytes, **options: Any) -> Answer[Capacity]:
    async with wire_server(saying(answer)) as url:
        return await source(url, **options).read(ask())


def failed(answer: Answer[Capacity], code: str, *, retryable: bool = False) -> Failed:
    assert isinstance(answer, Failed), answer
    assert (answer.code, answer.retryable) == (code, retryable), answer
    assert answer.message.isprintable()
    return answer


def test_it_is_a_source() -> None:
    declared: Source[Capacity] = HttpSource(
        "capacity", "https://planner.example/sites/{input.site}", returns=Capacity
    )
    assert (declared.name, declared.provider, declared.returns) == ("capacity", "planner.example", Capacity)


async def test_a_value_comes_with_its_etag_and_age_and_the_request_says_who_asks() -> None:
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request)
        return json_response(ETag='"7"', Age="3")

    async with web_server(handler) as url:
        answer = await source(url, headers={"X-Api-Key": "s3cret"}).read(ask(Site("sg/1")))
    assert answer == Found(VALUE, '"7"', 3000)
    request = seen[0]
    assert (request.method, request.raw_path) == ("GET", "/sites/sg%2F1")
    assert request.headers["Accept"] == "application/json"
    assert request.headers["traceparent"] == TRACE
    assert request.headers["X-Api-Key"] == "s3cret"
    assert "If-None-Match" not in request.headers
    assert "Cookie" not in request.headers


async def test_without_an_etag_the_revision_is_the_digest_of_what_was_declared() -> None:
    one = await read_from(
        lambda: json_response(b'{"available_hours":40.0,"site":"sg-1","served_at":"10:00"}')
    )
    two = await read_from(
        lambda: json_response(b'{"served_at":"10:01","site":"sg-1", "available_hours":4e1}')
    )
    assert isinstance(one, Found)
    assert one == two
    assert one.revision == digest(
        GOOD.replace(b'{"site":"sg-1","available_hours":40}', b'{"available_hours":40,"site":"sg-1"}')
    )


async def test_a_conditional_read_that_finds_nothing_new_is_unchanged() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.headers.get("If-None-Match") == '"7"':
            return web.Response(status=304)
        return json_response(ETag='"8"')

    async with web_server(handler) as url:
        assert await source(url).read(ask(if_revision='"7"')) == Unchanged()
        assert await source(url).read(ask(if_revision='"6"')) == Found(VALUE, '"8"')


async def test_a_digest_is_never_sent_as_an_etag() -> None:
    async def handler(request: web.Request) -> web.Response:
        return json_response(status=500 if "If-None-Match" in request.headers else 200)

    async with web_server(handler) as url:
        first = await source(url).read(ask())
        assert isinstance(first, Found)
        assert await source(url).read(ask(if_revision=first.revision)) == first


async def test_not_modified_without_having_been_asked_is_no_knowledge() -> None:
    failed(await read_from(lambda: web.Response(status=304)), "unexpected-status")


@pytest.mark.parametrize("status", [404, 410])
async def test_what_the_provider_does_not_know_is_absent(status: int) -> None:
    assert await read_from(lambda: web.Response(status=status)) == Absent()


async def test_the_declarer_says_what_is_absent() -> None:
    failed(await read_from(lambda: web.Response(status=404), absent_on=()), "provider-refused")
    assert await read_from(lambda: web.Response(status=403), absent_on=(403,)) == Absent()


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (500, "provider-error", True),
        (502, "provider-error", True),
        (504, "provider-error", True),
        (408, "provider-error", True),
        (400, "provider-refused", False),
        (401, "provider-refused", False),
        (422, "provider-refused", False),
        (204, "unexpected-status", False),
        (206, "unexpected-status", False),
        (302, "unexpected-status", False),
    ],
)
async def test_every_other_status_is_a_failure(status: int, code: str, retryable: bool) -> None:
    failed(await read_from(lambda: web.Response(status=status)), code, retryable=retryable)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "pause_ms"), [("2", 2000), ("soon", None), ("-1", None), ("9" * 30, 86_400_000)]
)
async def test_a_busy_provider_says_when_to_come_back(status: int, header: str, pause_ms: int | None) -> None:
    answer = failed(
        await read_from(lambda: json_response(b"{}", status, Retry_After=header)),
        "provider-busy",
        retryable=True,
    )
    assert answer.retry_after_ms == pause_ms


async def test_a_pause_may_be_a_date() -> None:
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    answer = failed(
        await read_from(lambda: json_response(b"{}", 503, Retry_After=when)), "provider-busy", retryable=True
    )
    assert answer.retry_after_ms is not None
    assert 50_000 < answer.retry_after_ms <= 60_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"site":"sg-1","available_hours":NaN}',
        b'{"site":"sg-1","available_hours":1e400}',
        b'{"site":"sg-1","available_hours":9007199254740993}',
        b'{"site":"sg-1","site":"sg-2","available_hours":1}',
        b'{"site":"a\\u0000b","available_hours":1}',
        b'{"site":"\\ud800","available_hours":1}',
        b'{"site":"\xff","available_hours":1}',
        b'{"site":"sg-1","available_hours":1,"extra":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"site":"sg-1","available_hours":"40"}',
        b'{"site":"sg-1"}',
        b'{"site":"sg-1","available_hours":1',
        b"[]",
        b"null",
        b"",
    ],
)
async def test_a_body_that_is_not_strict_json_of_the_declared_type_is_malformed(body: bytes) -> None:
    failed(await read_from(lambda: json_response(body)), "malformed-response")


async def test_a_struct_that_forbids_unknown_fields_is_obeyed() -> None:
    class Strict(msgspec.Struct, forbid_unknown_fields=True):
        site: str

    async with answering(json_response) as url:
        answer = await HttpSource("s", f"{url}/x", returns=Strict).read(ask())
    assert isinstance(answer, Failed)
    assert answer.code == "malformed-response"


@pytest.mark.parametrize("kind", ["text/html", "text/plain", "application/octet-stream"])
async def test_what_does_not_call_itself_json_is_not_read(kind: str) -> None:
    failed(await read_from(lambda: web.Response(body=GOOD, content_type=kind)), "wrong-content-type")


async def test_no_content_type_at_all_is_not_json_either() -> None:
    failed(await read_bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), "wrong-content-type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/hal+json"])
async def test_json_by_its_other_names_is_read(kind: str) -> None:
    answer = await read_from(lambda: web.Response(body=GOOD, headers={"Content-Type": kind}))
    assert isinstance(answer, Found)


async def test_twenty_megabytes_are_not_read() -> None:
    failed(await read_from(lambda: json_response(b" " * 20_000_000)), "response-too-large")


async def test_the_bound_is_exact() -> None:
    padded = GOOD + b" " * (1_000 - len(GOOD))
    assert isinstance(await read_from(lambda: json_response(padded), max_bytes=1_000), Found)
    failed(await read_from(lambda: json_response(padded + b" "), max_bytes=1_000), "response-too-large")


async def test_an_endless_stream_is_left_at_the_bound() -> None:
    hung_up = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        try:
            while True:
                writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
                await writer.drain()
        finally:
            hung_up.set()

    async with wire_server(talk) as url:
        failed(await source(url).read(ask()), "response-too-large")
        await asyncio.wait_for(hung_up.wait(), 5)


async def test_a_stream_that_drips_for_ever_ends_with_the_time() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        while True:
            writer.write(b"1\r\n \r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with wire_server(talk) as url:
        failed(await source(url).read(ask(timeout_s=0.3)), "timed-out")


async def test_a_small_body_that_unpacks_to_two_hundred_megabytes_is_left_at_the_bound() -> None:
    bomb = gzip.compress(b" " * 200_000_000)
    assert len(bomb) < 262_144
    tracemalloc.start()
    try:
        failed(await read_bytes(http_answer(bomb, "Content-Encoding: gzip")), "response-too-large")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


async def test_an_honestly_packed_body_is_read() -> None:
    packed = gzip.compress(GOOD)
    assert isinstance(await read_bytes(http_answer(packed, "Content-Encoding: gzip")), Found)


async def test_a_body_that_pretends_to_be_packed_is_a_failure() -> None:
    failed(await read_bytes(http_answer(GOOD, "Content-Encoding: gzip")), "connection-lost", retryable=True)


async def test_a_content_length_that_promises_more_is_a_lost_connection() -> None:
    short = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n" + GOOD
    failed(await read_bytes(short), "connection-lost", retryable=True)


async def test_a_content_length_that_promises_less_is_malformed() -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n" + GOOD
    failed(await read_bytes(cut), "malformed-response")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nConte"])
async def test_an_answer_that_breaks_off_is_a_lost_connection(answer: bytes) -> None:
    failed(await read_bytes(answer), "connection-lost", retryable=True)


@pytest.mark.parametrize(
    "answer", [b"\x00nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"]
)
async def test_what_is_not_http_is_malformed(answer: bytes) -> None:
    failed(await read_bytes(answer), "malformed-response")


async def test_nobody_listening_is_unreachable() -> None:
    failed(await source(f"http://127.0.0.1:{await unused_port()}").read(ask()), "unreachable", retryable=True)


async def test_a_server_without_tls_is_unreachable_over_https() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(http_answer(b"{}", status="400 Bad Request"))

    async with wire_server(talk) as url:
        failed(await source(url.replace("http:", "https:")).read(ask()), "unreachable", retryable=True)


async def test_a_silent_provider_times_out() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with wire_server(talk) as url:
        failed(await source(url).read(ask(timeout_s=0.2)), "timed-out")


async def test_cancelling_a_read_is_passed_on_and_hangs_up() -> None:
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        asked.set()
        assert await reader.read() == b""
        hung_up.set()

    async with wire_server(talk) as url:
        reading = asyncio.create_task(source(url).read(ask()))
        await asyncio.wait_for(asked.wait(), 5)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.wait_for(hung_up.wait(), 5)


async def test_an_error_text_is_cleaned_of_what_cannot_be_stored() -> None:
    answer = failed(
        await read_from(lambda: json_response(b"a\x00b\x1b[31m\xff" + b"x" * 9_000, 400)), "provider-refused"
    )
    assert len(answer.message) <= 500
    assert "a\ufffdb" in answer.message


async def test_an_error_is_explained_in_the_providers_words() -> None:
    answer = failed(
        await read_from(lambda: json_response(b'{"title":"t","detail":"No such site."}', 400)),
        "provider-refused",
    )
    assert answer.message == "400: No such site."


async def test_an_address_with_a_hole_is_never_asked() -> None:
    heard = Heard()
    async with wire_server(saying(http_answer(GOOD)), heard) as url:
        failed(await source(url).read(ask(Site(""))), "no-address")
        failed(await source(url).read(ask(Site(".."))), "no-address")
    assert heard.connections == 0


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_redirect_is_followed_only_if_declared(allowed: bool) -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path.startswith("/sites"):
            return web.Response(status=302, headers={"Location": "/elsewhere"})
        return json_response(ETag='"1"')

    async with web_server(handler) as url:
        answer = await source(url, allow_redirects=allowed).read(ask())
    if allowed:
        assert answer == Found(VALUE, '"1"')
    else:
        failed(answer, "unexpected-status")


async def test_no_header_follows_a_redirect_to_another_origin() -> None:
    heard = Heard()
    async with wire_server(saying(http_answer(GOOD)), heard) as other:

        def away() -> web.Response:
            return web.Response(status=307, headers={"Location": f"{other}/steal"})

        failed(
            await read_from(away, allow_redirects=True, headers={"X-Api-Key": "s3cret"}),
            "redirected-elsewhere",
        )
    assert heard.connections == 0


async def test_redirects_in_a_circle_end() -> None:
    def around() -> web.Response:
        return web.Response(status=302, headers={"Location": "/sites/sg-1"})

    failed(await read_from(around, allow_redirects=True), "redirected-elsewhere")


async def test_cost_confidence_and_units_are_taken_from_the_value() -> None:
    answer = await read_from(
        json_response,
        cost_from=lambda value: Money(int(value.available_hours), "SGD"),
        confidence_from=lambda value: 0.5,
        units_from=lambda value: 2 * int(value.available_hours),
    )
    assert isinstance(answer, Found)
    assert (answer.cost, answer.confidence, answer.units) == (Money(40, "SGD"), 0.5, 80)


async def test_a_callback_that_raises_or_overshoots_is_a_failure() -> None:
    def broken(value: Capacity) -> float:
        raise RuntimeError("a\x00b")

    failed(await read_from(json_response, confidence_from=broken), "source-raised")
    failed(await read_from(json_response, confidence_from=lambda value: 1.5), "malformed-response")
    failed(await read_from(json_response, confidence_from=lambda value: float("nan")), "malformed-response")


async def test_connections_are_kept_alive_and_cookies_are_not_kept() -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await hear(reader, heard)
            writer.write(http_answer(GOOD, "Set-Cookie: a=b"))

    async with wire_server(talk, heard) as url:
        for _ in range(3):
            assert isinstance(await source(url).read(ask()), Found)
    assert (heard.connections, len(heard.requests)) == (1, 3)
    assert not any(b"cookie" in request.lower() for request in heard.requests)


async def test_a_reading_of_something_absent_keeps_its_connection() -> None:
    heard = Heard()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await hear(reader, heard)
            writer.write(http_answer(b'{"title":"no"}', status="404 Not Found"))

    async with wire_server(talk, heard) as url:
        for _ in range(3):
            assert await source(url).read(ask()) == Absent()
    assert heard.connections == 1


async def test_one_loop_has_one_session() -> None:
    assert session() is session()
    assert session(fresh=True) is not session()


def test_secrets_are_in_no_text_about_the_source() -> None:
    declared = HttpSource("s", "https://h/x?key=s3cret", returns=Capacity, headers={"X-Api-Key": "s3cret"})
    assert "s3cret" not in repr(declared)


@pytest.mark.parametrize(
    "options",
    [
        {"returns": dict},
        {"max_bytes": 0},
        {"absent_on": (200,)},
        {"headers": {"If-None-Match": "x"}},
        {"headers": {"bad name": "x"}},
        {"headers": {"X-Key": "s3cret\r\nX-Other: y"}},
    ],
)
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_http\.py") as caught:
        HttpSource("s", "https://h/x", **{"returns": Capacity, **options})
    assert "s3cret" not in str(caught.value)
