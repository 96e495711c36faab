"""A small decision type for these tests. ``gate`` holds the reading back until that file exists, so that a test decides when a
decision is under way and when it may go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from adapters.function import FunctionSource
from coordinator import (
    Commit,
    Coordinator,
    Decisive,
    Decline,
    Effect,
    Evidence,
    Keyed,
    Outcome,
    Packet,
    Record,
    RecordKind,
    Review,
    decision_type,
)
from coordinator.core.canonical import JsonValue
from coordinator.core.effect import Accepted, NotFound, Operation
from tests.support import eventually


class QuoteInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    site: str
    hours: int
    gate: str = ""


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


class Quote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hours: int


def never_shrinks(old: Quote | None, new: Quote) -> str | None:
    return "hours may not shrink" if old is not None and new.hours < old.hours else None


async def read_capacity(input: QuoteInput, evidence: Mapping[str, JsonValue]) -> Capacity:
    if input.gate:
        await eventually(Path(input.gate).exists, timeout=60)
    return Capacity(40)


class QuoteSink:
    """Acts at once, and remembers nothing."""

    name = "send-quote"
    provider = "crm"
    guarantee = Keyed(window_ms=3_600_000)
    timeout_ms = 1000

    async def perform(self, operation: Operation) -> Accepted:
        return Accepted(f"crm-{operation.key}")

    async def lookup(self, operation: Operation) -> NotFound:
        return NotFound()


capacity = Evidence(
    "capacity",
    FunctionSource("capacity", read_capacity, returns=Capacity),
    deadline_ms=20_000,
    freshness=Decisive("available_hours"),
)


def price(request: QuoteInput, packet: Packet, record: Record[Quote]) -> Outcome:
    if request.hours > packet[capacity].available_hours:
        return Decline("not enough capacity")
    commit = Commit(
        {"hours": request.hours},
        changes=[record.becomes(Quote(request.hours))],
        effects=[Effect("send-quote", {"hours": request.hours})],
    )
    return Review("a site of its own", proposal=commit) if request.site == "reviewed" else commit


quote = decision_type(
    "quote",
    request=QuoteInput,
    policy=price,
    policy_version="1",
    evidence=[capacity],
    effects=[QuoteSink()],
    record=RecordKind("quote", Quote, transition=never_shrinks),
)
timetable = decision_type(
    "timetable",
    request=QuoteInput,
    policy=lambda request, packet, record: Decline("nothing to change"),
    policy_version="1",
    evidence=[capacity],
    locks=["timetable", "region/{input.site}"],
)
coordinator = Coordinator([quote, timetable])
