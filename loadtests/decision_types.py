"""What is decided under load: one record change and one effect each, with no source, three sources, or three decisive sources.

The facts and the record are those of the request's own subject: distinct per decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeAlias

import msgspec

from adapters.function import FunctionSource
from adapters.http import HttpSource, WebhookSink
from coordinator import (
    Commit,
    Coordinator,
    DecisionType,
    Decisive,
    Decline,
    Effect,
    Evidence,
    MaxAge,
    Packet,
    Record,
    RecordKind,
    decision_type,
    keyed,
)
from coordinator.core.canonical import JsonValue
from coordinator.core.effect import Accepted, Ambiguous, LookupResult, Operation, SendResult, Sink
from coordinator.core.evidence import Required, Source
from coordinator.core.outcome import Outcome

TYPES: Final = ("record-only", "three-sources", "three-decisive")
RECORD_KIND: Final = "load"
EFFECT: Final = "load"


class Ask(msgspec.Struct, frozen=True):
    subject: str


class Customer(msgspec.Struct, frozen=True):
    id: str
    discount_percent: int


class Capacity(msgspec.Struct, frozen=True):
    site: str
    available_hours: int


class Cost(msgspec.Struct, frozen=True):
    id: str
    estimate_minor: int


class Priced(msgspec.Struct, frozen=True):
    price_minor: int
    decided: int


Policy: TypeAlias = "Callable[[Ask, Packet, Record[Priced]], Outcome]"
Declared: TypeAlias = "DecisionType[Ask, Any]"

SOURCES: Final[Mapping[str, type[Any]]] = {"customers": Customer, "capacity": Capacity, "costs": Cost}
DECISIVE: Final = {"customers": "discount_percent", "capacity": "available_hours", "costs": "estimate_minor"}


class Sources:
    """The three sources, in the order of `SOURCES`."""

    def __init__(self, sources: list[Source[Any]]) -> None:
        self._sources = sources

    def evidence(self, decisive: Mapping[str, str] | None) -> list[Evidence[Any, Required]]:
        return [
            Evidence(
                source.name,
                source,
                deadline_ms=5_000,
                freshness=Decisive(decisive[source.name]) if decisive else MaxAge(timedelta(seconds=30)),
            )
            for source in self._sources
        ]


def over_http(url: str) -> Coordinator:
    """Sources and sink are those of the demo providers. Each is a provider of its own, with a concurrency limit of its own."""
    sources: list[Source[Any]] = [
        HttpSource(name, f"{url}/{name}/{{input.subject}}", returns=returns, provider=name)
        for name, returns in SOURCES.items()
    ]
    return _declare(
        Sources(sources), WebhookSink(EFFECT, f"{url}/effects/{EFFECT}", guarantee=keyed(hours=24))
    )


def in_memory() -> Coordinator:
    """The same types with sources and a sink that answer at once."""

    async def customers(ask: Ask, evidence: Mapping[str, JsonValue]) -> Customer:
        return Customer(ask.subject, 5)

    async def capacity(ask: Ask, evidence: Mapping[str, JsonValue]) -> Capacity:
        return Capacity(ask.subject, 24)

    async def costs(ask: Ask, evidence: Mapping[str, JsonValue]) -> Cost:
        return Cost(ask.subject, 120_000)

    sources: list[Source[Any]] = [
        FunctionSource("customers", customers, returns=Customer),
        FunctionSource("capacity", capacity, returns=Capacity),
        FunctionSource("costs", costs, returns=Cost),
    ]
    return _declare(Sources(sources), MemorySink())


class MemorySink:
    """Accepts everything."""

    name = EFFECT
    provider = "memory"
    guarantee = keyed(hours=24)
    timeout_ms = 1_000

    async def perform(self, operation: Operation) -> SendResult:
        return Accepted(f"m-{operation.attempt}")

    async def lookup(self, operation: Operation) -> LookupResult:
        return Ambiguous("no-lookup", "nothing is kept")


def _declare(sources: Sources, sink: Sink) -> Coordinator:
    record = RecordKind(RECORD_KIND, Priced)

    def declared(name: str, policy: Policy, evidence: list[Evidence[Any, Required]]) -> Declared:
        return decision_type(
            name,
            request=Ask,
            policy=policy,
            policy_version="1",
            evidence=evidence,
            effects=[sink],
            record=record,
        )

    aged, decisive = [sources.evidence(fields) for fields in (None, DECISIVE)]
    return Coordinator(
        [
            declared("record-only", lambda ask, packet, was: _commit(ask, was, 100_000), []),
            declared("three-sources", _priced(*aged), aged),
            declared("three-decisive", _priced(*decisive), decisive),
        ]
    )


def _priced(
    customers: Evidence[Any, Required], capacity: Evidence[Any, Required], costs: Evidence[Any, Required]
) -> Policy:
    def price(ask: Ask, packet: Packet, was: Record[Priced]) -> Outcome:
        customer: Customer = packet[customers]
        site: Capacity = packet[capacity]
        cost: Cost = packet[costs]
        if site.available_hours < 1:
            return Decline("no capacity")
        return _commit(ask, was, cost.estimate_minor * (100 - customer.discount_percent) // 100)

    return price


def _commit(ask: Ask, was: Record[Priced], price_minor: int) -> Outcome:
    terms = Priced(price_minor, 1 + (was.data.decided if was.data else 0))
    effect = Effect(EFFECT, {"subject": ask.subject, "price_minor": price_minor})
    return Commit(terms, changes=[was.becomes(terms)], effects=[effect])
