"""The decision types that the drill decides: small, but with everything that can go wrong.

`drill-quote`  one decisive external reading, one record, one effect at the drill's provider
`drill-leave`  a decision that relies on another record of the tenant than the one it changes: whoever goes off call relies on the
               other being on call; both going off is the classic write skew

and those of the crash sweep, see `sweep_types`.
"""

from __future__ import annotations

import os
from datetime import timedelta

import msgspec

from adapters.http import HttpSource
from adapters.records import RecordSource
from adapters.webhook import WebhookSink
from coordinator import (
    Commit,
    Coordinator,
    Decisive,
    Decline,
    Effect,
    Evidence,
    Outcome,
    Packet,
    Record,
    RecordKind,
    decision_type,
    keyed,
)
from coordinator.testing.sweep_types import sweep_types

PROVIDERS = os.environ.get("COORDINATOR_PROVIDERS_URL", "http://127.0.0.1:9")


class QuoteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    site: str
    hours: int
    discount: int


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


class Quote(msgspec.Struct, frozen=True):
    discount: int
    hours: int


capacity = Evidence(
    "capacity",
    HttpSource("drill-capacity", PROVIDERS + "/capacity/{input.site}", returns=Capacity),
    deadline_ms=2000,
    freshness=Decisive("available_hours"),
)
quotes = RecordKind("drill-quote", Quote)
send = WebhookSink(
    "drill-send",
    PROVIDERS + "/effects/drill-send",
    guarantee=keyed(hours=24, lookup_lag=timedelta(0)),
    lookup_url=PROVIDERS + "/effects/drill-send/{key}",
    timeout_ms=5000,
)


def quote(request: QuoteRequest, packet: Packet, record: Record[Quote]) -> Outcome:
    free = packet[capacity].available_hours
    if free < request.hours:
        return Decline(f"{free} hours are free, {request.hours} were asked for")
    terms = Quote(request.discount, request.hours)
    return Commit(
        {"discount": request.discount, "free_hours": free},
        changes=[record.becomes(terms)],
        effects=[
            Effect(
                "drill-send",
                {"record": record.id, "version": record.version + 1, "discount": request.discount},
            )
        ],
    )


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    other: str


class Duty(msgspec.Struct, frozen=True):
    on_call: bool


other = Evidence(
    "other",
    RecordSource("drill-other", "drill-duty", "{input.other}", returns=Duty),
    deadline_ms=2000,
    freshness=Decisive("on_call"),
)
duties = RecordKind("drill-duty", Duty)


def leave(request: LeaveRequest, packet: Packet, record: Record[Duty]) -> Outcome:
    if not packet[other].on_call:
        return Decline(f"{request.other} is off call already")
    return Commit({"on_call": False}, changes=[record.becomes(Duty(on_call=False))])


drill_quote = decision_type(
    "drill-quote",
    request=QuoteRequest,
    policy=quote,
    policy_version="1",
    evidence=[capacity],
    effects=[send],
    record=quotes,
    max_rounds=20,
)
drill_leave = decision_type(
    "drill-leave", request=LeaveRequest, policy=leave, policy_version="1", evidence=[other], record=duties
)
coordinator = Coordinator(
    sweep_types() if "COORDINATOR_SWEEP_LANE" in os.environ else [drill_quote, drill_leave, *sweep_types()]
)
