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
from coordinator.errors import BodyTooLarge, MalformedRequest

T = TypeVar("T")

MAX_DETAIL = 500
_JSON_TYPE = re.compile(
    r"application/(?:[a-z0-9!#$&^_.+-]+\+)?json\s*(?:;\s*charset\s*=\s*\"?utf-8\"?\s*)?;?\s*\Z", re.IGNORECASE
)
_AT_PATH = re.compile(r"(?P<what>.*) - at `(?P<key>key in )?\$?(?P<path>.*)`\Z", re.DOTALL)
_MEMBER = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_NAMED_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>.*)`\Z", re.DOTALL)


async def read_json(scope: Scope, receive: Receive, limit: int) -> JsonValue:
    """The body as strict JSON. Raises `BodyTooLarge`, `UnsupportedMediaType`, `MalformedRequest`."""
    _check_length(scope, limit)
    _check_media_type(scope)
    text = await _read(receive, limit)
    try:
        return parse(text)
    except InvalidJson as error:
        detail = _short(error.message)
        raise MalformedRequest(
            f"The body is not acceptable JSON: {detail}.", [(error.pointer, detail)]
        ) from None


def typed(body: JsonValue, kind: type[T]) -> T:
    """``body`` as a struct, with no field too many, too few or of another type. Raises `MalformedRequest`."""
    try:
        return msgspec.convert(body, kind, strict=True)
    except msgspec.ValidationError as error:
        pointer, what = located(str(error))
        raise MalformedRequest(f"The body does not fit: {what}.", [(pointer, what)]) from None


def located(message: str) -> tuple[str, str]:
    """A validation error's text as a JSON pointer (RFC 6901) and what is wrong there. The pointer ends at the nearest member
    whose name the error tells."""
    at = _AT_PATH.match(message)
    what, path = (at["what"], at["path"]) if at else (message, "")
    pointer = ""
    for member in _MEMBER.finditer(path):
        if member[0] == "[...]":
            break
        pointer += "/" + _escaped(member["name"] or member["index"])
    named = _NAMED_FIELD.match(what)
    if named and "[...]" not in path:
        pointer += "/" + _escaped(_short(named["name"]))
    return pointer, _short(what)


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


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"
