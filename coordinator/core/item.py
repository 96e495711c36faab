"""Items: readings as the packet keeps them."""

from __future__ import annotations

from typing import Literal

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.money import Money

State = Literal["found", "absent", "failed", "timed_out", "cancelled", "skipped"]


class ItemError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One typed reading as the packet keeps it; field for field what a decision shows under ``evidence``. ``attempts`` is how often
    it was begun: the calls of a source, or how often its task was given to a worker."""

    name: str
    source: str
    state: State
    value: JsonValue = None
    revision: str | None = None
    observed_at: str
    freshness: dict[str, JsonValue]
    elapsed_ms: int
    attempts: int
    error: ItemError | None = None
    cost: Money | None = None
    confidence: float | None = None
    interval: tuple[float, float] | None = None
    reading: str = "own"


def clean_text(text: str, limit: int = 500) -> str:
    """An error text that can be stored and shown anywhere: no NUL, no lone surrogates, no control characters, bounded."""
    safe = text[: limit * 2].encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() or char == " " else "�" for char in safe)[:limit]
