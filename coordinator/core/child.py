"""Children: one decision that asks for another, and takes its outcome as evidence.

The child is a decision like any other: admitted for the same tenant and class, durable under a key of its own, with its own policy,
fence and effects. Its key is made of the parent's, so whoever reads again, or takes the parent over, finds the same child.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from coordinator.core.canonical import JsonValue

if TYPE_CHECKING:
    from coordinator.core.evidence import ReadRequest

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Concluded(msgspec.Struct, Generic[T], frozen=True):
    """How a child came to rest: ``terms`` if it was committed, ``reason`` if it was declined. ``decision`` is its id."""

    decision: str
    status: str
    terms: T | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ChildAsk:
    """What the child is asked. ``key`` is shared by all that ask with the same; None: a child of this parent alone."""

    input: JsonValue
    record: tuple[str, str] | None = None
    key: str | None = None


@runtime_checkable
class ChildSource(Protocol[T_co]):
    """A source whose readings are decisions of type ``decision_type``. `ask_child` raises ``ValueError`` if the request lacks what it
    needs."""

    @property
    def name(self) -> str: ...
    @property
    def returns(self) -> type[T_co]: ...
    @property
    def decision_type(self) -> str: ...
    def ask_child(self, request: ReadRequest) -> ChildAsk: ...


def circle(asks: Mapping[str, Sequence[str]]) -> list[str]:
    """Types each of which asks for the next, and the last for the first; none if there is no such circle. All types asked for have to
    be among the keys."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for asked in asks[name]:
                if found := visit(asked, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in asks if (found := visit(name, []))), [])
