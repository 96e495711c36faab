"""A TCP proxy in front of PostgreSQL that can lose a COMMIT, or its answer, or the whole network, exactly when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

COMMIT = b"COMMIT\x00"
"""How a COMMIT ends on the wire: the simple query message, which asyncpg sends in one piece."""


class Proxy:
    """``answers_to_lose``: so many COMMITs reach the server, but their answers are lost with the connection.
    ``commits_to_lose``: so many never reach it. ``statements_to_lose``: the connection ends instead of carrying a statement
    with this text."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.answers_to_lose = 0
        self.commits_to_lose = 0
        self.statement_to_lose: bytes | None = None
        self.lost = 0
        self.down = False

    def serve_at(self, port: int) -> None:
        account = f"{self._server.username}:{self._server.password}"
        self.url = urlunsplit(self._server._replace(netloc=f"{account}@127.0.0.1:{port}"))

    def cut(self) -> None:
        """End every connection there is."""
        for writer in self._writers:
            writer.transport.abort()

    def go_down(self) -> None:
        self.down = True
        self.cut()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        from_server, to_server = await asyncio.open_connection(self._server.hostname, self._server.port)
        both = {writer, to_server}
        self._writers |= both
        mute = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._requests(reader, to_server, mute, both))
                tasks.create_task(self._answers(from_server, writer, mute, both))
        except* OSError:
            pass
        finally:
            self._writers -= both
            for end in both:
                end.close()

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        mute: asyncio.Event,
        both: set[asyncio.StreamWriter],
    ) -> None:
        while data := await reader.read(65536):
            if self.statement_to_lose is not None and self.statement_to_lose in data:
                self.statement_to_lose = None
                self._lose(both)
            elif data.endswith(COMMIT) and self.commits_to_lose:
                self.commits_to_lose -= 1
                self._lose(both)
            elif data.endswith(COMMIT) and self.answers_to_lose:
                self.answers_to_lose -= 1
                mute.set()
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _answers(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        mute: asyncio.Event,
        both: set[asyncio.StreamWriter],
    ) -> None:
        while data := await reader.read(65536):
            if mute.is_set():
                self._lose(both)
            writer.write(data)
            await writer.drain()
        writer.close()

    def _lose(self, both: set[asyncio.StreamWriter]) -> None:
        self.lost += 1
        for writer in both:
            writer.transport.abort()
        raise ConnectionResetError("lost on purpose")


@asynccontextmanager
async def proxy(url: str) -> AsyncIterator[Proxy]:
    made = Proxy(url)
    server = await asyncio.start_server(made.carry, "127.0.0.1", 0)
    made.serve_at(server.sockets[0].getsockname()[1])
    try:
        yield made
    finally:
        server.close()
        made.cut()
