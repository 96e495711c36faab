"""Budgets: money is reserved before work, and settled by what the work is reported to have cost. The arithmetic, pure.

    reserve    every budget that a need draws on has room for it, or nothing is reserved at all
    held  ---- reported cost ------------------------------> settled     more than was reserved: the excess is an overage
          ---- nothing was begun --------------------------> released
          ---- begun, and nobody says what it cost --------> uncertain   until the provider or a person says it

A reservation closes once: `settled` and `released` absorb. Silence is not evidence: what may still be billed stays taken. For each
period of a budget ``held + uncertain + settled <= ceiling + overage`` at every moment, where each part of ``overage`` has a row
that says why; and what is reserved never takes more than the ceiling itself.

All amounts are integer minor units of one currency.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from coordinator.core.money import Money

Kind = Literal["evidence", "effect"]
Period = Literal["day", "month", "total"]
ReservationState = Literal["held", "settled", "released", "uncertain"]
OnExhausted = Literal["refuse", "wait", "reduce", "review"]
Cause = Literal["bigger-bill", "late-bill", "unreserved-bill", "ceiling-lowered"]


class Need(msgspec.Struct, frozen=True):
    """What one piece of evidence or one effect may cost. An ``optional`` one can be left out."""

    kind: Kind
    item: str
    provider: str
    amount: Money
    optional: bool = False


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """A budget's present period. ``provider``: only that provider's needs draw on it. ``resets_at`` None: it never does."""

    budget: str
    starts_at: datetime
    resets_at: datetime | None
    currency: str
    provider: str | None
    ceiling_minor: int
    used_minor: int

    def drawn_by(self, need: Need) -> bool:
        return self.currency == need.amount.currency and self.provider in (None, need.provider)


class Short(msgspec.Struct, frozen=True):
    """Why nothing was reserved: ``budget`` has ``available`` where ``needed`` is asked of it."""

    budget: str
    needed: Money
    available: Money
    resets_at: datetime | None


Left = dict[str, int]
"""What is left of each budget, by name; less than nothing where a bill was bigger than what was left."""


def left_of(rooms: Iterable[Room]) -> Left:
    return {room.budget: room.ceiling_minor - room.used_minor for room in rooms}


DECISION = "decision"
"""What the ceiling that a decision brings along is called; no budget has this name."""


def reserve(
    rooms: Sequence[Room],
    left: Left,
    needs: Sequence[Need],
    *,
    ceiling: Money | None = None,
    reduce: bool = False,
) -> tuple[Need, ...] | Short:
    """The needs that are reserved: all of them, or with ``reduce`` all that are not optional and of the others those that still
    fit, in order. ``left`` is what they leave, afterwards; untouched if it is not enough. ``ceiling`` is the decision's own."""
    under = Left(left)
    if ceiling is not None:
        under[DECISION] = ceiling.amount_minor
    short = _take(rooms, under, needs)
    kept = list(needs)
    if short is not None and reduce:
        kept = [need for need in needs if not need.optional]
        if (short := _take(rooms, under, kept)) is None:
            kept += [need for need in needs if need.optional and _take(rooms, under, [need]) is None]
    if short is not None:
        return short
    left.update((budget, under[budget]) for budget in left)
    return tuple(need for need in needs if need in kept)


def _take(rooms: Sequence[Room], left: Left, needs: Sequence[Need]) -> Short | None:
    """Every budget has room, or none is touched."""
    asked = [
        (
            room.budget,
            sum(n.amount.amount_minor for n in needs if room.drawn_by(n)),
            room.currency,
            room.resets_at,
        )
        for room in rooms
    ]
    if DECISION in left and needs:
        asked.append((DECISION, sum(n.amount.amount_minor for n in needs), needs[0].amount.currency, None))
    for budget, needed, currency, resets_at in asked:
        there = max(0, left[budget])
        if needed > there:
            return Short(budget, Money(needed, currency), Money(there, currency), resets_at)
    for budget, needed, _, _ in asked:
        left[budget] -= needed
    return None


class Closing(msgspec.Struct, frozen=True):
    """What becomes of a reservation: its state, what it takes of its budgets from now on, and by how much that is more."""

    state: ReservationState
    drawn_minor: int
    excess_minor: int
    reason: str | None = None


def close(drawn_minor: int, costs: Sequence[int], *, silent: bool) -> Closing:
    """A reservation that takes ``drawn_minor`` closes by what its work reported. ``silent``: something was begun whose cost nobody
    reported; then it takes at least what it took."""
    known = sum(costs)
    if silent:
        drawn = max(known, drawn_minor)
        return Closing("uncertain", drawn, drawn - drawn_minor, "cost-unknown")
    if costs:
        return Closing("settled", known, max(0, known - drawn_minor))
    return Closing("released", 0, 0)


class Change(msgspec.Struct, frozen=True):
    """What is added to a period, or taken from it where negative."""

    held: int = 0
    uncertain: int = 0
    settled: int = 0
    overage: int = 0

    def __add__(self, other: Change) -> Change:
        return Change(
            self.held + other.held,
            self.uncertain + other.uncertain,
            self.settled + other.settled,
            self.overage + other.overage,
        )


def change(was: ReservationState, was_minor: int, closing: Closing) -> Change:
    """What a reservation's closing does to each period that it draws on. A released one that is billed late counts as settled."""
    return (
        _in_state(was, -was_minor)
        + _in_state(closing.state, closing.drawn_minor)
        + Change(overage=closing.excess_minor)
    )


def _in_state(state: ReservationState, amount: int) -> Change:
    match state:
        case "held":
            return Change(held=amount)
        case "uncertain":
            return Change(uncertain=amount)
        case "settled" | "released":
            return Change(settled=amount)


def per_period(changes: Iterable[tuple[Iterable[Hashable], Change]]) -> Mapping[Hashable, Change]:
    """The sum of all changes of each period."""
    total: dict[Hashable, Change] = {}
    for periods, each in changes:
        for period in periods:
            total[period] = total.get(period, Change()) + each
    return total


def lowered(ceiling_minor: int, used_minor: int, overage_minor: int) -> int:
    """The overage that a new ceiling adds, where more than it is taken already."""
    return max(0, used_minor - ceiling_minor - overage_minor)
