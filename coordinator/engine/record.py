"""Record: write down the events of decisions that run here and are followed from another process.

Every `follow_ms`, for what has run that long already: which of it is marked as followed, and what of that is not in the database
yet. A decision that comes to rest sooner is not asked about: whoever wants to follow it finds it at rest.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from uuid import UUID

import anyio

from coordinator.engine.recover import quietly
from coordinator.engine.run import Engine, Run
from coordinator.store import events

log = logging.getLogger(__name__)
AT_ONCE = 1_000
"""Events of one decision that one transaction writes."""


async def record_followed(engine: Engine, runs: Mapping[UUID, Run]) -> None:
    """Runs as long as the service does."""
    pause_s = engine.settings.follow_ms / 1000
    seen: dict[UUID, float] = {}
    while True:
        await anyio.sleep(pause_s)
        now = time.monotonic()
        seen = {id: seen.get(id, now) for id in runs}
        by_tenant: dict[UUID, list[Run]] = defaultdict(list)
        for id, since in seen.items():
            if since < now:
                by_tenant[runs[id].tenant].append(runs[id])
        for tenant, running in by_tenant.items():
            await quietly("write down events", partial(_record, engine, tenant, running))


async def _record(engine: Engine, tenant: UUID, running: list[Run]) -> None:
    async with engine.boundary.database.transaction(tenant) as connection:
        marked = await events.followed(connection, tenant, [run.id for run in running])
        batches = []
        for run in running:
            if run.id in marked and not run.events.sealed:
                run.events.followed = True
                if batch := run.events.unstored(AT_ONCE):
                    batches.append((run, batch))
        if batches:
            told = [(run.id, run.token, batch) for run, batch in batches]
            await events.append_if_held(connection, tenant, told)
    for run, batch in batches:
        run.events.stored += len(batch)
