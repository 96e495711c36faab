"""Events: what a follower of a decision is told, and how events are numbered, so that any process can tell them again.

    1                    queued     it was accepted, into its class
    (t-1)*SPAN + 2 ...   running, stage, part, progress, evidence, outcome, fence: the run under fencing token t, in
                                    the order of its happening
    (t-1)*SPAN + AT_REST + 2k       rest, operation: the k-th receipt of the decision from its rest on
    (t-1)*SPAN + AT_REST + 2k - 1   decision: all of it, after k receipts; it ends a stream

Numbers rise, also when another process takes over, and each stands for one event for ever: where somebody followed a run, its
events are stored when it rests; where nobody did, nobody has seen a number, and the events are made of the stored decision
(`told_again`). What followed its rest is numbered by the receipts, which never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from coordinator.core.view import DecisionView, Stage

SPAN = 1_000_000
AT_REST = 900_000
QUEUED = 1
_encode = msgspec.json.Encoder().encode


class Event(msgspec.Struct, frozen=True):
    """``data`` is JSON."""

    number: int
    kind: str
    data: bytes


class _Observed(msgspec.Struct):
    observed_at: datetime


def first_of(token: int) -> int:
    """The number of the first event of the run under this fencing token."""
    return (token - 1) * SPAN + 2


def at_rest(token: int, receipts: int) -> int:
    """The number of the event for the receipt that has ``receipts`` others of its decision before it, counted from its rest."""
    return (token - 1) * SPAN + AT_REST + 2 * receipts


def told_again(view: DecisionView, token: int) -> list[Event]:
    """The events of a run that nobody followed, from the decision as it came to rest. Of evidence that was read more than once
    there is only the last reading, and of streamed parts the whole."""
    first = first_of(token)
    return [Event(first + n, kind, data) for n, (kind, data) in enumerate(_told(view, token))]


def _told(view: DecisionView, token: int) -> Iterator[tuple[str, bytes]]:
    stages = [stage for stage in view.timeline if stage.stage != "commit"]  # the rest tells of that one
    last = {stage.stage: n for n, stage in enumerate(stages)}
    began = max(last.get("admit", -1), last.get("queue", -1)) + 1
    items = _by_stage(view, stages)
    for n, stage in enumerate(stages):
        if n == began:
            yield "running", _encode({"fencing_token": token})
        for item in items.get(n, ()):
            yield "evidence", item
        yield "stage", _encode(stage)
        if n == last.get("decide") and view.outcome is not None:
            yield "outcome", _encode(view.outcome)
        if n == last.get("fence"):
            held = all(check.held for check in view.fence.checks)
            fence = {"rounds": view.fence.rounds, "held": held, "checks": view.fence.checks}
            yield "fence", _encode(fence)
    for item in items.get(len(stages), ()):
        yield "evidence", item


def _by_stage(view: DecisionView, stages: Sequence[Stage]) -> dict[int, list[bytes]]:
    """Each item, in the order of their arrival, under the reading stage that it ended in; a stage's length is in whole ms."""
    readings = [
        (n, datetime.fromisoformat(stage.at) + timedelta(milliseconds=stage.ms + 1))
        for n, stage in enumerate(stages)
        if stage.stage in ("gather", "fence")
    ]
    arrived = [
        (msgspec.json.decode(raw, type=_Observed).observed_at, bytes(raw))
        for raw in msgspec.json.decode(view.evidence, type=list[msgspec.Raw])
    ]
    found: dict[int, list[bytes]] = {}
    for at, item in sorted(arrived, key=lambda each: each[0]):
        home = next((n for n, end in readings if at <= end), readings[-1][0] if readings else len(stages))
        found.setdefault(home, []).append(item)
    return found
