"""What sources and sinks read off an HTTP response without trusting it: a bounded body, Retry-After, an error's own words."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp

from coordinator.core.canonical import InvalidJson, JsonValue, parse
from coordinator.core.evidence import clean_text

SMALL_BODY = 65_536
MAX_RETRY_AFTER_MS = 86_400_000
PATIENCE_S = 2.0
"""How long to wait for a body that is not needed: the status alone already decides."""


class BodyTooLarge(Exception):
    """The body went past its bound; no more of it is read and the connection is closed."""


async def bounded_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read at most ``max_bytes``, counted after decompression, which aiohttp does piece by piece. Raises `BodyTooLarge`."""
    if (response.content_length or 0) > max_bytes:
        response.close()
        raise BodyTooLarge
    first = await response.content.readany()
    pieces, size = [first], len(first)
    while not response.content.at_eof():
        if size > max_bytes:
            break
        pieces.append(await response.content.readany())
        size += len(pieces[-1])
    if size > max_bytes:
        response.close()
        raise BodyTooLarge
    return b"".join(pieces)


async def spare_body(response: aiohttp.ClientResponse) -> bytes:
    """The body if it is small, sound and there soon; else nothing, and the connection is closed."""
    try:
        if response.content.is_eof():  # arrived whole, with the head: nothing to wait for
            return await bounded_body(response, SMALL_BODY)
        async with asyncio.timeout(PATIENCE_S):
            return await bounded_body(response, SMALL_BODY)
    except (BodyTooLarge, TimeoutError, aiohttp.ClientError):
        response.close()
        return b""


def retry_after_ms(response: aiohttp.ClientResponse) -> int | None:
    """``Retry-After`` (RFC 9110, 10.2.3: seconds or a date), at most a day; None if there is none or it is no such thing."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return min(int(text[:9]) * 1000, MAX_RETRY_AFTER_MS)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return min(max(int((when - datetime.now(UTC)).total_seconds() * 1000), 0), MAX_RETRY_AFTER_MS)


def json_object(body: bytes) -> dict[str, JsonValue]:
    """The body as a JSON object; empty for anything else."""
    try:
        value = parse(body)
    except InvalidJson:
        return {}
    return value if isinstance(value, dict) else {}


def explanation(status: int, body: bytes) -> str:
    """``<status>: <why>``, from a problem document (RFC 9457), another JSON error, or the first words of a text."""
    said = json_object(body)
    for member in ("detail", "title", "message", "error"):
        if isinstance(words := said.get(member), str):
            return clean_text(f"{status}: {words}")
    return clean_text(f"{status}: {body[:200].decode('utf-8', 'replace')}" if body else f"{status}")
