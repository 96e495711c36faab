"""Parts: what one reading streams while it is under way, on to whoever follows the decision.

A part is an event like any other, kept until the decision rests, so that nobody who comes late or comes back misses one. The parts
of one reading together may be as large as its evidence may be, so memory stays bounded. `emit` returns when the slowest follower
has room again: a slow reader slows the producer. That waiting counts against the reading's deadline, and takes at most a quarter
of it (and at most `stream_stall_ms`): who lags for longer is cut, so that nobody who merely watches makes a reading time out.
Followers in other processes read from the database and hold nobody back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from anyio import lowlevel

from coordinator import telemetry
from coordinator.config import Settings
from coordinator.core.canonical import JsonValue, check
from coordinator.core.evidence import Evidence
from coordinator.engine.events import EventLog

SHARE_OF_DEADLINE = 0.25
_encode = msgspec.json.Encoder().encode


class TooManyParts(ValueError):
    """The reading streamed more than a decision may hold."""


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a reading. ``part`` counts from 0 within an ``attempt``."""

    evidence: str
    attempt: int
    part: int
    value: msgspec.Raw


class Parts:
    """What a source is given as `ReadRequest.emit`."""

    __slots__ = ("_attempt", "_attempts", "_bytes", "_count", "_declared", "_log", "_patience_s", "_settings")

    def __init__(
        self, settings: Settings, log: EventLog, declared: Evidence[Any, Any], attempts: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._log = log
        self._declared = declared
        self._attempts = attempts
        self._attempt = self._count = self._bytes = 0
        self._patience_s = min(settings.stream_stall_ms, declared.deadline_ms * SHARE_OF_DEADLINE) / 1000

    async def __call__(self, value: object) -> None:
        """Raises `TooManyParts`, and `ValueError` or `TypeError` for what is no JSON."""
        plain: JsonValue = msgspec.to_builtins(value, str_keys=True)
        check(plain)
        encoded = _encode(plain)
        attempt = self._attempts()
        if attempt != self._attempt:
            self._attempt, self._count, self._bytes = attempt, 0, 0
        self._bytes += len(encoded)
        if self._count >= self._settings.max_parts or self._log.full:
            raise TooManyParts(f"more than {self._settings.max_parts} parts")
        if self._bytes > self._settings.max_evidence_bytes:
            raise TooManyParts(f"parts of more than {self._settings.max_evidence_bytes} bytes together")
        part = PartView(
            evidence=self._declared.name, attempt=attempt, part=self._count, value=msgspec.Raw(encoded)
        )
        self._count += 1
        self._log.add("part", part)
        telemetry.PARTS.labels(self._declared.source.name).inc()
        await (
            lowlevel.checkpoint()
        )  # a source that has everything at hand must not keep the others from going on
        self._patience_s -= await self._log.room(self._settings.stream_buffer, max(0.0, self._patience_s))
