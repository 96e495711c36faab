"""Sessions: what one caller asked for under its own name for it is cancelled together.

A session is nothing but that name, stored with each decision; it begins with the first and is over when nothing of it is unfinished.
Cancelling it cancels its decisions one by one, a few at a time, here or wherever they run: each with its readings, connections, tasks
of workers and clean-ups, which is over before the answer is given. What was committed stays, and what waits for a person waits on.
"""

from __future__ import annotations

from uuid import UUID

import anyio

from coordinator.engine.service import Service
from coordinator.store import reading
from coordinator.store.keys import Key

AT_ONCE = 500
"""Decisions looked up at a time."""


async def cancel_session(service: Service, caller: Key, session: str) -> list[bytes]:
    """What `Service.cancel` says of each decision of the caller's tenant that had not come to rest, oldest first. What is asked for
    while this runs is cancelled too, if it is stored in time to be seen. Raises what the first that failed did: the others may
    have been cancelled, and repeating it is safe."""
    said: dict[UUID, bytes] = {}
    few = anyio.CapacityLimiter(service.settings.cancels_at_once)

    async def cancel(id: UUID) -> None:
        async with few:
            said[id] = await service.cancel(caller, id)

    while ids := await _unfinished(service, caller, session):
        try:
            async with anyio.create_task_group() as tasks:
                for id in ids:
                    tasks.start_soon(cancel, id)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
    return [said[id] for id in sorted(said)]


async def _unfinished(service: Service, caller: Key, session: str) -> list[UUID]:
    async with service.database.transaction(caller.tenant) as connection:
        return [*await reading.unfinished_of_session(connection, caller.tenant, session, limit=AT_ONCE)]
