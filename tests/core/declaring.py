"""Sources, sinks and evidence as a user would declare them, for tests that never call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from coordinator import Commit, Evidence, Keyed, Outcome, Packet, Record, Snapshot
from coordinator.core.effect import Ambiguous, Guarantee, LookupResult, Operation, SendResult
from coordinator.core.evidence import Answer, Failed, Freshness, Item, Optional, ReadRequest, Required
from coordinator.core.money import Money

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    site: str


class Capacity(msgspec.Struct, frozen=True):
    available_hours: float
    crew: int | None = None


class Cost(msgspec.Struct, frozen=True):
    cents: int


class FixedSource(Generic[T]):
    """Has a shape and nothing to say."""

    provider = "nobody"

    def __init__(self, returns: type[T], name: str = "fixed") -> None:
        self.returns = returns
        self.name = name

    async def read(self, request: ReadRequest) -> Answer[T]:
        return Failed("never-called", "declared for its shape only")


class FixedSink:
    provider = "nobody"
    timeout_ms = 1_000

    def __init__(self, name: str, guarantee: Guarantee | None = None) -> None:
        self.name = name
        self.guarantee: Guarantee = guarantee or Keyed(86_400_000)

    async def perform(self, operation: Operation) -> SendResult:
        return Ambiguous("never-called", "declared for its shape only")

    async def lookup(self, operation: Operation) -> LookupResult:
        return Ambiguous("never-called", "declared for its shape only")


capacity_source = FixedSource(Capacity, "planner")
cost_source = FixedSource(Cost, "estimator")


def required(
    name: str,
    after: Sequence[str] = (),
    *,
    deadline_ms: int | None = 500,
    freshness: Freshness = Snapshot(),
    attempts: int = 2,
    reserves: Money | None = None,
) -> Evidence[Capacity, Required]:
    return Evidence(
        name,
        capacity_source,
        deadline_ms=deadline_ms,
        after=after,
        freshness=freshness,
        attempts=attempts,
        reserves=reserves,
    )


def optional(
    name: str, after: Sequence[str] = (), *, on_demand: bool = False
) -> Evidence[Capacity, Optional]:
    return Evidence(name, capacity_source, deadline_ms=500, after=after, required=False, on_demand=on_demand)


def item(name: str, value: object = None, **other: object) -> Item:
    """A reading; found unless told otherwise."""
    fields: dict[str, object] = {
        "name": name,
        "source": "planner",
        "state": "found",
        "value": value,
        "observed_at": "2026-03-01T08:00:00.000000Z",
        "freshness": {"kind": "snapshot"},
        "elapsed_ms": 12,
        "attempts": 1,
    }
    return Item(**{**fields, **other})  # type: ignore[arg-type]  # the tests name real fields


def promise_nothing(request: Request, packet: Packet, record: Record[object]) -> Outcome:
    return Commit({})
