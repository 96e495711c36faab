"""A PostgreSQL row as JSON: each type has one spelling, and what has none makes the row unusable instead of nearly right.

    numeric     text ("12.50"), as a number would lose digits     timestamptz  RFC 3339 in UTC, date, time: ISO 8601
    uuid, inet  text                                               interval     ISO 8601 duration
    json(b)     strict JSON                                        bytea        base64
    arrays      arrays                                             composites   objects

NaN, the infinities (of numbers and of dates) and integers beyond ±(2^53-1) have no JSON spelling. A ``timestamp without time
zone`` is written without one, since nobody can know which it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from uuid import UUID

import asyncpg
import msgspec

from coordinator.core.canonical import MAX_INTEGER, JsonValue, parse

JSON_TYPES = ("json", "jsonb")
_INFINITE = ((1, 1, 1), (9999, 12, 31))
"""What the driver makes of -infinity and infinity."""
_ADDRESSES = (IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)


class UnusableRow(ValueError):
    """A column's value has no JSON spelling; the text names the column."""


class JsonText(str):
    """A json or jsonb value, not yet parsed."""

    __slots__ = ()


def as_json(value: object, column: str) -> JsonValue:
    """Raises `UnusableRow`, or `InvalidJson` for a json column whose text has more than one meaning."""
    match value:
        case None | bool():
            return value
        case JsonText():
            return parse(value.encode())
        case str():
            return value
        case int():
            if abs(value) > MAX_INTEGER:
                raise UnusableRow(f"{column}: an integer beyond ±(2^53-1)")
            return value
        case float() | Decimal():
            return _number(value, column)
        case datetime() | date() | time() | timedelta():
            return _moment(value, column)
        case bytes():
            return str(msgspec.to_builtins(value))
        case list():
            return [as_json(item, column) for item in value]
        case Mapping() | asyncpg.Record():
            return {str(name): as_json(item, f"{column}.{name}") for name, item in value.items()}
        case UUID():
            return str(value)
    if isinstance(value, _ADDRESSES):
        return str(value)
    raise UnusableRow(
        f"{column}: a {type(value).__name__} has no JSON spelling; cast it to text in the query"
    )


def _number(value: float | Decimal, column: str) -> JsonValue:
    if not math.isfinite(value):
        raise UnusableRow(f"{column}: {value} is not a JSON number")
    if isinstance(value, Decimal):
        return format(value, "f")
    return int(value) if value.is_integer() and abs(value) <= MAX_INTEGER else value


def _moment(value: datetime | date | time | timedelta, column: str) -> str:
    if isinstance(value, timedelta | time):
        return str(msgspec.to_builtins(value))
    if (value.year, value.month, value.day) in _INFINITE:
        raise UnusableRow(f"{column}: an infinite date")
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return str(msgspec.to_builtins(value))
