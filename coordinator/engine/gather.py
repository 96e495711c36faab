"""Gather: read the evidence, concurrently, into typed items.

Each reading starts the moment what it comes `after` is there, and has its own deadline inside the decision's. Failures are items
like any other. When a required reading fails for good, the others are no longer useful: they are cancelled, and their clean-ups
run. A reading whose dependency is missing is `skipped`; it never starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from coordinator.core.evidence import State
from coordinator.core.packet import Packet
from coordinator.engine.items import no_answer
from coordinator.engine.read import read
from coordinator.engine.run import Engine, Reading, Run

Readings = dict[str, Reading]


async def gather(engine: Engine, run: Run, wanted: Iterable[str]) -> None:
    """Read ``wanted`` into ``run.readings``, each the moment it is there. However this ends, there is an item for each."""
    asked_for = set(wanted)
    names = [name for name in run.type.evidence if name in asked_for]
    again, since = run.readings.keys() & asked_for, time.monotonic()
    there = {name: anyio.Event() for name in names}
    began: dict[str, float] = {}

    async def one(name: str, traceparent: str, others: anyio.CancelScope) -> None:
        declared = run.type.evidence[name]
        for before in declared.after:
            if before in there:
                await there[before].wait()
        began[name] = time.monotonic()
        reading = await read(
            engine,
            run,
            declared,
            run.readings,
            traceparent=traceparent,
            not_before=since if name in again or run.locks else 0.0,  # what a lock protects is read under it
            reuse=name not in again,
        )
        if name in again and time.monotonic() >= run.ends_at:
            there[name].set()  # its limit was the decision's: what was known before stays
            return
        run.readings[name] = reading
        run.events.add("evidence", reading.item)
        there[name].set()
        if declared.required and reading.item.state != "found":
            others.cancel()

    replaced = names
    try:
        with run.stage("gather", evidence_count=len(names)) as traceparent:
            await at_once(names, partial(one, traceparent=traceparent))
    except anyio.get_cancelled_exc_class():
        # What was gathered in an earlier round is still all that is known.
        replaced = [name for name in names if name not in again]
        raise
    finally:
        for name in replaced:
            if not there[name].is_set():
                run.readings[name] = reading = _cut_short(run, name, began.get(name))
                run.events.add("evidence", reading.item)


def _cut_short(run: Run, name: str, began: float | None) -> Reading:
    """What was under way or waited for its turn when the others were of no use any more, or the decision's time was over."""
    now = time.monotonic()
    if began is None:
        return no_answer(run.type.evidence[name], "cancelled", now, 0)
    state: State = "timed_out" if now >= run.ends_at else "cancelled"
    return no_answer(run.type.evidence[name], state, began, 1)


async def at_once(names: Sequence[str], read_one: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Call ``read_one(name, others=scope)`` for all names concurrently; cancelling the scope ends those under way."""
    if len(names) == 1:
        with anyio.CancelScope() as alone:
            await read_one(names[0], others=alone)
        return
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(partial(read_one, name, others=tasks.cancel_scope))


def freeze(run: Run, readings: Mapping[str, Reading]) -> Packet:
    """The packet of everything read, in the order of declaration."""
    return Packet([readings[name].item for name in run.type.evidence if name in readings], run.type.types)


def missing(run: Run, packet: Packet) -> list[str]:
    """Required evidence that is not there."""
    return [
        item.name for item in packet.items if run.type.evidence[item.name].required and item.state != "found"
    ]
