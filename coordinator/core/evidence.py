"""Evidence: what a decision type asks of a source, what the source answers, and the typed item that the packet keeps.

A source answers with a closed union, never with None or an exception for something expected:

    Found      the value, with the revision it was read at
    Absent     the source was asked and there is no such thing; this is knowledge, not failure
    Unchanged  only in answer to a conditional read: the revision asked about still stands
    Failed     the source could not tell; ``retryable`` says whether asking again may help

The engine turns an answer into an `Item`, adding `timed_out`, `cancelled` and `skipped`, which a source cannot know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
    runtime_checkable,
)

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.child import ChildSource
from coordinator.core.freshness import SNAPSHOT as SNAPSHOT
from coordinator.core.freshness import Decisive as Decisive
from coordinator.core.freshness import Freshness as Freshness
from coordinator.core.freshness import MaxAge as MaxAge
from coordinator.core.freshness import Snapshot as Snapshot
from coordinator.core.item import Item as Item
from coordinator.core.item import ItemError as ItemError
from coordinator.core.item import State as State
from coordinator.core.item import clean_text as clean_text
from coordinator.core.money import Money
from coordinator.core.shapes import UNIONS as UNIONS
from coordinator.core.shapes import check_decisive_fields
from coordinator.core.shapes import is_struct as is_struct
from coordinator.core.where import declared_at
from coordinator.errors import DeclarationError

if TYPE_CHECKING:
    from coordinator.core.each import Each
    from coordinator.core.packet import Packet

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = TypeVar("P")

MAX_DEADLINE_MS = 3_600_000
MAX_ITEMS = 1_000
EACH = "each"
"""What one of the list is called where evidence is read for each: ``{each.id}`` in a template, ``evidence["each"]`` otherwise."""
MAX_UNITS = 1_000_000_000_000
"""Of anything counted per minute: exact in JSON, and in sums of a minute."""


class Found(msgspec.Struct, Generic[T], frozen=True):
    """A reading. ``age_ms``: how old the source says the value was when it answered. ``confidence`` is within 0..1,
    ``interval`` a lower and an upper bound, both in the value's own unit; ``cost`` is what this reading cost, ``units`` how much of
    the provider's units/min it used (tokens, for instance), if that is known."""

    value: T
    revision: str | None = None
    age_ms: int = 0
    cost: Money | None = None
    confidence: float | None = None
    interval: tuple[float, float] | None = None
    units: int | None = None


class Absent(msgspec.Struct, frozen=True):
    revision: str | None = None
    cost: Money | None = None
    units: int | None = None


class Unchanged(msgspec.Struct, frozen=True):
    cost: Money | None = None
    units: int | None = None


class Failed(msgspec.Struct, frozen=True):
    """``code`` is stable and kebab-case; ``retry_after_ms`` is what the provider asked for, if it did. A provider may bill for
    a failure as well: ``cost``, and count its ``units``."""

    code: str
    message: str
    retryable: bool = False
    retry_after_ms: int | None = None
    cost: Money | None = None
    units: int | None = None


Answer: TypeAlias = "Found[T] | Absent | Unchanged | Failed"


class Part(msgspec.Struct, Generic[T], frozen=True):
    """A piece of a reading that is still under way, for those who follow the decision. The evidence is what comes at the end."""

    value: T


async def _told_nobody(value: object) -> None:
    """Where a reading is not part of a decision, nobody follows it."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a source is told. ``evidence`` holds the values (as JSON) of what this reading was declared to come after;
    ``if_revision`` asks for a conditional read; ``on_cancel`` registers a clean-up that runs if the reading is cancelled. The
    reading is cancelled at its deadline; ``timeout_s`` is for a source that has to name a limit of its own. ``reservation`` is the
    id of the money that is reserved for it, if any: what the provider may be asked about later (`Billed`).

    ``emit`` streams a part, anything that is JSON, to those who follow the decision, and returns when the slowest of them has
    room again; it raises `ValueError` for what is no JSON or too much. Parts are shown, never decided on: the answer at the end
    is the whole."""

    tenant: str
    input: object
    evidence: Mapping[str, JsonValue]
    record_kind: str
    record_id: str
    if_revision: str | None
    timeout_s: float
    traceparent: str
    on_cancel: Callable[[Callable[[], Awaitable[None]]], None]
    emit: Callable[[object], Awaitable[None]] = _told_nobody
    reservation: str | None = None


class Source(Protocol[T]):
    """A read-only adapter; it may be called twice. ``provider`` names the pool whose limits its calls share.

    What several decisions of one tenant ask it at the same time is asked once (`coordinator.core.likeness`). A source whose
    readings are made for one decision alone says so with an attribute ``shares = False``.
    """

    @property
    def name(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def returns(self) -> type[T]: ...
    async def read(self, request: ReadRequest) -> Answer[T]: ...


@runtime_checkable
class Billed(Protocol):
    """A source that can find out later what was billed under a reservation, after a reading that never said. None: not known yet;
    an amount, zero included, is the provider's word and final."""

    async def billed(self, reservation: str) -> Money | None: ...


@runtime_checkable
class LocalSource(Protocol[T_co]):
    """A source that reads a record of this tenant's own database; the fence checks it under lock, inside the transaction."""

    @property
    def name(self) -> str: ...
    @property
    def returns(self) -> type[T_co]: ...
    @property
    def record_kind(self) -> str: ...
    def record_id(self, request: ReadRequest) -> str: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What a remote worker is asked. ``request`` is all it is told. ``pinned`` names the only worker that may have the task;
    ``may_fall_back`` lets any capable one have it if that one cannot."""

    request: JsonValue
    pinned: str | None = None
    may_fall_back: bool = False


@runtime_checkable
class RemoteSource(Protocol[T_co]):
    """A source whose readings are made by remote workers that have its ``capability``. `ask` raises ``ValueError`` if the request
    lacks what it needs."""

    @property
    def name(self) -> str: ...
    @property
    def returns(self) -> type[T_co]: ...
    @property
    def capability(self) -> str: ...
    def ask(self, request: ReadRequest) -> Ask: ...


@runtime_checkable
class Addressed(Protocol):
    """A source whose address is made of the request: ``asks_for`` are paths such as ``input.site``, checked when declared."""

    @property
    def asks_for(self) -> Sequence[str]: ...


class Required:
    """Marks evidence without which there is no decision: the policy gets its plain value."""


class Optional:
    """Marks evidence that may be missing: the policy gets `Present` or `Missing` and has to say what it does with either."""


class Skip(msgspec.Struct, frozen=True):
    """What a condition answers to say why evidence is not read."""

    reason: str


When: TypeAlias = "Callable[[Any, Packet], bool | Skip]"
"""Any: the first parameter is whatever request type the decision declares."""


class Evidence(Generic[T, P]):
    """One piece of evidence of a decision type: where it is read, how long that may take, how fresh it must be at commit.

    ``packet[evidence]`` is a ``T`` if required, else ``Present[T] | Missing``. ``deadline_ms`` covers all attempts, waiting in
    the provider's pool included; ``attempt_ms`` bounds each call alone, from when it has its slot: one that takes longer is cut
    off, and repeated if ``attempts`` are left. ``after`` names evidence that must be there first; its values reach the source's
    request. ``on_demand`` evidence is read only when the policy returns ``NeedMore`` naming it. ``units`` is how much of the
    provider's units/min one call is expected to use; what it says it really used corrects that afterwards.

    ``when(request, packet)`` makes it conditional. It is pure; the packet holds what comes before, found or not, and nothing else.
    If it answers False, or ``Skip("why")``, the evidence is `skipped`; only it decides, so it can also read what makes up for
    something missing.

    ``for_each`` names a list, such as ``input.sites`` or ``evidence.order.lines``: the source is asked for each of its members, all
    at once, and ``packet[evidence]`` is an ``Each[T]``. More than ``max_items`` are a failure. It is found if all were, or at least
    ``need`` of them.
    """

    @overload
    def __init__(
        self: Evidence[T, Required],
        name: str,
        source: Source[T] | LocalSource[T] | RemoteSource[T] | ChildSource[T],
        *,
        deadline_ms: int | None = ...,
        freshness: Freshness = ...,
        required: Literal[True] = ...,
        after: Sequence[str] = ...,
        attempts: int = ...,
        on_demand: Literal[False] = ...,
        reserves: Money | None = ...,
        units: int = ...,
        attempt_ms: int | None = ...,
        when: None = ...,
        for_each: None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Evidence[T, Optional],
        name: str,
        source: Source[T] | LocalSource[T] | RemoteSource[T] | ChildSource[T],
        *,
        deadline_ms: int | None = ...,
        freshness: Freshness = ...,
        required: Literal[False],
        after: Sequence[str] = ...,
        attempts: int = ...,
        on_demand: bool = ...,
        reserves: Money | None = ...,
        units: int = ...,
        attempt_ms: int | None = ...,
        when: When | None = ...,
        for_each: None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: Evidence[Each[T], Required],
        name: str,
        source: Source[T] | RemoteSource[T] | ChildSource[T],
        *,
        deadline_ms: int | None = ...,
        freshness: Freshness = ...,
        required: Literal[True] = ...,
        after: Sequence[str] = ...,
        attempts: int = ...,
        on_demand: Literal[False] = ...,
        reserves: Money | None = ...,
        units: int = ...,
        attempt_ms: int | None = ...,
        when: None = ...,
        for_each: str,
        max_items: int = ...,
        need: int | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Evidence[Each[T], Optional],
        name: str,
        source: Source[T] | RemoteSource[T] | ChildSource[T],
        *,
        deadline_ms: int | None = ...,
        freshness: Freshness = ...,
        required: Literal[False],
        after: Sequence[str] = ...,
        attempts: int = ...,
        on_demand: bool = ...,
        reserves: Money | None = ...,
        units: int = ...,
        attempt_ms: int | None = ...,
        when: When | None = ...,
        for_each: str,
        max_items: int = ...,
        need: int | None = ...,
    ) -> None: ...

    def __init__(
        self,
        name: str,
        source: Source[T] | LocalSource[T] | RemoteSource[T] | ChildSource[T],
        *,
        deadline_ms: int | None = None,
        freshness: Freshness = SNAPSHOT,
        required: bool = True,
        after: Sequence[str] = (),
        attempts: int = 2,
        on_demand: bool = False,
        reserves: Money | None = None,
        units: int = 0,
        attempt_ms: int | None = None,
        when: When | None = None,
        for_each: str | None = None,
        max_items: int = 100,
        need: int | None = None,
    ) -> None:
        self.where = declared_at()
        if deadline_ms is None:
            raise DeclarationError(f"evidence {name!r} has no deadline: add deadline_ms=...", self.where)
        if type(deadline_ms) is not int or not 1 <= deadline_ms <= MAX_DEADLINE_MS:
            raise DeclarationError(
                f"evidence {name!r}: deadline_ms must be within 1..{MAX_DEADLINE_MS}",
                self.where,
            )
        if not 1 <= attempts <= 10:
            raise DeclarationError(f"evidence {name!r}: attempts must be within 1..10", self.where)
        if attempt_ms is not None and not (type(attempt_ms) is int and 1 <= attempt_ms <= deadline_ms):
            raise DeclarationError(f"evidence {name!r}: attempt_ms must be within 1..deadline_ms", self.where)
        if (on_demand or when) and required:
            what = "on_demand" if on_demand else "conditional"
            raise DeclarationError(f"evidence {name!r}: {what} evidence must be required=False", self.where)
        if type(max_items) is not int or not 1 <= max_items <= MAX_ITEMS:
            raise DeclarationError(f"evidence {name!r}: max_items must be within 1..{MAX_ITEMS}", self.where)
        if need is not None and not (type(need) is int and 0 <= need <= max_items):
            raise DeclarationError(f"evidence {name!r}: need must be within 0..max_items", self.where)
        if for_each is not None and isinstance(source, LocalSource):
            raise DeclarationError(f"evidence {name!r}: for_each is for sources that are called", self.where)
        if reserves is not None and isinstance(source, ChildSource):
            raise DeclarationError(f"evidence {name!r}: a decision reserves for itself", self.where)
        if type(units) is not int or not 0 <= units <= MAX_UNITS:
            raise DeclarationError(f"evidence {name!r}: units must be within 0..{MAX_UNITS}", self.where)
        check_decisive_fields(name, source.returns, freshness, self.where)
        self.name = name
        self.source = source
        self.local = source if isinstance(source, LocalSource) else None
        self.by_worker = source if isinstance(source, RemoteSource) else None
        self.child = source if isinstance(source, ChildSource) else None
        self.remote = cast("Source[T]", source)
        self.provider = None if self.local or self.by_worker or self.child else self.remote.provider
        self.deadline_ms = deadline_ms
        self.freshness = freshness
        self.required = required
        self.after = tuple(after)
        self.attempts = attempts
        self.on_demand = on_demand
        self.reserves = reserves
        self.units = units
        self.attempt_ms = attempt_ms
        self.when = when
        self.for_each = for_each
        self.max_items = max_items
        self.need = need
