"""Presence: every process says once a second that it is there and what it does, and so knows how many there are.

The rows belong to no tenant. One that was not renewed in time counts as gone and is removed by whoever comes next. Nothing but
estimates and the pages for operators rests on it: what a process holds is said by leases.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import anyio
import msgspec

from coordinator.engine.recover import quietly
from coordinator.engine.schedule import Schedule
from coordinator.store import presence
from coordinator.store.database import Database

EVERY_S = 1.0


class ClassState(msgspec.Struct, frozen=True):
    running: int
    started_per_s: float


class ProcessState(msgspec.Struct, frozen=True):
    """``slots`` is how many decisions the process runs at once."""

    slots: int
    classes: dict[str, ClassState]


def state_of(schedule: Schedule) -> ProcessState:
    classes = {
        name: ClassState(schedule.shares.running[name], round(pace.starts_per_s(), 2))
        for name, pace in schedule.pace.items()
    }
    return ProcessState(schedule.shares.slots, classes)


async def keep_present(database: Database, owner: UUID, schedule: Schedule) -> None:
    """Runs as long as the service does."""

    async def once() -> None:
        await presence.announce(database, owner, msgspec.json.encode(state_of(schedule)), 3 * EVERY_S)
        schedule.processes = max(1, len(await all_present(database)))

    while True:
        await quietly("announce this process", once)
        await anyio.sleep(EVERY_S)


async def all_present(database: Database) -> Sequence[ProcessState]:
    return [msgspec.json.decode(state, type=ProcessState) for state in await presence.present(database)]
