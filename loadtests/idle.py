"""The idle service: what a single decision waits beyond its slowest source.

Each of the three sources is delayed by 20 ms; a decision is due every 100 ms, so that the one before has settled. The target: the
median latency is at most 1.25 times the slowest source's own time as the decision recorded it (median), plus one commit, as
pgbench does it here at one client.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from coordinator.demo.launch import Process
from loadtests.cases import Row, http_row, plan_for
from loadtests.decision_types import SOURCES
from loadtests.floor import Floor
from loadtests.load import Detail
from loadtests.world import World

DELAY_MS = 20
RATE = 10.0
"""Decisions per second."""
FACTOR = 1.25


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """All medians, in ms. ``stages`` are those of the decision's timeline, in its order."""

    latency: float
    slowest_source: float
    one_commit: float
    target: float
    met: bool
    stages: dict[str, float]


def idle_case(world: World, server: Process, floor: Floor, seconds: float) -> tuple[Row, Idle]:
    one_commit = floor.one_commit_ms(seconds)
    world.control({f"/{name}": {"delay_ms": DELAY_MS} for name in SOURCES})
    try:
        plan = plan_for("three-sources", 1, seconds, rate=RATE, detail=True)
        row, measured = http_row(world, server, f"idle, {DELAY_MS} ms sources", plan)
    finally:
        world.control({})
    return row, _judged(measured.details, one_commit)


def _judged(details: Sequence[Detail], one_commit: float) -> Idle:
    latency = median(detail.latency_ms for detail in details)
    slowest = median(detail.slowest_source_ms for detail in details)
    names = dict.fromkeys(name for detail in details for name, _ in detail.timeline)
    target = FACTOR * slowest + one_commit
    return Idle(
        latency=latency,
        slowest_source=slowest,
        one_commit=one_commit,
        target=target,
        met=latency <= target,
        stages={name: median(dict(detail.timeline).get(name, 0.0) for detail in details) for name in names},
    )
