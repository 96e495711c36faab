"""The packet: all evidence of a decision, frozen, with a digest over its canonical bytes.

The bytes are the canonical JSON array of the items, exactly as a decision shows them under ``evidence``; so anyone who has the
decision can recompute ``packet_digest``. The policy reads typed values that are decoded from what the packet stores, never the
source's own objects: a replay from the stored bytes sees the very same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import msgspec

from coordinator.core.canonical import JsonValue, canonical, digest
from coordinator.core.evidence import Evidence, Item, Optional, Required, State

T = TypeVar("T")
D = TypeVar("D")


class Present(msgspec.Struct, Generic[T], frozen=True):
    """Optional evidence that was found."""

    value: T

    def or_else(self, default: D) -> T | D:
        return self.value


class Missing(msgspec.Struct, frozen=True):
    """Optional evidence that is not there, and why. It has no ``value``: there is nothing to mistake for zero."""

    state: State
    code: str | None = None

    def or_else(self, default: D) -> D:
        return default


class MissingEvidence(LookupError):
    """Required evidence was asked for that is not there; the engine never runs a policy on such a packet."""


class _Stored(msgspec.Struct, frozen=True):
    name: str
    value: JsonValue


_stored = msgspec.json.Decoder(list[_Stored]).decode


class Packet:
    """Immutable. ``packet[evidence]`` gives the typed value; ``packet.item(name)`` the whole reading."""

    def __init__(self, items: Sequence[Item], types: Mapping[str, Any]) -> None:
        self.items = tuple(items)
        self.bytes = canonical(self.items, checked=True)
        self.digest = digest(self.bytes)
        self._by_name = {item.name: item for item in self.items}
        self._types = types
        self._typed: dict[str, Any] = {}
        self._stored: dict[str, JsonValue] = {}

    @overload
    def __getitem__(self, evidence: Evidence[T, Required]) -> T: ...
    @overload
    def __getitem__(self, evidence: Evidence[T, Optional]) -> Present[T] | Missing: ...
    def __getitem__(self, evidence: Evidence[T, Any]) -> T | Present[T] | Missing:
        item = self._by_name.get(evidence.name)
        if item is None and evidence.on_demand:
            return Missing("skipped", "not-asked-for")
        if item is None:
            raise MissingEvidence(f"{evidence.name} is not evidence of this decision type")
        if item.state != "found":
            if evidence.required:
                raise MissingEvidence(f"{item.name} is {item.state}")
            return Missing(item.state, item.error.code if item.error else None)
        value = cast(T, self._value(item))
        return value if evidence.required else Present(value)

    def item(self, name: str) -> Item:
        """The reading of that name, whatever its state. ``KeyError`` if the decision type does not declare it."""
        return self._by_name[name]

    def _value(self, item: Item) -> Any:
        if item.name not in self._typed:
            if not self._stored:
                self._stored = {each.name: each.value for each in _stored(self.bytes)}
            self._typed[item.name] = msgspec.convert(self._stored[item.name], self._types[item.name])
        return self._typed[item.name]
