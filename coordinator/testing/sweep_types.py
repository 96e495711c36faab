"""The decision types of the crash sweep: one per lane, so that the server that is made to fail works on its own lane alone.

Each asks one effect of the outside world, of one of these kinds, which differ in how the provider behaves and what it promises:

    kept     it answers, and recognises our key
    lost     it acts each time it is asked, its answers never arrive, and it can be asked by key
    parked   the same, but it cannot be asked: only a person, or the provider in a signed notice, can say what happened
    reviewed like kept, but a person has to approve it
"""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from adapters.http import HttpSource
from adapters.webhook import WebhookSink
from coordinator import (
    Commit,
    DecisionType,
    Decisive,
    Effect,
    Evidence,
    Lookup,
    Outcome,
    Packet,
    Record,
    RecordKind,
    Review,
    Unguarded,
    decision_type,
    keyed,
)

PROVIDERS = os.environ.get("COORDINATOR_PROVIDERS_URL", "http://127.0.0.1:9")
LANES = 8
NOTICE_SECRET = "whsec_ZHJpbGwgZHJpbGwgZHJpbGwgZHJpbGw="
Kind = Literal["kept", "lost", "parked", "reviewed"]
PROVIDER_BEHAVIOUR = {
    f"POST /effects/sweep-{kind}": {"lose_answer": True, "dedup_window_s": 0} for kind in ("lost", "parked")
}
"""To be set at the demo providers before a sweep."""


class SweepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    site: str
    kind: Kind


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


class Swept(msgspec.Struct, frozen=True):
    kind: Kind


swept = RecordKind("drill-swept", Swept)
capacity = Evidence(
    "capacity",
    HttpSource("sweep-capacity", PROVIDERS + "/capacity/{input.site}", returns=Capacity),
    deadline_ms=5000,
    freshness=Decisive("available_hours"),
)


def sweep_type(lane: int) -> DecisionType[SweepRequest, Any]:
    """The decision type of a lane, with its three sinks."""

    def policy(request: SweepRequest, packet: Packet, record: Record[Swept]) -> Outcome:
        effect = Effect(effect_name(request.kind, lane), {"record": record.id, "version": record.version + 1})
        commit = Commit(
            {"free_hours": packet[capacity].available_hours},
            changes=[record.becomes(Swept(request.kind))],
            effects=[effect],
        )
        return Review("a person has to approve it", proposal=commit) if request.kind == "reviewed" else commit

    return decision_type(
        type_name(lane),
        request=SweepRequest,
        policy=policy,
        policy_version="1",
        evidence=[capacity],
        effects=[_kept(lane), _lost(lane), _parked(lane)],
        record=swept,
        locks=["site/{input.site}", "swept/{record.id}"],
    )


def type_name(lane: int) -> str:
    return f"sweep-{lane}"


def effect_name(kind: Kind, lane: int) -> str:
    return f"sweep-{'kept' if kind == 'reviewed' else kind}-{lane}"


def _kept(lane: int) -> WebhookSink:
    name = effect_name("kept", lane)
    return WebhookSink(
        name, f"{PROVIDERS}/effects/{name}", guarantee=keyed(hours=24), timeout_ms=1000, provider=name
    )


def _lost(lane: int) -> WebhookSink:
    name = effect_name("lost", lane)
    return WebhookSink(
        name,
        f"{PROVIDERS}/effects/{name}",
        guarantee=Lookup(lag_ms=0),
        lookup_url=f"{PROVIDERS}/effects/{name}/{{key}}",
        timeout_ms=300,
        provider=name,
    )


def _parked(lane: int) -> WebhookSink:
    name = effect_name("parked", lane)
    return WebhookSink(
        name,
        f"{PROVIDERS}/effects/{name}",
        guarantee=Unguarded(),
        timeout_ms=1000,
        provider=name,
        inbound_secret=NOTICE_SECRET,
    )


def sweep_types() -> list[DecisionType[SweepRequest, Any]]:
    """Of all lanes, or of the one that the environment names."""
    only = os.environ.get("COORDINATOR_SWEEP_LANE")
    return [sweep_type(lane) for lane in ([int(only)] if only else range(LANES))]
