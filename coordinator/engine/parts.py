"""Parts: what one reading streams while it is under way, on to whoever follows the decision.

A part is an event like any other, kept until the decision rests, so that nobody who comes late or comes back misses one. A call may
be made for several decisions at once (`flights`): each of them is told, one that joins late from the first part on. The parts of one
call together may be as large as its evidence may be, so memory stays bounded.

`emit` returns when the slowest follower has room again: a slow reader slows the producer. That waiting counts against the reading's
deadline, and takes at most a quarter of it (and at most `stream_stall_ms`): who lags for longer is cut, so that nobody who merely
watches makes a reading time out. Followers in other processes read from the database and hold nobody back.
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
    """The parts of one reading, on their way into the log of its run."""

    __slots__ = ("_attempts", "_declared", "_log", "_patience_s", "_settings")

    def __init__(
        self, settings: Settings, log: EventLog, declared: Evidence[Any, Any], attempts: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._log = log
        self._declared = declared
        self._attempts = attempts
        self._patience_s = min(settings.stream_stall_ms, declared.deadline_ms * SHARE_OF_DEADLINE) / 1000

    def tell(self, number: int, value: msgspec.Raw) -> bool:
        """Whether the run has room for one more."""
        if self._log.full:
            return False
        part = PartView(evidence=self._declared.name, attempt=self._attempts(), part=number, value=value)
        self._log.add("part", part)
        return True

    async def room(self) -> None:
        """Wait for the followers of this run, as long as that may take."""
        self._patience_s -= await self._log.room(self._settings.stream_buffer, max(0.0, self._patience_s))


class Audience:
    """Those for whom one call is made; what its source is given as `ReadRequest.emit`."""

    __slots__ = ("_bytes", "_listeners", "_settings", "_source", "_told")

    def __init__(self, settings: Settings, source: str) -> None:
        self._settings = settings
        self._source = source
        self._listeners: list[Parts] = []
        self._told: list[msgspec.Raw] = []
        self._bytes = 0

    def join(self, parts: Parts) -> None:
        """Tell this reading what was told already, and from now on everything, until it leaves."""
        for number, value in enumerate(self._told):
            parts.tell(number, value)
        self._listeners.append(parts)

    def leave(self, parts: Parts) -> None:
        self._listeners.remove(parts)

    async def __call__(self, value: object) -> None:
        """Raises `TooManyParts`, and `ValueError` or `TypeError` for what is no JSON."""
        plain: JsonValue = msgspec.to_builtins(value, str_keys=True)
        check(plain)
        encoded = msgspec.Raw(_encode(plain))
        self._bytes += len(encoded)
        if len(self._told) >= self._settings.max_parts:
            raise TooManyParts(f"more than {self._settings.max_parts} parts")
        if self._bytes > self._settings.max_evidence_bytes:
            raise TooManyParts(f"parts of more than {self._settings.max_evidence_bytes} bytes together")
        heard = [parts.tell(len(self._told), encoded) for parts in self._listeners]
        if heard and not any(heard):
            raise TooManyParts("the decision has more events than it may have")
        self._told.append(encoded)
        telemetry.PARTS.labels(self._source).inc()
        await (
            lowlevel.checkpoint()
        )  # a source that has everything at hand must not keep the others from going on
        for parts in tuple(self._listeners):
            await parts.room()
