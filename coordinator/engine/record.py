"""Record: write down the events of decisions that run here and are followed, and tell of what their workers say.

Every `follow_ms`, for what has run that long already: which of it is marked as followed, and what of that is not in the database
yet. A decision that comes to rest sooner is not asked about: whoever wants to follow it from elsewhere finds it at rest.

A worker's progress reaches whichever process its heartbeat reaches; from there it is passed on to the holder through the database,
if somebody follows. The progress of one run is told up to the size that one evidence may have; what exceeds that is left out, and
said to be.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from uuid import UUID

import anyio
from uuid_utils.compat import uuid7

from coordinator.engine.recover import quietly
from coordinator.engine.run import Engine, Run
from coordinator.store import events
from coordinator.store.database import Database

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
        notes = await events.take_notes(connection, tenant, list(marked)) if marked else []
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
    runs = {run.id: run for run in running}
    for note in notes:
        tell_progress(engine, runs[note.decision_id], note.evidence, note.lines)


def tell_progress(engine: Engine, run: Run, evidence: str, lines: Sequence[str]) -> None:
    """Lines of progress, to those who follow the run."""
    room = engine.settings.max_evidence_bytes - run.progress_chars
    run.progress_chars += sum(map(len, lines))
    if run.progress_chars <= engine.settings.max_evidence_bytes:
        run.events.add("progress", {"evidence": evidence, "lines": list(lines)})
    elif room >= 0:
        run.events.add("progress", {"evidence": evidence, "lines": ["(there is more; it is left out)"]})


async def pass_on(
    database: Database, tenant: UUID, decision: UUID, evidence: str, lines: Sequence[str]
) -> None:
    """To the process that holds the decision."""

    async def write() -> None:
        async with database.transaction(tenant) as connection:
            await events.note_if_followed(connection, tenant, uuid7(), events.Note(decision, evidence, lines))

    await quietly("pass on progress", write)
