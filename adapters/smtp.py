"""An effect as a mail. SMTP has no keys and no lookup: after the message has left, only the server's reply says what became of it.

    no connection, no TLS session, greeting or login          NotSent
    4xx to MAIL, RCPT or DATA                                 NotSent
    5xx to login, MAIL, RCPT or DATA                          Rejected; with several recipients, if one of them is refused
    4xx after the message, but for 421                        NotSent: the server declined responsibility (RFC 5321, 4.2.1)
    5xx after the message                                     Rejected
    421, silence, a reset or nonsense after the message       Ambiguous: it may be on its way
    2xx after the message                                     Accepted; the server's text, with its queue id, is the reference

Nothing is tried twice here. Every attempt has the same Message-ID, made from the operation's key, by which a person can find the
mail in the server's log, and by which many mailboxes drop a second copy.

What goes into headers is checked: a line break or another control character in an address or a subject is Rejected, so no payload
can add a recipient or a header. Addresses are ASCII; names, subject and text may be anything.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import format_datetime
from hashlib import sha256
from typing import Literal, TypeAlias

import aiosmtplib

from adapters.body import CONTENT, Content
from adapters.declare import checked_headers, declared_at
from adapters.template import NoValue, Path, Template
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    LookupResult,
    NotSent,
    Operation,
    Rejected,
    SendResult,
    Unguarded,
)
from coordinator.core.evidence import clean_text
from coordinator.errors import DeclarationError

Tls: TypeAlias = Literal["starttls", "implicit", "none"]
MAX_RECIPIENTS = 50
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_IN_MESSAGE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_RESERVED = frozenset(
    {"from", "to", "cc", "bcc", "subject", "date", "message-id", "content-type", "mime-version"}
)
_SHUTTING_DOWN = 421


class SmtpSink:
    """Mail through one server. ``to``, ``subject`` and ``text`` are templates over the operation (see `adapters.body`); ``to`` may
    also be a placeholder of a list of addresses. ``sender`` is fixed: an address, with a name before it if you like.

    ``tls`` is STARTTLS on the port of message submission by default, and required if chosen: there is no fallback to plain text.
    ``username`` and ``password`` are shown nowhere, and are refused together with ``tls="none"``. ``timeout_ms`` bounds everything,
    connecting and waiting for the last reply included. Raises `DeclarationError`.
    """

    guarantee = Unguarded()

    def __init__(
        self,
        name: str,
        host: str,
        *,
        sender: str,
        port: int = 587,
        tls: Tls = "starttls",
        username: str | None = None,
        password: str | None = None,
        to: str = "{payload.to}",
        subject: str = "{payload.subject}",
        text: str = "{payload.text}",
        headers: Mapping[str, str] | None = None,
        timeout_ms: int = 30_000,
        provider: str | None = None,
        local_hostname: str = "localhost",
    ) -> None:
        where, what = declared_at(), f"sink {name!r}"
        if tls not in ("starttls", "implicit", "none"):
            raise DeclarationError(f"{what}: tls is none of starttls, implicit, none", where)
        if username is not None and tls == "none":
            raise DeclarationError(f"{what}: a password does not go over the wire without TLS", where)
        if not 1 <= timeout_ms <= 600_000:
            raise DeclarationError(f"{what}: timeout_ms must be within 1..600000", where)
        try:
            self._sender = _address(sender)
            self._headers = {
                each: _clean(value, each)
                for each, value in checked_headers(headers, _RESERVED, what, where).items()
            }
            _message(self._sender, [self._sender], "s", "t", "<k@x>", self._headers)
        except (_Malformed, MessageError, ValueError) as error:
            raise DeclarationError(f"{what}: {error}", where) from None
        self.name = name
        self.provider = provider or host
        self.timeout_ms = timeout_ms
        self._host, self._port, self._tls = host, port, tls
        self._username, self._password = username, password
        self._local_hostname = local_hostname
        self._to = Template(to, CONTENT, what, where)
        self._to_path: Path[Content] | None = (
            self._to.paths[0] if len(self._to.paths) == 1 and to == f"{{{self._to.paths[0].text}}}" else None
        )
        self._subject = Template(subject, CONTENT, what, where)
        self._text = Template(text, CONTENT, what, where)

    def __repr__(self) -> str:
        return f"SmtpSink({self.name!r}, provider={self.provider!r})"

    async def perform(self, operation: Operation) -> SendResult:
        """One attempt, on a connection of its own. Cancelling it drops the connection and is passed on."""
        try:
            recipients, message = self._mail(operation)
        except (NoValue, _Malformed, MessageError, ValueError) as error:
            return Rejected("malformed-mail", clean_text(str(error)))
        attempt = _Attempt()
        client = aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            use_tls=self._tls == "implicit",
            start_tls=self._tls == "starttls",
            username=self._username,
            password=self._password,
            local_hostname=self._local_hostname,
            timeout=self.timeout_ms / 1000,
        )
        try:
            async with asyncio.timeout(self.timeout_ms / 1000):
                return await self._send(client, recipients, message, attempt)
        except aiosmtplib.SMTPResponseException as error:
            return _refused(error, attempt.left)
        except (aiosmtplib.SMTPException, OSError, TimeoutError, ValueError) as error:
            code = "timed-out" if isinstance(error, TimeoutError) else "connection-lost"
            return Ambiguous(code, _words(error)) if attempt.left else NotSent(code, _words(error))
        finally:
            client.close()

    async def lookup(self, operation: Operation) -> LookupResult:
        return Ambiguous("no-lookup", "a mail server can't be asked what it sent")

    def _mail(self, operation: Operation) -> tuple[list[str], bytes]:
        """Raises `NoValue` or `_Malformed`."""
        content = Content(operation)
        to = [_address(each) for each in self._recipients(content)]
        message = _message(
            self._sender,
            to,
            _clean(self._subject.plain(content), "the subject"),
            self._text.plain(content),
            _message_id(operation.key, self._sender.domain),
            self._headers,
        )
        return [each.addr_spec for each in to], message.as_bytes(policy=SMTP_POLICY)

    def _recipients(self, content: Content) -> list[str]:
        given = self._to_path.value(content) if self._to_path else None
        if not isinstance(given, list):
            return [self._to.plain(content)]
        if not 1 <= len(given) <= MAX_RECIPIENTS or not all(isinstance(each, str) for each in given):
            raise _Malformed(f"{self._to_path and self._to_path.text} is not 1..{MAX_RECIPIENTS} addresses")
        return [str(each) for each in given]

    async def _send(
        self, client: aiosmtplib.SMTP, recipients: list[str], message: bytes, attempt: _Attempt
    ) -> SendResult:
        await client.connect()
        await client.mail(self._sender.addr_spec)
        for recipient in recipients:
            await client.rcpt(recipient)
        attempt.left = True
        reply = await client.data(message)
        return Accepted(clean_text(f"{reply.code} {reply.message}"))


class _Attempt:
    """``left``: DATA is on its way, so that from now on only a reply says what became of the message."""

    left = False


class _Malformed(ValueError):
    """No mail can be made of this."""


def _refused(error: aiosmtplib.SMTPResponseException, left: bool) -> SendResult:
    why = clean_text(f"{error.code} {error.message}")
    if left and 200 <= error.code <= 299:
        return Accepted(why)
    if left and error.code == _SHUTTING_DOWN:
        return Ambiguous("server-shutting-down", why)
    if 500 <= error.code <= 599:
        return Rejected("server-refused", why)
    if left and not 400 <= error.code <= 499:
        return Ambiguous("malformed-reply", why)
    return NotSent("server-busy", why)


def _address(written: str) -> Address:
    """``a@b.example`` or ``Some Name <a@b.example>``. Raises `_Malformed`."""
    written = _clean(written, "an address").strip()
    name, bracket, rest = written.rpartition("<")
    spec = rest.removesuffix(">") if bracket else written
    if (bracket and not rest.endswith(">")) or not _ADDRESS.match(spec):
        raise _Malformed("an address is not like a@b.example or Some Name <a@b.example>")
    return Address(display_name=name.strip().strip('"'), addr_spec=spec)


def _clean(value: str, what: str) -> str:
    if _CONTROL.search(value):
        raise _Malformed(f"{what} contains a line break or another control character")
    return value


def _message(
    sender: Address, to: list[Address], subject: str, text: str, id: str, headers: Mapping[str, str]
) -> EmailMessage:
    message = EmailMessage(policy=SMTP_POLICY)
    message["From"], message["To"], message["Subject"] = sender, to, subject
    message["Date"], message["Message-ID"] = format_datetime(datetime.now(UTC)), id
    message["Auto-Submitted"] = "auto-generated"
    for name, value in headers.items():
        message[name] = value
    message.set_content(text, cte="quoted-printable")
    return message


def _message_id(key: str, domain: str) -> str:
    left = key if _IN_MESSAGE_ID.match(key) and ".." not in key and key.strip(".") == key else ""
    return f"<{left or sha256(key.encode()).hexdigest()}@{domain}>"


def _words(error: BaseException) -> str:
    return clean_text(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
