"""Query strings and pages. A page is stable under inserts because a cursor is a position, not an offset.

A cursor is opaque and carries a checksum over the list's name and the position: one that was altered, or belongs to another list,
is an error instead of a surprising page. It is no secret: whatever it says, only the caller's own tenant is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import unquote_to_bytes
from uuid import UUID

import msgspec

from coordinator.api.views import encode
from coordinator.errors import MalformedRequest

DEFAULT_LIMIT = 50
MAX_LIMIT = 200
_CHECK_BYTES = 6
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)\Z")

Query = Mapping[str, str]


def parse_query(query_string: bytes, allowed: frozenset[str]) -> Query:
    """The parameters of a query string. One that is unknown, given twice or not UTF-8 is a `MalformedRequest`."""
    query: dict[str, str] = {}
    for pair in filter(None, query_string.split(b"&")):
        name, _, value = pair.partition(b"=")
        key = _decoded(name)
        if key not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise MalformedRequest(f"The query parameter {key[:100]!r} is unknown here; known: {known}.")
        if key in query:
            raise MalformedRequest(f"The query parameter {key!r} is given twice.")
        query[key] = _decoded(value)
    return query


def _decoded(text: bytes) -> str:
    try:
        decoded = unquote_to_bytes(text.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedRequest("The query string is not UTF-8.") from None
    if "\x00" in decoded:
        raise MalformedRequest("The query string contains NUL.")
    return decoded


def limit_of(query: Query) -> int:
    text = query.get("limit")
    if text is None:
        return DEFAULT_LIMIT
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_LIMIT:
        raise MalformedRequest(f"limit must be a whole number within 1..{MAX_LIMIT}.")
    return int(text)


def choice_of(query: Query, name: str, known: Iterable[str]) -> str | None:
    value = query.get(name)
    if value is not None and value not in known:
        raise MalformedRequest(f"{name} must be one of {', '.join(sorted(known))}.")
    return value


def uuid_of(query: Query, name: str) -> UUID | None:
    value = query.get(name)
    if value is None:
        return None
    found = uuid(value)
    if found is None:
        raise MalformedRequest(f"{name} must be an id.")
    return found


def uuid(text: str) -> UUID | None:
    """An id in its one spelling: lower case, with hyphens."""
    try:
        found = UUID(text)
    except ValueError:
        return None
    return found if str(found) == text else None


def time_of(query: Query, name: str) -> datetime | None:
    value = query.get(name)
    if value is None:
        return None
    value = value.replace(" ", "+")  # an offset's plus sign that was not percent-encoded
    try:
        if _RFC_3339.match(value):
            return datetime.fromisoformat(value.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise MalformedRequest(f"{name} must be a time of RFC 3339, such as 2026-11-29T10:00:00Z.")


def cursor(name: str, position: UUID | int | str | None) -> str | None:
    """An opaque text for ``position`` in the list called ``name``; None if there is no further page."""
    if position is None:
        return None
    text = str(position).encode()
    return _opaque(_check(name, text) + text)


def id_before(query: Query, name: str) -> UUID | None:
    """Where the next page of a list by id begins; None on the first page."""
    text = position_of(query, name)
    if text is None:
        return None
    found = uuid(text)
    if found is None:
        raise altered()
    return found


def index_after(query: Query, name: str) -> int | None:
    """Where the next page of a list by number begins; None on the first page."""
    text = position_of(query, name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,16}", text):
        raise altered()
    return int(text)


def position_of(query: Query, name: str) -> str | None:
    """Where the next page begins, as `cursor` was given it; None on the first page."""
    given = query.get("cursor")
    if given is None:
        return None
    try:
        raw = base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    check, text = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
    if not text.isascii() or not hmac.compare_digest(check, _check(name, text)) or _opaque(raw) != given:
        raise altered()
    return text.decode("ascii")


def altered() -> MalformedRequest:
    """The refusal of a cursor that holds no position of its list."""
    return MalformedRequest("cursor must be a next_cursor of this list, unaltered.")


def _opaque(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _check(name: str, text: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\x00" + text).digest()[:_CHECK_BYTES]


def page_of_all(items: Sequence[object], query: Query, name: str) -> bytes:
    """A page of a list that is short and all there, by the place of its items."""
    limit, after = limit_of(query), index_after(query, name)
    first = 0 if after is None else after + 1
    following = cursor(name, first + limit - 1) if len(items) > first + limit else None
    return page(map(encode, items[first : first + limit]), following)


def page(items: Iterable[bytes], next_cursor: str | None) -> bytes:
    """The body of one page of items that are JSON already."""
    return b'{"items":[' + b",".join(items) + b'],"next_cursor":' + msgspec.json.encode(next_cursor) + b"}"
