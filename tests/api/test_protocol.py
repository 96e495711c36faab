"""The HTTP protocol against clients that are slow, too big, or do not speak HTTP; over real sockets."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import uvicorn
from anyio.abc import SocketStream

from coordinator.api.protocol import PatientProtocol
from coordinator.api.server import listen
from tests.support import eventually

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


class Hurried(PatientProtocol):
    arrival_s = 0.2
    max_header_bytes = 4096
    max_connections = 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Takes longer than a request may take to arrive, if the path says so; then answers with the length of the body."""
    size = 0
    while (message := await receive())["type"] == "http.request":
        size += len(message["body"])
        if not message["more_body"]:
            break
    if scope["path"] == "/slow":
        await anyio.sleep(3 * Hurried.arrival_s)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"%5d" % size})


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    config = uvicorn.Config(app, http=Hurried, lifespan="off", log_config=None, ws="none", access_log=False)
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server._serve, [listener])
            await eventually(lambda: server.started)
            yield listener.getsockname()[1]
            server.should_exit = True


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving() as found:
        yield found


async def connect(port: int) -> SocketStream:
    return await anyio.connect_tcp("127.0.0.1", port)


async def heard(stream: SocketStream) -> bytes:
    """Everything until the server closes."""
    said = b""
    with anyio.fail_after(5):
        try:
            while True:
                said += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return said


async def exactly(stream: SocketStream, end: bytes) -> bytes:
    """One answer, up to its known end."""
    said = b""
    with anyio.fail_after(5):
        while not said.endswith(end):
            said += await stream.receive()
    return said


async def problem(stream: SocketStream) -> dict[str, Any]:
    head, _, body = (await heard(stream)).partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    told: dict[str, Any] = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % told["status"])
    return told


async def test_a_connection_that_says_nothing_is_closed(port: int) -> None:
    async with await connect(port) as stream:
        assert await heard(stream) == b""


async def test_headers_that_trickle_in_are_not_waited_for(port: int) -> None:
    async with await connect(port) as stream:
        await stream.send(GET)
        assert await heard(stream) == b""


async def test_a_body_that_trickles_in_is_not_waited_for(port: int) -> None:
    async with await connect(port) as stream:
        await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
        assert await heard(stream) == b""


async def test_a_slow_answer_is_waited_for(port: int) -> None:
    async with await connect(port) as stream:
        await stream.send(
            b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
        )
        assert (await heard(stream)).endswith(b"    3")


async def test_a_connection_serves_many_requests_and_the_second_may_not_trickle_either(port: int) -> None:
    async with await connect(port) as stream:
        for _ in range(3):
            await stream.send(GET + b"\r\n")
            assert (await exactly(stream, b"    0")).startswith(b"HTTP/1.1 200")
        await stream.send(GET)
        assert await heard(stream) == b""


@pytest.mark.parametrize(
    "headers",
    [b"X: " + b"a" * 5000 + b"\r\n", b"X: " + b"a" * 9000, b"X: y\r\n" * 1500],
    ids=["one", "endless", "many"],
)
async def test_headers_that_are_too_large_are_a_431(port: int, headers: bytes) -> None:
    async with await connect(port) as stream:
        await stream.send(GET + headers + b"\r\n")
        assert (await problem(stream))["code"] == "headers-too-large"


async def test_a_large_body_does_not_count_as_headers(port: int) -> None:
    async with await connect(port) as stream:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 50000\r\n\r\n"
        await stream.send(head + b"x" * 50_000)
        assert (await heard(stream)).endswith(b"50000")


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        GET + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        GET + b"X: a\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"\x16\x03\x01\x02\x00",
    ],
    ids=["words", "smuggled", "two lengths", "folded", "bare line feeds", "tls"],
)
async def test_what_is_not_http_is_a_400(port: int, said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    async with await connect(port) as stream:
        await stream.send(said)
        assert (await problem(stream))["code"] == "malformed-request"


async def test_one_connection_too_many_is_told_to_come_back(port: int) -> None:
    async with anyio.create_task_group() as tasks:
        streams = [await connect(port) for _ in range(Hurried.max_connections)]
        async with await connect(port) as late:
            assert (await problem(late))["code"] == "overloaded"
        for stream in streams:
            tasks.start_soon(stream.aclose)
    async with await connect(port) as stream:
        await stream.send(GET + b"Connection: close\r\n\r\n")
        assert (await heard(stream)).startswith(b"HTTP/1.1 200")
