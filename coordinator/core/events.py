"""Events: what a follower of a decision is told, and how events are numbered, so that any process can tell them again.

    1                    queued     it was accepted, into its class
    (t-1)*SPAN + 2 ...   running, stage, part, evidence, outcome, fence: the run under fencing token t, in the order of its happening
    (t-1)*SPAN + AT_REST + 2k       rest, operation: the k-th receipt of the decision from its rest on
    (t-1)*SPAN + AT_REST + 2k - 1   decision: all of it, after k receipts; it ends a stream

Numbers rise, also when another process takes over, and each stands for one event for ever: where somebody followed a run, its
events are stored when it rests; where nobody did, nobody has seen a number, and the events are made of the stored decision
(`told_again`). What followed its rest is numbered by the receipts, which never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from coordinator.core.view import DecisionView

SPAN = 1_000_000
AT_REST = 900_000
QUEUED = 1
MOVING = frozenset({"ready", "dispatching", "compensating", "uncertain"})
"""States of operations that are not the last one."""
_encode = msgspec.json.Encoder().encode


class Event(msgspec.Struct, frozen=True):
    """``data`` is JSON."""

    number: int
    kind: str
    data: bytes


class _Observed(msgspec.Struct):
    observed_at: str


def first_of(token: int) -> int:
    """The number of the first event of the run under this fencing token."""
    return (token - 1) * SPAN + 2


def at_rest(token: int, receipts: int) -> int:
    """The number of the event for the receipt that has ``receipts`` others of its decision before it, counted from its rest."""
    return (token - 1) * SPAN + AT_REST + 2 * receipts


def told_again(view: DecisionView, token: int) -> list[Event]:
    """The events of a run that nobody followed, from the decision as it came to rest. Of evidence that was read more than once
    there is only the last reading, and of streamed parts the whole."""
    told = sorted(_moments(view), key=lambda moment: moment[:2])
    first = first_of(token)
    return [Event(first + n, kind, data) for n, (_, _, kind, data) in enumerate(told)]


def _moments(view: DecisionView) -> Iterator[tuple[datetime, int, str, bytes]]:
    """When, and in which order if at the same time."""
    ends: dict[str, datetime] = {}
    for stage in view.timeline:
        if stage.stage == "commit":
            continue  # the rest tells of it
        began = datetime.fromisoformat(stage.at)
        ends[stage.stage] = began + timedelta(milliseconds=stage.ms)
        yield ends[stage.stage], 2, "stage", _encode(stage)
    started = [end for name, end in ends.items() if name in ("admit", "queue")]
    if started and len(ends) > len(started):
        yield max(started), 3, "running", b"{}"
    for raw in msgspec.json.decode(view.evidence, type=list[msgspec.Raw]):
        observed = msgspec.json.decode(raw, type=_Observed).observed_at
        yield datetime.fromisoformat(observed), 1, "evidence", bytes(raw)
    if view.outcome is not None and "decide" in ends:
        yield ends["decide"], 4, "outcome", _encode(view.outcome)
    if "fence" in ends:
        held = all(check.held for check in view.fence.checks)
        fence = {"rounds": view.fence.rounds, "held": held, "checks": view.fence.checks}
        yield ends["fence"], 5, "fence", _encode(fence)
