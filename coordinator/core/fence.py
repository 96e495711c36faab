"""The fence, as arithmetic: does what the policy relied on still hold, and what must be read again if not.

A revision that moved proves nothing by itself; what counts is whether the *decisive fields* moved. A missing reading is compared
by its state: evidence that was absent must still be absent. Values are compared as JSON, where ``1`` is ``1.0`` but not ``true``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.each import member_by_member
from coordinator.core.evidence import Decisive, Evidence, Item, State


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. ``field`` is empty for the whole value. ``confirmed_ms_before_commit``: how long before COMMIT was sent the
    confirming read was begun; 0 for records, which are compared under lock inside the transaction."""

    evidence: str
    field: str
    then: JsonValue
    now: JsonValue
    held: bool
    confirmed_ms_before_commit: int | None = None


class ReadCheck(msgspec.Struct, frozen=True):
    """A record that the policy relied on, to be compared under lock: its version, or only the named fields of its data."""

    evidence: str
    kind: str
    id: str
    version: int
    data: JsonValue
    fields: tuple[str, ...] = ()

    def compare(self, version: int, data: JsonValue) -> list[Check]:
        """The checks against the record as it is now, under lock; a record that does not exist is version 0 without data."""
        if not self.fields:
            held = version == self.version
            return [_check(self.evidence, "version", self.version, version, held)]
        if self.data is None or data is None:
            return [_check_states(self.evidence, _state(self.data), _state(data))]
        return compare_fields(self.evidence, self.fields, self.data, data)


def compare_items(freshness: Decisive, then: Item, now: Item, *, each: bool = False) -> list[Check]:
    """The checks of one re-read reading against the one that the policy saw. ``each``: it was read for every member of a list, and
    the fields are those of each."""
    if then.state != "found" or now.state != "found":
        return [_check_states(then.name, then.state, now.state)]
    if freshness.fields:
        before, after = then.value, now.value
        if each:
            before, after = (member_by_member(value, freshness.fields) for value in (before, after))
        return compare_fields(then.name, freshness.fields, before, after)
    return [_check(then.name, "", then.value, now.value, _same(then.value, now.value))]


def compare_fields(name: str, fields: Sequence[str], then: JsonValue, now: JsonValue) -> list[Check]:
    """One check per field, named as in JSON; a member that is missing counts as null."""
    checks = []
    for field in fields:
        before, after = _member(then, field), _member(now, field)
        checks.append(_check(name, field, before, after, _same(before, after)))
    return checks


def all_hold(checks: Sequence[Check]) -> bool:
    return all(check.held for check in checks)


def moved(checks: Sequence[Check]) -> set[str]:
    """The names of evidence that did not hold."""
    return {check.evidence for check in checks if not check.held}


def with_dependants(names: set[str], evidence: Mapping[str, Evidence[Any, Any]]) -> set[str]:
    """These, and all that was read after any of them, however indirectly. ``evidence`` is in dependency order."""
    stale = set(names)
    for name, declared in evidence.items():
        if stale.intersection(declared.after):
            stale.add(name)
    return stale


def _member(value: JsonValue, field: str) -> JsonValue:
    return value.get(field) if isinstance(value, dict) else None


def _same(then: JsonValue, now: JsonValue) -> bool:
    return then == now and canonical(then) == canonical(now)


def _state(data: JsonValue) -> State:
    return "absent" if data is None else "found"


def _check_states(evidence: str, then: State, now: State) -> Check:
    return _check(evidence, "", then, now, then == now)


def _check(evidence: str, field: str, then: JsonValue, now: JsonValue, held: bool) -> Check:
    return Check(evidence=evidence, field=field, then=then, now=now, held=held)
