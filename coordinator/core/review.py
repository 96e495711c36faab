"""What may be done with a review, given how it stands: pure.

    nobody holds it, the etag is the present one     Go       a rejection ends it; an approval claims it, which raises the etag
    the very same verdict is being carried out       Wait     its result is this call's result, too
    the very same verdict was carried out            Done     a caller who lost the answer gets it again
    the very same approval could not be confirmed    Go       nobody knows that anything moved: it is tried again
    it has ended, moved on, or is another's          Stale    look at it as it is now
    it never was in review                           NotOpen
    an approval, and nothing is proposed             NothingProposed

*The very same* is: by the same key, the same verdict, on the same etag. An approval whose process died is not carried out by anybody
and has changed nothing: the same verdict claims it again, though its etag is not the present one any more.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Verdict = Literal["approve", "reject"]
CARRIED_OUT: dict[Verdict, tuple[str, ...]] = {"approve": ("committed", "failed"), "reject": ("declined",)}
"""How a decision ends by a verdict. A record kind may refuse what was approved: then it has failed."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict: ``by`` is the reviewer's key, ``etag`` what it was given on."""

    by: str
    verdict: Verdict
    etag: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a decision stands. ``latest`` is the verdict that was begun last; ``held``: it is being carried out; ``abandoned``: it was,
    by a process that fell silent; ``unconfirmed``: it was, and something could not be read; ``over``: the time for the review has run
    out."""

    status: str
    etag: str
    was_in_review: bool
    has_proposal: bool
    held: bool
    abandoned: bool
    unconfirmed: bool
    over: bool
    latest: Asked | None


class Go(msgspec.Struct, frozen=True):
    pass


class Wait(msgspec.Struct, frozen=True):
    pass


class Done(msgspec.Struct, frozen=True):
    pass


class Stale(msgspec.Struct, frozen=True):
    """``why`` goes on after "the decision ..."."""

    why: str


class NotOpen(msgspec.Struct, frozen=True):
    pass


class NothingProposed(msgspec.Struct, frozen=True):
    pass


Judgement: TypeAlias = Go | Wait | Done | Stale | NotOpen | NothingProposed


def judge(now: Standing, asked: Asked) -> Judgement:
    """What follows from a verdict."""
    if not now.was_in_review:
        return NotOpen()
    again = now.latest == asked
    if now.status != "in_review":
        carried_out = again and now.status in CARRIED_OUT[asked.verdict]
        return Done() if carried_out else Stale(f"is {now.status} by now")
    if now.held:
        return Wait() if again else Stale("is being reviewed by somebody else just now")
    if now.over:
        return Stale("was not reviewed in time and expires")
    if again and (now.abandoned or now.unconfirmed):
        return Go()
    if now.etag != asked.etag:
        return Stale(
            "has moved on since that etag was read"
            if not again
            else "is not what it was when it was approved"
        )
    if asked.verdict == "approve" and not now.has_proposal:
        return NothingProposed()
    return Go()
