"""Request bodies: bounded while they are read, one meaning each, and exactly the fields of their type.

Checks come in the order of their cost: declared length, media type, length while reading, JSON (`core.canonical.parse`), type.
Whatever fails, nothing was stored yet.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from litestar.types import Receive, Scope

from coordinator.api.headers import values
from coordinator.api.problems import UnsupportedMediaType
from coordinator.core.canonical import InvalidJson, JsonValue, parse
from coordinator.core.money import Money
from coordinator.core.pointer import located, shortened
from coordinator.errors import BodyTooLarge, MalformedRequest

T = TypeVar("T")


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object without members."""


_JSON_TYPE = re.compile(
    r"application/(?:[a-z0-9!#$&^_.+-]+\+)?json\s*(?:;\s*charset\s*=\s*\"?utf-8\"?\s*)?;?\s*\Z", re.IGNORECASE
)


async def read_json(scope: Scope, receive: Receive, limit: int) -> JsonValue:
    """The body as strict JSON. Raises `BodyTooLarge`, `UnsupportedMediaType`, `MalformedRequest`."""
    _check_length(scope, limit)
    _check_media_type(scope)
    return parsed(await _read(receive, limit))


def parsed(text: bytes) -> JsonValue:
    """A whole body as strict JSON. Raises `MalformedRequest`."""
    try:
        return parse(text)
    except InvalidJson as error:
        detail = shortened(error.message)
        raise MalformedRequest(
            f"The body is not acceptable JSON: {detail}.", [(error.pointer, detail)]
        ) from None


async def read_bytes(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body as it was sent, for whoever checks a signature over it before anything else. Raises `BodyTooLarge`."""
    _check_length(scope, limit)
    return await _read(receive, limit)


def typed(body: JsonValue, kind: type[T]) -> T:
    """``body`` as a struct, with no field too many, too few or of another type. Raises `MalformedRequest`."""
    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as error:
        pointer, what = located(str(error))
        raise MalformedRequest(f"The body does not fit: {what}.", [(pointer, what)]) from None


def check_nothing(body: bytes) -> None:
    """A body where none is asked for: none, or an object without members. Raises `MalformedRequest`."""
    if body:
        typed(parsed(body), Nothing)


def check_cost(cost: Money | None) -> None:
    """An amount of money as it is sent is not less than nothing. Raises `MalformedRequest`."""
    if cost is not None and cost.amount_minor < 0:
        raise MalformedRequest("The cost is negative.", [("/cost/amount_minor", "must not be negative")])


def _check_length(scope: Scope, limit: int) -> None:
    for declared in values(scope, b"content-length"):
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large(limit)


def _check_media_type(scope: Scope) -> None:
    for given in values(scope, b"content-type"):
        if not _JSON_TYPE.match(given.strip()):
            raise UnsupportedMediaType("Send JSON in UTF-8: Content-Type: application/json.")
    for coding in values(scope, b"content-encoding"):
        if coding.strip().lower() not in ("", "identity"):
            raise UnsupportedMediaType("Send the body without Content-Encoding.")


async def _read(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise MalformedRequest("The connection was closed before the body was complete.")
        if message["type"] != "http.request":
            raise AssertionError(f"the server sent {message['type']}")
        chunk = message["body"]
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        if not message["more_body"]:
            return b"".join((*chunks, chunk)) if chunks else chunk
        chunks.append(chunk)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"A body may have at most {limit} bytes.", max_body_bytes=limit)
