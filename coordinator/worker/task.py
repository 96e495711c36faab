"""A task as whoever does it sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from coordinator.core.evidence import Absent, Failed, Found
from coordinator.core.task import TaskGiven

T = TypeVar("T")
Outcome = Found[Any] | Absent | Failed
"""What became of a task. The value of a `Found` is a struct or plain JSON."""


class Task:
    """``request`` is all that the worker is told: ``input`` of the decision, ``evidence`` that was declared to come before, and
    the ``record``. ``attempt`` counts from 1. ``cancelled`` is set once nobody waits for the answer any more: a function in a
    thread should look at it now and then. (``abandon`` is the worker's own: it does not wait for that thread any more.)"""

    def __init__(self, given: TaskGiven, say: Callable[[Sequence[str]], None]) -> None:
        self.id = given.id
        self.fencing_token = given.fencing_token
        self.source = given.source
        self.capability = given.capability
        self.attempt = given.attempt
        self.traceparent = given.traceparent
        self.request = bytes(given.request)
        self.cancelled = threading.Event()
        self._until = time.monotonic() + given.remaining_ms / 1000
        self.abandon: Callable[[], object] = lambda: None
        self._say = say
        self._told: dict[str, Any] = msgspec.json.decode(self.request)

    def __repr__(self) -> str:
        return f"Task({self.id}, {self.source}, attempt {self.attempt})"

    @property
    def input(self) -> Any:
        """As plain JSON."""
        return self._told["input"]

    @property
    def evidence(self) -> dict[str, Any]:
        """By name, as plain JSON."""
        evidence: dict[str, Any] = self._told["evidence"]
        return evidence

    @property
    def record(self) -> dict[str, str] | None:
        """``{"kind": ..., "id": ...}`` of the decision's record, if it has one."""
        record: dict[str, str] | None = self._told["record"]
        return record

    def input_as(self, kind: type[T]) -> T:
        """The input as a struct. Raises ``msgspec.ValidationError``."""
        return msgspec.convert(self.input, kind)

    def remaining_s(self) -> float:
        """Until the deadline; not below 0."""
        return max(0.0, self._until - time.monotonic())

    def progress(self, *lines: str) -> None:
        """Lines for whoever follows the decision's events. From any thread."""
        self._say(lines)

    def put_off(self, remaining_ms: int) -> None:
        """The deadline is now so far away."""
        self._until = time.monotonic() + remaining_ms / 1000
