"""Each: evidence that was read for each member of a list, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.evidence import ItemError, State

T = TypeVar("T")


class One(msgspec.Struct, Generic[T], frozen=True):
    """The reading for one member, ``of``. Its value is there if it was found, and only then."""

    of: Any
    state: State
    value: T | None = None
    error: ItemError | None = None


class Each(msgspec.Struct, Generic[T], frozen=True):
    """The readings for all members, in the order of the list."""

    items: tuple[One[T], ...]

    @property
    def found(self) -> list[T]:
        """The values of those that were found."""
        return [one.value for one in self.items if one.value is not None]


def state_of(states: Sequence[State], need: int | None) -> State:
    """The state of the whole: found if all are, or at least ``need``. Otherwise what all the others have in common, if anything."""
    missing = [state for state in states if state != "found"]
    if len(states) - len(missing) >= (len(states) if need is None else need):
        return "found"
    return missing[0] if len(set(missing)) == 1 else "failed"


def hopeless(states: Sequence[State], total: int, need: int | None) -> bool:
    """Whether it cannot be found any more, whatever the members bring that have no state yet."""
    missing = sum(state != "found" for state in states)
    return missing > total - (total if need is None else min(need, total))


def member_by_member(value: JsonValue, fields: Sequence[str]) -> JsonValue:
    """For comparing a few fields: each of them as a list over all members, with the states, so that nothing missing looks the same
    as something that is null."""
    items = value["items"] if isinstance(value, dict) else []
    assert isinstance(items, list)
    ones = [one for one in items if isinstance(one, dict)]
    return {
        field: [[one["of"], one["state"], _member(one.get("value"), field)] for one in ones]
        for field in fields
    }


def _member(value: JsonValue, field: str) -> JsonValue:
    return value.get(field) if isinstance(value, dict) else None
