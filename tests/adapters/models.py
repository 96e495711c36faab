"""A server that speaks the chat completions protocol, as well or as badly as a test likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.adapters.servers import web_server
from tests.support import eventually

USAGE = {"prompt_tokens": 1_000, "completion_tokens": 500, "total_tokens": 1_500}
Say = Callable[[web.StreamResponse], Awaitable[None]]


def chunk(content: str | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": delta | ({} if content is None else {"content": content}),
                "finish_reason": finish,
            }
        ],
        "usage": None,
    }


def usage(**counts: int) -> dict[str, Any]:
    return {"id": "c-1", "choices": [], "usage": counts or USAGE}


def encoded(*chunks: dict[str, Any] | str) -> bytes:
    """As server-sent events; a text is sent as it is."""
    return b"".join(
        f"data: {each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)}\n\n".encode()
        for each in chunks
    )


def answer(text: str, finish: str | None = "stop", step: int = 7) -> list[dict[str, Any] | str]:
    """The whole stream of an answer, a few characters at a time."""
    pieces = [text[n : n + step] for n in range(0, len(text), step)]
    last = [chunk(None, finish)] if finish else []
    return [chunk("", role="assistant"), *map(chunk, pieces), *last, usage(), "[DONE]"]


@dataclass
class Model:
    """``url`` is its base URL. ``asked`` and ``headers`` are what it was sent."""

    url: str = ""
    asked: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def model(say: Say | Iterable[dict[str, Any] | str] | web.Response) -> AsyncIterator[Model]:
    """It answers with a stream of these chunks, with whatever ``say`` writes into one, or with a response that is none."""
    made = Model()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        made.asked.append(await request.json())
        made.headers.append(dict(request.headers))
        if isinstance(say, web.Response):
            return web.Response(body=say.body, status=say.status, headers=say.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            if callable(say):
                await say(response)
            else:
                await response.write(encoded(*say))
        except (ConnectionError, asyncio.CancelledError):
            made.gone.set()
            raise
        return response

    async with web_server(handler) as url:
        made.url = f"{url}/v1"
        yield made


async def until_gone(response: web.StreamResponse) -> None:
    """Say nothing more, until the client has closed the connection; then end as if that had been noticed by writing."""
    assert response._req is not None
    transport = response._req.transport
    await eventually(lambda: transport is None or transport.is_closing())
    raise ConnectionError


def cut(response: web.StreamResponse) -> None:
    """End the connection in the middle of the stream."""
    assert response._req is not None
    assert response._req.transport is not None
    response._req.transport.close()
