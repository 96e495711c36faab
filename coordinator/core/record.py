"""The business object being changed: `(kind, id)` with a version that rises by exactly 1 per committed change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.evidence import is_struct
from coordinator.core.where import declared_at
from coordinator.errors import DeclarationError

D = TypeVar("D")


class Change(msgspec.Struct, frozen=True):
    """New data for one record; the committed version is the one the decision was based on, plus 1."""

    kind: str
    id: str
    data: Any


class Record(msgspec.Struct, Generic[D], frozen=True):
    """What the policy sees of the record. A record that does not exist yet has version 0 and ``data`` None."""

    kind: str
    id: str
    version: int
    data: D | None = None

    def becomes(self, data: D) -> Change:
        return Change(self.kind, self.id, data)


class RecordKind(Generic[D]):
    """Declares a kind of record: the type of its data and which transitions are allowed.

    ``transition(old, new)`` is pure; it returns None to allow, or the reason for refusing. ``old`` is None for the first
    version. It holds for decisions and for ``PUT /v1/records`` alike, and is checked under the record's lock.
    """

    def __init__(
        self, name: str, data: type[D], *, transition: Callable[[D | None, D], str | None] | None = None
    ) -> None:
        self.where = declared_at()
        if not is_struct(data):
            raise DeclarationError(
                f"record kind {name!r}: data must be a msgspec.Struct, not {data!r}", self.where
            )
        self.name = name
        self.data = data
        self.transition = transition

    def refusal(self, old: JsonValue, new: JsonValue) -> str | None:
        """Why this change is not allowed, or None. ``old`` is None when the record does not exist yet."""
        try:
            typed_new = msgspec.convert(new, self.data)
            typed_old = None if old is None else msgspec.convert(old, self.data)
        except msgspec.ValidationError as error:
            return f"not a valid {self.name}: {error}"
        try:
            return self.transition(typed_old, typed_new) if self.transition else None
        except Exception as error:  # noqa: BLE001 - the user's code; the refusal records it
            return f"the transition check of {self.name} raised {type(error).__name__}: {error}"
