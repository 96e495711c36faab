"""Tasks: readings that remote workers make. What a worker is told, what it may answer, and what the packet makes of it.

    waiting --claim--> in_progress --+--> completed    the worker answered: a value, or that there is none
       ^                    |        +--> failed       the worker could not, or it fell silent for the last time
       |                    |        +--> expired      the reading's deadline passed
       |                    |        +--> cancelled    nobody waits for it any more
       +---- its lease ran out, it was handed back, or its worker was started anew

Each claim raises the task's fencing token. A report under an older token changes nothing; it is kept as a receipt.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec

from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.evidence import Absent, Answer, Failed, Found, clean_text
from coordinator.core.money import Money

MAX_TASKS = 20
MAX_CAPABILITIES = 64
MAX_PROGRESS_LINES = 200
MAX_LINE = 2_000
"""Characters; what is longer is cut."""

CODE = r"^[a-z][a-z0-9-]{0,62}$(?!\n)"
CAPABILITY = r"^([a-z][a-z0-9-]{0,62}|\*)$(?!\n)"
VISIBLE = r"^[!-~]{1,63}$(?!\n)"
"""Visible ASCII: what a worker may be called. (The end of a line is not the end of a text.)"""


ANY = "*"
"""The capability of a worker that can work for every source."""


def able(capabilities: Collection[str], capability: str) -> bool:
    """Whether a worker with these may have a task of that one."""
    return capability in capabilities or ANY in capabilities


class Completed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker found. ``result`` is the value, null if the worker looked and there is no such thing. ``cost`` is what it
    cost, ``units`` how many tokens or the like it used; the others say of the value what they do in `Found`."""

    result: JsonValue
    revision: str | None = None
    age_ms: int = 0
    cost: Money | None = None
    confidence: float | None = None
    interval: tuple[float, float] | None = None
    units: int | None = None


class NotCompleted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why a worker could not tell. ``code`` is stable and kebab-case; ``retryable`` says that asking again may help, which the
    evidence's own ``attempts`` bound."""

    code: str
    message: str = ""
    retryable: bool = False
    retry_after_ms: int | None = None
    cost: Money | None = None
    units: int | None = None


class AtCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned worker that cannot have the task: ``current`` of ``max`` are in progress, ``waiting`` more are pinned to it."""

    worker: str
    current: int
    max: int
    waiting: int

    def as_failure(self) -> Failed:
        counts = f"{self.current} of {self.max} tasks in progress, {self.waiting} more wait for it"
        return Failed("worker-at-capacity", f"worker {self.worker} has {counts}", retryable=True)


def request_bytes(value: JsonValue) -> bytes:
    """The one spelling of a task's request: two requests are the same if these are."""
    return canonical(value)


def encode_answer(answer: Completed | NotCompleted) -> bytes:
    return canonical(answer)


def answer_of(state: str, answer: bytes | None, older_ms: int = 0) -> Answer[Any]:
    """What the packet is made of. ``older_ms``: how long before this reading the task was asked for, if it was taken over. The
    value is checked against its declared type like any other source's."""
    match state:
        case "completed" if answer is not None:
            found = msgspec.json.decode(answer, type=Completed)
            if found.result is None:
                return Absent(found.revision, found.cost, found.units)
            return Found(
                found.result,
                found.revision,
                found.age_ms + older_ms,
                found.cost,
                found.confidence,
                found.interval,
                found.units,
            )
        case "failed" if answer is not None:
            failed = msgspec.json.decode(answer, type=NotCompleted)
            return Failed(
                failed.code,
                failed.message,
                failed.retryable,
                failed.retry_after_ms,
                failed.cost,
                failed.units,
            )
        case "expired":
            return Failed("timed-out", "no worker answered before the deadline")
        case _:
            return Failed("task-cancelled", "the task was cancelled before a worker answered")


class TaskGiven(msgspec.Struct, frozen=True, kw_only=True):
    """A task as its worker gets it. ``request`` has the decision's ``input``, the ``evidence`` that was declared to come before,
    and the ``record``; ``remaining_ms`` until ``deadline`` counts from the answer, whatever the worker's own clock says."""

    id: str
    fencing_token: int
    source: str
    capability: str
    request: msgspec.Raw
    deadline: str
    remaining_ms: int
    attempt: int
    traceparent: str


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """``current`` tasks are in progress, ``available`` more may be claimed."""

    current: int
    max: int
    available: int


class WorkerShown(msgspec.Struct, frozen=True, kw_only=True):
    """``status`` and ``capacity`` are derived from its tasks and its heartbeat. ``lease_ms``: a task whose worker is silent for so
    long goes to another. A draining worker gets no new task; what it has left at ``drain_until`` is handed back."""

    id: str
    name: str
    status: Literal["idle", "busy", "offline"]
    capacity: Capacity
    capabilities: list[str]
    draining: bool
    drain_until: str | None
    registered_at: str
    heartbeat_at: str
    lease_ms: int


def clean_lines(lines: list[str]) -> list[str]:
    """Lines of progress as they can be kept and shown."""
    return [clean_text(line, MAX_LINE) for line in lines]
