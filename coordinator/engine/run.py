"""One decision under way: what is known about it, and what the stages share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any
from uuid import UUID

import anyio
import msgspec

from coordinator import telemetry
from coordinator.config import Settings
from coordinator.core.budget import Short
from coordinator.core.canonical import JsonValue
from coordinator.core.decision import DecisionType
from coordinator.core.evidence import Evidence, Item
from coordinator.core.fence import Check
from coordinator.core.lock_names import Unnamed
from coordinator.core.money import Money
from coordinator.core.request import DecisionRequest
from coordinator.core.view import Stage, timestamp
from coordinator.engine.chains import Chains
from coordinator.engine.children import Children
from coordinator.engine.events import EventLog
from coordinator.engine.flights import Flights
from coordinator.engine.kept import Kept
from coordinator.engine.lines import Lines, Places
from coordinator.engine.pools import Providers
from coordinator.engine.tasks import Tasks
from coordinator.errors import RequestRefused
from coordinator.store.boundary import Boundary
from coordinator.store.records import Key, Locked
from coordinator.store.reserve import Secured


@dataclass(frozen=True, slots=True)
class Reading:
    """An item of evidence; ``began`` is when its reading began, on this process's monotonic clock: the value held at some moment
    after that, so ages counted from it are never too small. ``local`` is what a record evidence was read as. ``ended``: what
    confirms it has to begin after that. ``parts`` are the readings for each, where it is made of several."""

    item: Item
    began: float
    local: tuple[Key, Locked] | None = None
    parts: tuple[Reading, ...] = ()
    ended: float = field(default_factory=time.monotonic)

    def age_ms(self) -> int:
        return int((time.monotonic() - self.began) * 1000)


@dataclass(slots=True)
class UnderReview:
    """Who approved what was shown under ``etag``, of a decision that is in review for ``reason``, ``since`` then. ``unconfirmed``:
    something could not be read, so nobody knows whether it still holds."""

    reviewer: UUID
    note: str
    etag: str
    reason: str
    since: datetime
    expires_at: datetime
    unconfirmed: bool = False


@dataclass(slots=True)
class Run:
    """The state of one decision in this process. Only the task that walks its path writes it."""

    tenant: UUID
    id: UUID
    token: int
    type: DecisionType[Any, Any]
    request: DecisionRequest
    input: object
    traceparent: str
    created_at: datetime
    ends_at: float
    record: Locked
    requested_by: UUID
    rounds: int = 0
    rendered_at: float = 0.0
    """When the commit was rendered: the leases of its operations began after that."""
    stages: list[Stage] = field(default_factory=list)
    readings: dict[str, Reading] = field(default_factory=dict)
    """Everything gathered so far."""
    calls: Counter[str] = field(default_factory=Counter)
    """How many calls were begun for each evidence: in every round, by the gather and by the fence."""
    spent: dict[str, list[Money]] = field(default_factory=dict)
    """What those calls reported they cost."""
    held: Secured | None = None
    """What is reserved for its work, by kind and item; None before that was asked for."""
    short: Short | None = None
    """Which budget had no room when it was last asked for."""
    settled: dict[str, int] = field(default_factory=dict)
    """How many of the costs in ``spent`` were settled at an earlier rest, by evidence: an approval goes on from them."""
    silent_before: frozenset[str] = frozenset()
    """Evidence that was silent until an earlier rest; what was reserved for it then is uncertain since."""
    accounted: bool = True
    """Whether ``spent`` and ``silent`` are the whole truth. Not if it is brought to rest by a process that it does not run in."""
    cost_limited: bool = False
    """A reading was not begun because what it may cost did not fit in the ceiling any more."""
    moves: list[Check] = field(default_factory=list)
    """The checks that did not hold in earlier rounds."""
    lock_names: tuple[str, ...] = field(init=False, default=())
    """The named locks that it needs, in the global order."""
    begun_before: bool = False
    """Whether it may have locks from an earlier run."""
    locks: dict[str, int] = field(default_factory=dict)
    """Those that it has, with their tokens."""
    waits_for: str | None = None
    """The lock that it is waiting for."""
    places: Places = field(init=False)
    """Where it stands in line for its locks, while it walks its path."""
    lend_slot: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Gives its slot back for as long as the block waits for something else."""
    cancelled: bool = False
    cancel: Callable[[], None] = lambda: None
    """Stops what it is doing now: waiting for its slot, or walking its path."""
    review: UnderReview | None = None
    """The approval that this run carries out."""
    events: EventLog = field(init=False)
    """What those are told who follow it."""
    progress_chars: int = 0
    """How much its workers have said while they work."""

    def __post_init__(self) -> None:
        self.events = EventLog(self.token)
        if self.type.locks:
            with suppress(Unnamed):  # its type has changed since, and it will not get so far as to need them
                self.lock_names = self.type.locks.of(self.input, self.request.record)

    @property
    def record_key(self) -> Key | None:
        return (self.request.record.kind, self.request.record.id) if self.request.record else None

    @property
    def record_data(self) -> JsonValue:
        return None if self.record.data is None else msgspec.json.decode(self.record.data)

    @property
    def currency(self) -> str | None:
        """What this decision is paid in: as its type reserves, else as the caller's ceiling says, else as the first bill."""
        known = (*self.type.reserves, self.request.ceiling, *(costs[0] for costs in self.spent.values()))
        return next((amount.currency for amount in known if amount is not None), None)

    @property
    def silent(self) -> set[str]:
        """Evidence of which a call was begun that did not report its cost, or has not yet: it may still be billed."""
        return {name for name in self.calls if self._silent_calls(name) > 0}

    def _silent_calls(self, name: str) -> int:
        return self.calls[name] - len(self.spent.get(name, ()))

    def bill(self, name: str, cost: Money | None) -> None:
        """Take down what one call cost. None: it did not say; and what it says in a currency that is not ours is no answer."""
        if cost is not None and cost.currency == (self.currency or cost.currency):
            self.spent.setdefault(name, []).append(cost)

    def bill_others(self, name: str, count: int, costs: Sequence[Money]) -> None:
        """So many others had begun the same call before, and some of them say what it cost."""
        self.calls[name] += count
        for cost in costs:
            self.bill(name, cost)

    def left_out(self, name: str) -> bool:
        """Whether this evidence would have to be paid for, and there was no money for it."""
        return (
            self.held is not None
            and self.type.evidence[name].reserves is not None
            and ("evidence", name) not in self.held
        )

    def _unknown(self, declared: Evidence[Any, Any]) -> int:
        """How many times its reserve may still be billed. The reserve is for the whole, where it is read for each of a list."""
        calls = self._silent_calls(declared.name)
        return min(calls, 1) if declared.for_each else calls

    def affords(self, reserve: Money | None) -> bool:
        """Whether a reading that may cost so much may begin: together with what was spent, and with the reserve of each call
        that has not said what it cost, it has to fit in the decision's ceiling. So the ceiling holds unless a call costs more
        than its evidence reserves; repeats within one reading are what its reserve is for."""
        ceiling = self.request.ceiling
        if reserve is None or ceiling is None:
            return True
        spent = sum(cost.amount_minor for costs in self.spent.values() for cost in costs)
        unknown = sum(
            declared.reserves.amount_minor * (self._unknown(declared) + (name in self.silent_before))
            for name, declared in self.type.evidence.items()
            if declared.reserves is not None
        )
        return spent + unknown + reserve.amount_minor <= ceiling.amount_minor

    @property
    def out_of_rounds(self) -> bool:
        return self.rounds >= self.type.max_rounds

    @property
    def may_reconsider(self) -> bool:
        """Whether the policy may run again on a newer version of the record."""
        expected = self.request.record.expected_version if self.request.record else None
        return expected is None and not self.out_of_rounds

    def expects_another(self, version: int) -> bool:
        """Whether the caller named a version of its record that is not this one."""
        expected = self.request.record.expected_version if self.request.record else None
        return expected is not None and expected != version

    def tell_start(self) -> None:
        """Its path begins; what took time before that is told with it."""
        for stage in self.stages:
            self.events.add("stage", stage)
        self.events.add("running", {"fencing_token": self.token})

    def stage_now(self, name: str, ms: int) -> Stage:
        """A stage that ends now."""
        return Stage(at=timestamp(datetime.now(UTC) - timedelta(milliseconds=ms)), stage=name, ms=ms)

    def stage(self, name: str, **attributes: str | int | bool) -> StageTimer:
        """Measure one stage into the timeline, the metrics and a span; as a context it gives the traceparent for calls inside."""
        return StageTimer(self, name, attributes)


class StageTimer:
    """A context manager; not a generator, since every decision passes several of them."""

    __slots__ = ("at", "began", "name", "run", "span")

    def __init__(self, run: Run, name: str, attributes: dict[str, str | int | bool]) -> None:
        self.run = run
        self.name = name
        self.span = telemetry.span(
            f"coordinator.{name}", run.traceparent, decision_id=str(run.id), **attributes
        )

    def __enter__(self) -> str:
        self.at = datetime.now(UTC)
        self.began = time.monotonic()
        return self.span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.span.__exit__(kind, error, trace)
        seconds = time.monotonic() - self.began
        stage = Stage(at=timestamp(self.at), stage=self.name, ms=round(seconds * 1000))
        self.run.stages.append(stage)
        self.run.events.add("stage", stage)
        telemetry.STAGE_SECONDS.labels(self.name).observe(seconds)


class Freed:
    """Whoever waits for a tenant's money is woken when some has come back in this process."""

    def __init__(self) -> None:
        self._events: dict[UUID, asyncio.Event] = {}

    async def wait(self, tenant: UUID, seconds: float) -> None:
        event = self._events.setdefault(tenant, asyncio.Event())
        with anyio.move_on_after(seconds):
            await event.wait()

    def tell(self, tenant: UUID) -> None:
        event = self._events.pop(tenant, None)
        if event is not None:
            event.set()


Refusal = Callable[[RequestRefused], tuple[int, bytes]]
"""Renders a refusal that is stored as a decision's answer: its status and its bytes. The api's business, given from above."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What every stage needs: the durable boundary, the limits, and what is shared between decisions in this process."""

    boundary: Boundary
    settings: Settings
    providers: Providers
    flights: Flights
    kept: Kept
    children: Children
    chains: Chains
    tasks: Tasks
    owner: UUID
    new_id: Callable[[], UUID]
    render_refusal: Refusal
    wake_in: Callable[[float], None]
    """Look for due work again after so many seconds."""
    stopping: Callable[[], bool]
    """Whether this process drains: then it does not wait for a database that is away, but leaves what it holds to its lease."""
    still_holds: Callable[[UUID, int], bool]
    """Whether this process's lease of an operation, under this token, is certainly still good."""
    freed: Freed = field(default_factory=Freed)
    """Tells who waits for a budget that money has come back."""
    lines: Lines = field(default_factory=Lines)
