"""What a policy can conclude: a closed union. Outcomes are values; applying them is the engine's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.record import Change
from coordinator.core.saga import OnFailure


class Effect(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing asked of the outside world: the name of a declared sink, and what to send it (a struct or a JSON object).

    ``after`` names the sinks of effects listed before this one in the same outcome that have to succeed first. ``compensation``
    is the effect that undoes this one; without it, it cannot be undone.
    """

    sink: str
    payload: Any
    after: Sequence[str] = ()
    compensation: Effect | None = None


class Commit(msgspec.Struct, frozen=True, omit_defaults=True, tag="commit", tag_field="kind"):
    """Promise these terms, change these records, perform these effects: all of it, or none.

    If an effect fails for good later on, ``on_failure`` says what becomes of the others: they stand, or those that happened and
    declare a compensation are undone.
    """

    terms: Any
    changes: Sequence[Change] = ()
    effects: Sequence[Effect] = ()
    on_failure: OnFailure = "keep"


class Decline(msgspec.Struct, frozen=True, tag="decline", tag_field="kind"):
    reason: str


class Review(msgspec.Struct, frozen=True, omit_defaults=True, tag="review", tag_field="kind"):
    """A person has to decide; until then nothing is changed or sent. ``proposal`` is what an approval would commit, after the
    fence has held again; without one a reviewer can only reject."""

    reason: str
    proposal: Commit | None = None


class NeedMore(msgspec.Struct, frozen=True, tag="need-more", tag_field="kind"):
    """Read this on-demand evidence too, then ask again."""

    evidence: Sequence[str]


Outcome: TypeAlias = Commit | Decline | Review | NeedMore


def as_json(value: Any) -> JsonValue:
    """The JSON form of what a policy put into an outcome; ``TypeError`` for what has none."""
    plain: JsonValue = msgspec.to_builtins(value, str_keys=True)
    return plain
