"""Who may use how many of a provider's slots: what processes hold never exceeds the limit, and what nobody needs serves who does.

Max-min fairness (D. Bertsekas, R. Gallager, *Data Networks*, 6.5.2): everybody gets what they can use up to an equal part, and what
some leave the others divide again. What cannot be divided goes to those whose calls have waited longest, so that nobody starves
where there are fewer slots than processes; who holds it keeps it a little longer than that, or it would move more than it works.
Everybody decides for itself, by what the others said last; so that no slot is left over when they disagree, one that nobody holds goes
to whoever looks first.

A slot never jumps: a process that holds more than its part comes down as its calls end, and only then can another take it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

KEEPS_MS = 500
"""How much longer another has to have waited before an indivisible rest moves to it."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``wanted``: the calls it could have under way at once; ``waited_ms``: how long its first waiting call had waited
    when it said so. Who is not ``alive`` may still have calls under way in all of its slots, and wants nothing."""

    slots: int
    wanted: int = 0
    waited_ms: int = 0
    alive: bool = True


class Share(msgspec.Struct, frozen=True):
    """``part`` is what it should come to, ``slots`` what it holds from now on."""

    part: int
    slots: int


def home_of(limit: int, processes: int) -> int:
    """What a process keeps ready while nobody else lacks any. With fewer slots than processes nobody keeps one it does not use."""
    return limit // processes


def share_of(limit: int, holders: Sequence[Holder], me: int, *, home: int, busy: int) -> Share:
    """For ``holders[me]``, which has ``busy`` calls under way. ``holders`` have the same order for everybody. Calls under way in slots
    that it holds no longer (it was silent for too long, and they were taken from it) give it no right to others."""
    mine = holders[me]
    others = [holder for index, holder in enumerate(holders) if index != me]
    lacked = any(holder.alive and holder.wanted > holder.slots for holder in others)
    wants = [holder.wanted if holder.alive else 0 for holder in holders]
    wants[me] = max(mine.wanted, min(home, 1) if lacked else home)
    dead = sum(holder.slots for holder in others if not holder.alive)
    part = fair_parts(max(limit - dead, 0), holders, wants)[me]
    free = max(limit - sum(holder.slots for holder in others), 0)
    if free > mine.slots and wants[me] > part:
        part += 1
    return Share(part, max(min(busy, mine.slots), min(max(part, busy), free)))


def fair_parts(limit: int, holders: Sequence[Holder], wants: Sequence[int]) -> list[int]:
    """What each should have, in their order."""
    parts = [0] * len(holders)
    while True:
        open_ = [index for index, want in enumerate(wants) if want > parts[index]]
        left = limit - sum(parts)
        if not open_ or left < len(open_):
            break
        for index in open_:
            parts[index] = min(wants[index], parts[index] + left // len(open_))
    urgency = {
        index: holders[index].waited_ms + (KEEPS_MS if holders[index].slots > parts[index] else 0)
        for index in open_
    }
    for index in sorted(open_, key=lambda index: -urgency[index])[:left]:
        parts[index] += 1
    return parts
