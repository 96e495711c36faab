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

from coordinator.core.packet import Packet
from coordinator.engine.items import no_answer
from coordinator.engine.read import read
from coordinator.engine.run import Engine, Reading, Run

Readings = dict[str, Reading]


async def gather(engine: Engine, run: Run, wanted: Iterable[str], have: Readings) -> Readings:
    """Read ``wanted``; ``have`` is what is there already. Returns the new readings only."""
    asked_for = set(wanted)
    names = [name for name in run.type.evidence if name in asked_for]
    fresh: Readings = {}
    there = {name: anyio.Event() for name in names}
    began: dict[str, float] = {}

    async def one(name: str, traceparent: str, others: anyio.CancelScope) -> None:
        declared = run.type.evidence[name]
        for before in declared.after:
            if before in there:
                await there[before].wait()
        began[name] = time.monotonic()
        fresh[name] = await read(engine, run, declared, {**have, **fresh}, traceparent=traceparent)
        run.events.add("evidence", fresh[name].item)
        there[name].set()
        if declared.required and fresh[name].item.state != "found":
            others.cancel()

    with run.stage("gather", evidence_count=len(names)) as traceparent:
        await at_once(names, partial(one, traceparent=traceparent))
    for name in names:
        if name not in fresh:
            attempts = 1 if name in began else 0
            now = time.monotonic()
            fresh[name] = no_answer(run.type.evidence[name], "cancelled", began.get(name, now), attempts)
            run.events.add("evidence", fresh[name].item)
    return fresh


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
