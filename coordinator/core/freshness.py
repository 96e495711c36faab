"""Freshness: how recent evidence has to be at commit."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

from coordinator.core.canonical import JsonValue
from coordinator.core.where import declared_at
from coordinator.errors import DeclarationError


class Decisive:
    """Re-read just before commit; these fields must still be what the policy saw (no fields: the whole value)."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields

    def as_json(self) -> dict[str, JsonValue]:
        return {"kind": "decisive", "fields": list(self.fields)}


class MaxAge:
    """May be at most this old at commit; an older reading is read again."""

    def __init__(self, age: timedelta) -> None:
        if type(age) is not timedelta or age < timedelta(milliseconds=1):
            raise DeclarationError(
                f"MaxAge must be positive, a timedelta of at least 1 ms, not {age!r}", declared_at()
            )
        self.max_age_ms = int(age.total_seconds() * 1000)

    def as_json(self) -> dict[str, JsonValue]:
        return {"kind": "max-age", "max_age_ms": self.max_age_ms}


class Snapshot:
    """Recorded as it was read, never rechecked."""

    def as_json(self) -> dict[str, JsonValue]:
        return {"kind": "snapshot"}


Freshness: TypeAlias = Decisive | MaxAge | Snapshot
SNAPSHOT = Snapshot()
