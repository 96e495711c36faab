"""Likeness: when are two readings the same question, so that one answer serves both?

They ask the same source object for the same tenant, and what the source can tell apart in the two requests is equal. A source
that says what its address is made of (`Addressed`) sees those values and the revision asked about; any other sees the whole
request. What is not the same JSON is not the same: 1 is not true, and 1 is not 1.0. A remote worker's task and a child
belong to their decision, and are shared with nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from coordinator.core.child import ChildSource
from coordinator.core.evidence import EACH, Addressed, ReadRequest, RemoteSource

_encode = msgspec.json.Encoder(order="deterministic").encode
_LONGEST = 128
"""Longer questions are kept as their SHA-256."""

Question: TypeAlias = "tuple[object, ...]"
"""Hashable. Equal questions have the same answer, as far as a source can tell them apart."""


def asker(source: object) -> Callable[[ReadRequest], Question | None]:
    """What this source would be asked by a request; None where that cannot be told, and so can be shared with nobody."""
    if isinstance(source, RemoteSource | ChildSource) or not getattr(source, "shares", True):
        return lambda _: None
    identity = id(source)
    paths = [path.split(".") for path in source.asks_for] if isinstance(source, Addressed) else None

    def question(request: ReadRequest) -> Question | None:
        try:
            seen = _encode(_whole(request) if paths is None else [value_at(request, path) for path in paths])
        except (TypeError, ValueError, RecursionError):
            return None
        short = seen if len(seen) <= _LONGEST else hashlib.sha256(seen).digest()
        return (request.tenant, identity, type(request.input) if paths is None else None, short)

    return question


def _whole(request: ReadRequest) -> Sequence[object]:
    return (request.input, request.evidence, request.record_kind, request.record_id)


def value_at(request: ReadRequest, path: Sequence[str]) -> Any:
    """The value at a path such as ``input.site``, ``evidence.cost.amount``, ``record.id`` or ``tenant``; None if it leads nowhere."""
    root, *steps = path
    match root:
        case "input":
            value: Any = request.input
        case "evidence":
            value = request.evidence
        case "record":
            value = {"kind": request.record_kind, "id": request.record_id}
        case "each":
            value = request.evidence.get(EACH)
        case _:
            return None  # the tenant is part of every question
    for step in steps:
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
    return value
