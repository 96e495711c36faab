"""Mail servers on a loopback port: a real one (aiosmtpd) that keeps what it accepts, and one that says what a test likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default

from aiosmtpd.smtp import SMTP, Envelope, Session


@dataclass
class MailServer:
    host: str = "127.0.0.1"
    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    envelopes: list[Envelope] = field(default_factory=list)

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address.startswith("refused@"):
            return "550 5.1.1 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        assert isinstance(envelope.content, bytes)
        mail = message_from_bytes(envelope.content, policy=default)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        self.envelopes.append(envelope)
        return f"250 2.0.0 queued as Q{len(self.mails)}"


@asynccontextmanager
async def mail_server() -> AsyncIterator[MailServer]:
    made = MailServer()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(made, hostname="mail.example", loop=loop), made.host, 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


@dataclass
class Script:
    """Replies by the first word of a command, ``.`` for the end of the message and ``hello`` for the greeting. An empty reply hangs
    up; one of ``...`` stays silent."""

    replies: Mapping[str, str]
    heard: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    message_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        in_message = False
        going_on = await self._say(writer, "hello", "220 mail.example")
        while going_on and (sent := await reader.readline()):
            line = sent.decode("ascii", "replace").rstrip("\r\n")
            if in_message and line != ".":
                continue
            word = line.split(" ")[0].split(":")[0].upper()
            self.heard.append(word)
            in_message = word == "DATA"
            if word == ".":
                self.message_over.set()
            going_on = await self._say(writer, word, "354 go on" if in_message else "250 OK")
            in_message = in_message and going_on and self.replies.get("DATA", "354").startswith("354")
        writer.close()

    async def _say(self, writer: asyncio.StreamWriter, word: str, default: str) -> bool:
        reply = self.replies.get(word, default)
        if reply == "...":
            await asyncio.Event().wait()
        writer.write(f"{reply}\r\n".encode() if reply else b"")
        await writer.drain()
        return bool(reply)


@asynccontextmanager
async def scripted(**replies: str) -> AsyncIterator[Script]:
    """``MAIL``, ``RCPT``, ``DATA`` ... as names; ``end`` for the message's end, ``hello`` for the greeting."""
    script = Script({("." if name == "end" else name): reply for name, reply in replies.items()})
    talking: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talking.add(task)
        try:
            await script.talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            talking.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    try:
        yield script
    finally:
        server.close()
        for task in list(talking):
            task.cancel()
        await server.wait_closed()
