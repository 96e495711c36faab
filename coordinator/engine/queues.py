"""The queues as a tenant may see them: what of its own waits and runs, and when its next decision would start."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from coordinator.engine.presence import all_present
from coordinator.engine.schedule import Schedule
from coordinator.store import queue
from coordinator.store.database import Database


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """One class. ``depth``, ``oldest_age_ms`` and ``running`` count the caller's own decisions, over all processes;
    ``queue_depth`` is how many of them may wait. ``slots`` is how many decisions of all classes run at once, ``reserved`` how many of
    these are the class's whenever it wants them, ``started_per_s`` how many of the class are started, all tenants together.
    ``estimated_start_ms``: when a decision that is asked for now would start; ``start_objective_ms``: when it should, at most."""

    class_: str = msgspec.field(name="class")
    depth: int
    oldest_age_ms: int
    running: int
    slots: int
    reserved: int
    weight: int
    queue_depth: int
    started_per_s: float
    estimated_start_ms: int
    start_objective_ms: int


async def queues(database: Database, schedule: Schedule, tenant: UUID) -> Sequence[QueueView]:
    """One for each class, in the order of configuration."""
    async with database.transaction(tenant) as connection:
        waiting = {row.class_: row for row in await queue.waiting_of(connection, tenant)}
        running = await queue.running_of(connection, tenant)
    present = await all_present(database)
    processes = max(1, len(present))
    views = []
    for name, limits in schedule.shares.classes.items():
        there = waiting.get(name)
        depth = there.depth if there else 0
        starts = sum(state.classes[name].started_per_s for state in present if name in state.classes)
        idle = not depth and schedule.shares.busy < schedule.shares.slots
        views.append(
            QueueView(
                class_=name,
                depth=depth,
                oldest_age_ms=round(there.oldest_ms) if there else 0,
                running=running.get(name, 0),
                slots=processes * schedule.shares.slots,
                reserved=processes * limits.reserved,
                weight=limits.weight,
                queue_depth=limits.queue_depth,
                started_per_s=round(starts, 2),
                estimated_start_ms=0 if idle else schedule.estimate_ms(name, tenant, depth + 1),
                start_objective_ms=limits.start_objective_ms,
            )
        )
    return views
