"""A request for a decision, as it is sent, and its fingerprint: what makes two requests under one key the same."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.money import Money


class RecordRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: str = msgspec.field()
    id: str = msgspec.field()
    expected_version: int | None = None

    def __post_init__(self) -> None:
        for name, text in (("kind", self.kind), ("id", self.id)):
            if not 1 <= len(text) <= 255:
                raise ValueError(f"record.{name} must have 1..255 characters")
        if self.expected_version is not None and self.expected_version < 0:
            raise ValueError("record.expected_version must not be negative")


class DecisionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/decisions``. ``time_limit_ms`` can only shorten the decision type's own limit."""

    type: str
    input: dict[str, Any]
    record: RecordRef | None = None
    class_: str = msgspec.field(name="class", default="interactive")
    ceiling: Money | None = None
    time_limit_ms: int | None = None

    def __post_init__(self) -> None:
        if self.time_limit_ms is not None and not 1 <= self.time_limit_ms <= 3_600_000:
            raise ValueError("time_limit_ms must be within 1..3600000")


def fingerprint(method: str, route: str, body: JsonValue) -> bytes:
    """SHA-256 over method, route and canonical body: another spelling of the same JSON is the same request."""
    return hashlib.sha256(b"\n".join((method.encode(), route.encode(), canonical(body)))).digest()
