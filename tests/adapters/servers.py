"""Real servers on a loopback port: one that speaks HTTP well, one that writes whatever bytes a test likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Wire = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def web_server(handler: Handler) -> AsyncIterator[str]:
    """Yields the base URL; every path and method goes to `handler`."""
    app = web.Application(client_max_size=2**25)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(response: Callable[[], web.Response]) -> AsyncIterator[str]:
    async def handler(request: web.Request) -> web.Response:
        return response()

    async with web_server(handler) as url:
        yield url


@dataclass
class Heard:
    """What a wire server was sent, request by request, and on how many connections."""

    requests: list[bytes] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def wire_server(talk: Wire, heard: Heard | None = None) -> AsyncIterator[str]:
    """Yields the base URL; `talk` has each connection to itself, which is closed when it returns."""
    talking: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talking.add(task)
        if heard is not None:
            heard.connections += 1
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            talking.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for task in list(talking):
            task.cancel()
        await server.wait_closed()


async def hear(reader: asyncio.StreamReader, heard: Heard | None = None) -> bytes:
    """Reads one whole request with a Content-Length or no body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    body = await reader.readexactly(length)
    if heard is not None:
        heard.requests.append(head + body)
    return head + body


def saying(answer: bytes) -> Wire:
    """Hears one request, answers with these very bytes and hangs up."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)
        writer.write(answer)
        await writer.drain()

    return talk


def http_answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


async def unused_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
