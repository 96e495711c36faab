"""What follows from the state of a decision's operations: who may start, who never will, what has to be undone.

    waiting   its predecessors have all succeeded        -> Release    it may be sent
    waiting   a predecessor never will                   -> Cancel
    succeeded a sibling failed, where the outcome said so; or cancelling was asked for; and it declares a compensation
                                                         -> Compensate
    compensating   its compensation succeeded            -> Compensated
    compensating   its compensation failed               -> Uncompensated: it did happen, and stands

An operation that declares no compensation cannot be undone; it stays `succeeded`, and that is the truth. (H. Garcia-Molina,
K. Salem, *Sagas*, 1987.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from coordinator.core.effect import OperationState

OnFailure = Literal["keep", "compensate"]
COMPENSATION_ORDINALS = 1000
"""A compensation's ordinal is its original's plus this: one operation can be compensated once."""


class Link(msgspec.Struct, kw_only=True):
    """One operation as its siblings see it. ``waiting``: it was never sent and waits for ``after``; ``compensates`` is the
    ordinal of what it undoes."""

    ordinal: int
    effect: str
    state: OperationState
    after: Sequence[int] = ()
    waiting: bool = False
    has_compensation: bool = False
    compensates: int | None = None
    on_failure: OnFailure = "keep"
    cancel_requested: bool = False
    reason: str | None = None


class Release(msgspec.Struct, frozen=True):
    ordinal: int


class Cancel(msgspec.Struct, frozen=True):
    ordinal: int
    reason: str


class Compensate(msgspec.Struct, frozen=True):
    ordinal: int
    reason: str


class Compensated(msgspec.Struct, frozen=True):
    ordinal: int


class Uncompensated(msgspec.Struct, frozen=True):
    ordinal: int
    reason: str


Consequence: TypeAlias = Release | Cancel | Compensate | Compensated | Uncompensated

NEVER = ("failed", "cancelled", "compensating", "compensated")


def consequences(links: Iterable[Link]) -> list[Consequence]:
    """Everything that follows, in an order in which it can be applied."""
    in_order = sorted(links, key=lambda link: link.ordinal)
    by_ordinal = {link.ordinal: msgspec.structs.replace(link) for link in in_order}
    found: list[Consequence] = []
    settled = False
    while not settled:
        settled = True
        # An operation comes after earlier ones alone: what is being undone is seen by all that would come after it.
        for link in by_ordinal.values():
            if (step := _next(link, by_ordinal)) is not None:
                _apply(step, by_ordinal)
                found.append(step)
                settled = False
    return found


def _next(link: Link, all_of_them: dict[int, Link]) -> Consequence | None:
    if link.waiting:
        return _waiting(link, all_of_them)
    if link.state == "succeeded" and link.has_compensation and link.reason is None:
        if link.cancel_requested:
            return Compensate(link.ordinal, "cancelling was asked for")
        failed = next((other for other in all_of_them.values() if _failed_primary(other)), None)
        if failed is not None and link.on_failure == "compensate":
            return Compensate(link.ordinal, f"effect {failed.effect} failed")
    if link.state == "compensating":
        return _compensating(link, all_of_them.get(link.ordinal + COMPENSATION_ORDINALS))
    return None


def _waiting(link: Link, all_of_them: dict[int, Link]) -> Consequence | None:
    before = [all_of_them[ordinal] for ordinal in link.after]
    if link.on_failure == "compensate":  # the one that failed comes first: it is the reason
        before = [*filter(_failed_primary, all_of_them.values()), *before]
    never = next((other for other in before if other.state in NEVER), None)
    if never is not None:
        return Cancel(link.ordinal, f"effect {never.effect} is {never.state}")
    return Release(link.ordinal) if all(other.state == "succeeded" for other in before) else None


def _compensating(link: Link, compensation: Link | None) -> Consequence | None:
    if compensation is None or compensation.state not in ("succeeded", "failed", "cancelled"):
        return None
    if compensation.state == "succeeded":
        return Compensated(link.ordinal)
    return Uncompensated(
        link.ordinal, f"its compensation {compensation.effect} {compensation.state}: {compensation.reason}"
    )


def _failed_primary(link: Link) -> bool:
    return link.compensates is None and link.state == "failed"


def _apply(step: Consequence, all_of_them: dict[int, Link]) -> None:
    link = all_of_them[step.ordinal]
    match step:
        case Release():
            link.waiting = False
        case Cancel():
            link.waiting, link.state = False, "cancelled"
        case Compensate(_, reason):
            link.state = "compensating"
        case Compensated():
            link.state = "compensated"
        case Uncompensated(_, reason):
            link.state, link.reason = "succeeded", reason
