"""A TCP proxy between an adapter and its provider that breaks the conversation at the moment that matters.

That moment is when the client has sent its last bytes before the provider acts: `decisive`, some bytes that only then go over the
wire (the operation's key in a request of HTTP, ``\\r\\n.\\r\\n`` in SMTP, ``COMMIT`` in PostgreSQL's protocol; none at all: the
first bytes of the client). Before it everything passes, so that greetings, logins and handshakes are as they always are.

    Pass          nothing is wrong
    Refuse        nobody listens; connections there are end
    CutRequest    the decisive bytes never reach the provider; the connection is reset
    LoseReply     the provider acts, and the connection is reset in place of its reply
    Swallow       the provider acts, and its reply never comes
    CutReply      the provider acts, and the connection ends after so many bytes of its reply
    Delay         the reply comes late
    Junk          the provider acts, and something else comes in place of its reply

`sends` counts how often decisive bytes were on their way, whatever became of them: a client that tries again by itself shows.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

PIECE = 65_536
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: closing sends RST, not FIN."""


@dataclass(frozen=True)
class Pass:
    pass


@dataclass(frozen=True)
class Refuse:
    pass


@dataclass(frozen=True)
class CutRequest:
    pass


@dataclass(frozen=True)
class LoseReply:
    pass


@dataclass(frozen=True)
class Swallow:
    pass


@dataclass(frozen=True)
class CutReply:
    after_bytes: int = 1


@dataclass(frozen=True)
class Delay:
    seconds: float


@dataclass(frozen=True)
class Junk:
    said: bytes


Fault: TypeAlias = Pass | Refuse | CutRequest | LoseReply | Swallow | CutReply | Delay | Junk


class Proxy:
    """Use `proxied`."""

    def __init__(self, provider: tuple[str, int], decisive: bytes) -> None:
        self._provider = provider
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._talking: set[asyncio.Task[None]] = set()
        self.decisive = decisive
        self.fault: Fault = Pass()
        self.host, self.port = "127.0.0.1", 0
        self.sends = 0
        self.sent = asyncio.Event()

    async def set(self, fault: Fault, *, decisive: bytes | None = None) -> None:
        """From now on, also for connections there are. `sends` begins again at 0."""
        self.fault, self.sends = fault, 0
        self.sent.clear()
        if decisive is not None:
            self.decisive = decisive
        if isinstance(fault, Refuse):
            await self.stop()
        elif self._server is None:
            await self.listen()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._talk, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nobody listens any more; every connection there was has ended when this returns."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        if self._talking:
            await asyncio.wait(self._talking)
        for _ in range(3):  # so that clients in this loop hear of it, too
            await asyncio.sleep(0.001)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        self._writers.add(writer)
        try:
            with suppress(OSError):
                from_provider, to_provider = await asyncio.open_connection(*self._provider)
                self._writers.add(to_provider)
                try:
                    await _Conversation(self, reader, writer, from_provider, to_provider).run()
                finally:
                    to_provider.transport.abort()
                    self._writers.discard(to_provider)
        finally:
            writer.close()
            self._writers.discard(writer)
            self._talking.discard(task)


class _Conversation:
    """One connection. ``decided``: the decisive bytes were on their way and no reply to them has passed yet."""

    def __init__(
        self,
        proxy: Proxy,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_provider: asyncio.StreamReader,
        to_provider: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._from_client, self._to_client = from_client, to_client
        self._from_provider, self._to_provider = from_provider, to_provider
        self._decided = False
        self._tail = b""

    async def run(self) -> None:
        """Until either side ends."""
        both = [asyncio.create_task(self._requests()), asyncio.create_task(self._replies())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _requests(self) -> None:
        while data := await self._from_client.read(PIECE):
            if self._is_decisive(data):
                if not self._decided:
                    self._proxy.sends += 1
                    self._proxy.sent.set()
                self._decided = True
                if isinstance(self._proxy.fault, CutRequest):
                    self._reset_client()
                    return
            self._to_provider.write(data)
            await self._to_provider.drain()

    def _is_decisive(self, data: bytes) -> bool:
        decisive = self._proxy.decisive
        seen = self._tail + data
        self._tail = seen[len(seen) - len(decisive) + 1 :] if decisive else b""
        return decisive in seen

    async def _replies(self) -> None:
        while data := await self._from_provider.read(PIECE):
            if self._decided and not await self._may_pass(data):
                return
            self._decided = False
            self._to_client.write(data)
            await self._to_client.drain()

    async def _may_pass(self, reply: bytes) -> bool:
        match self._proxy.fault:
            case Pass() | Refuse() | CutRequest():
                return True
            case Delay(seconds):
                await asyncio.sleep(seconds)
                return True
            case LoseReply():
                self._reset_client()
            case Swallow():
                await asyncio.Event().wait()
            case CutReply(after_bytes):
                await self._say(reply[:after_bytes])
            case Junk(said):
                await self._say(said)
        return False

    async def _say(self, last_words: bytes) -> None:
        self._to_client.write(last_words)
        await self._to_client.drain()
        self._to_client.close()
        await self._to_client.wait_closed()

    def _reset_client(self) -> None:
        raw = self._to_client.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._to_client.transport.abort()


@asynccontextmanager
async def proxied(provider: tuple[str, int], *, decisive: bytes = b"") -> AsyncIterator[Proxy]:
    """A proxy in front of ``provider`` (host and port), on a loopback port of its own."""
    proxy = Proxy(provider, decisive)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.stop()
