"""A request for a decision, as it is sent, and its fingerprint: what makes two requests under one key the same."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec

from coordinator.core.canonical import MAX_INTEGER, JsonValue, canonical
from coordinator.core.money import Money


class RecordRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``expected_version`` 0 means that the record must not exist yet."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    expected_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)] | None = None


class DecisionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /v1/decisions``. ``time_limit_ms`` can only shorten the decision type's own limit."""

    type: str
    input: dict[str, Any]
    record: RecordRef | None = None
    class_: str = msgspec.field(name="class", default="interactive")
    ceiling: Money | None = None
    time_limit_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)] | None = None


decode_request = msgspec.json.Decoder(DecisionRequest).decode


def fingerprint(method: str, route: str, body: JsonValue) -> bytes:
    """SHA-256 over method, route and canonical body: another spelling of the same JSON is the same request."""
    return hashlib.sha256(b"\n".join((method.encode(), route.encode(), canonical(body)))).digest()
