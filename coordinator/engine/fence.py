"""Fence: just before the commit, does what the policy relied on still hold?

Decisive evidence is read again, concurrently, by its revision where the source can; what counts is whether the decisive fields
moved. Evidence that is too old for its `MaxAge` is due as well. What moved is the new reading at once; only what was read *after*
it has to be gathered anew. Evidence from our own records is not read here: the commit compares it under lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import anyio

from coordinator.config import Settings
from coordinator.core.evidence import Decisive, MaxAge
from coordinator.core.fence import Check, ReadCheck, all_hold, compare_items, moved, with_dependants
from coordinator.engine.gather import Readings, at_once
from coordinator.engine.read import read
from coordinator.engine.run import Engine, Reading, Run


@dataclass(frozen=True, slots=True)
class Fenced:
    """``confirmed`` maps evidence to when its confirming read began. ``readings`` replaces what moved; ``stale`` names what has
    to be gathered again because of it, or because it is too old."""

    checks: list[Check]
    confirmed: dict[str, float]
    readings: Readings
    stale: set[str]
    ended: float

    @property
    def held(self) -> bool:
        return all_hold(self.checks)


async def fence(engine: Engine, run: Run, readings: Mapping[str, Reading]) -> Fenced:
    """Compare everything decisive with the world as it is now."""
    now: Readings = {}

    async def again(name: str, traceparent: str, others: anyio.CancelScope) -> None:
        declared = run.type.evidence[name]
        then = readings[name]
        now[name] = await read(
            engine, run, declared, readings, traceparent=traceparent, then=then, not_before=then.ended
        )

    decisive = [name for name in readings if _is_reread(run, readings[name])]
    with run.stage("fence") as traceparent:
        await at_once(decisive, partial(again, traceparent=traceparent))
    return _compare(run, readings, now)


def _compare(run: Run, readings: Mapping[str, Reading], now: Readings) -> Fenced:
    checks: list[Check] = []
    for name, reading in readings.items():
        freshness = run.type.evidence[name].freshness
        if name in now and isinstance(freshness, Decisive):
            each = run.type.evidence[name].for_each is not None
            checks += compare_items(freshness, reading.item, now[name].item, each=each)
        elif _is_reread(run, reading):  # no answer is no confirmation
            checks.append(Check(evidence=name, field="", then=reading.item.state, now=None, held=False))
        elif isinstance(freshness, MaxAge):
            checks.append(_age_check(name, reading, freshness))
    changed = moved(checks)
    replaced = {name: now[name] for name in changed if name in now}
    stale = with_dependants(changed, run.type.evidence) - replaced.keys()
    return Fenced(
        checks,
        {name: reading.began for name, reading in now.items()},
        replaced,
        stale & readings.keys(),
        time.monotonic(),
    )


def _is_reread(run: Run, reading: Reading) -> bool:
    """What the policy could rely on: something found, or known to be absent. Our own records are compared under lock."""
    declared = run.type.evidence[reading.item.name]
    return (
        isinstance(declared.freshness, Decisive)
        and not reading.local
        and reading.item.state in ("found", "absent")
    )


def _age_check(name: str, reading: Reading, freshness: MaxAge) -> Check:
    age, limit = reading.age_ms(), freshness.max_age_ms
    held = reading.item.state != "found" or age <= limit
    return Check(evidence=name, field="age_ms", then=limit, now=age, held=held)


def still_fresh(
    settings: Settings, run: Run, readings: Mapping[str, Reading], fenced: Fenced, now: float
) -> bool:
    """Whether, at monotonic time ``now``, the confirmations are recent enough and no `MaxAge` has run out meanwhile."""
    if fenced.confirmed and (now - fenced.ended) * 1000 > settings.confirm_max_age_ms:
        return False
    limits = ((run.type.evidence[name].freshness, reading) for name, reading in readings.items())
    return all(
        not isinstance(freshness, MaxAge)
        or reading.item.state != "found"
        or reading.age_ms() <= freshness.max_age_ms
        for freshness, reading in limits
    )


def read_set(run: Run, readings: Mapping[str, Reading]) -> list[ReadCheck]:
    """What the commit compares under lock: the decision's own record, and the records among its decisive evidence."""
    checks = []
    if run.record_key:
        checks.append(ReadCheck("record", *run.record_key, run.record.version, None))
    for name, reading in readings.items():
        freshness = run.type.evidence[name].freshness
        if reading.local and isinstance(freshness, Decisive):
            (kind, id), locked = reading.local
            checks.append(ReadCheck(name, kind, id, locked.version, reading.item.value, freshness.fields))
    return checks
