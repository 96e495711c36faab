"""The events of followed decisions: written by whoever holds the decision, read by followers in any process.

    follow    a follower, in whichever process, leaves a mark; the holder sees it within `follow_ms`
    append    the holder writes what it has, by token: in batches while the decision runs, and what is left in the transaction that
              brings it to rest. So at rest all of them are there, or, if nobody followed, none
    read      from a number on, a page at a time
    note      a worker's progress that reached another process than the holder's; the holder takes it over into its events

A holder that has lost the decision writes nothing. A number is written once; writing it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from coordinator.core.events import Event
from coordinator.store.database import Connection

FOLLOW = """
INSERT INTO decision_follows (tenant_id, decision_id) VALUES ($1, $2) ON CONFLICT DO NOTHING
"""

FOLLOWED = """
SELECT decision_id FROM decision_follows WHERE tenant_id = $1 AND decision_id = ANY ($2::uuid[])
"""

APPEND = """
INSERT INTO decision_events (tenant_id, decision_id, number, kind, data)
SELECT $1, e.decision_id, e.number, e.kind, e.data
FROM unnest($2::uuid[], $3::bigint[], $4::bigint[], $5::text[], $6::json[]) AS e (decision_id, token, number, kind, data)
JOIN decisions d ON d.tenant_id = $1 AND d.id = e.decision_id AND d.fencing_token = e.token AND d.status IN ('queued', 'running')
ORDER BY e.decision_id, e.number
ON CONFLICT DO NOTHING
"""

EVENTS = """
SELECT number, kind, data FROM decision_events
WHERE tenant_id = $1 AND decision_id = $2 AND number > $3
ORDER BY number LIMIT $4
"""

STORED = """
SELECT EXISTS (SELECT FROM decision_events WHERE tenant_id = $1 AND decision_id = $2 AND number >= $3)
"""


MOVING = """
SELECT EXISTS (
    SELECT FROM operations
    WHERE tenant_id = $1 AND decision_id = $2
      AND (lease_owner IS NOT NULL OR due_at IS NOT NULL OR state IN ('ready', 'compensating'))
)
"""


NOTE = """
INSERT INTO decision_notes (tenant_id, id, decision_id, evidence, lines)
SELECT $1, $2, $3, $4, $5 WHERE EXISTS (SELECT FROM decision_follows WHERE tenant_id = $1 AND decision_id = $3)
"""

TAKE_NOTES = """
WITH taken AS (
    UPDATE decision_notes SET taken = true WHERE tenant_id = $1 AND decision_id = ANY ($2::uuid[]) AND NOT taken
    RETURNING id, decision_id, evidence, lines
)
SELECT decision_id, evidence, lines FROM taken ORDER BY id
"""


class Note(msgspec.Struct, frozen=True):
    """Lines of progress of one evidence."""

    decision_id: UUID
    evidence: str
    lines: Sequence[str]


async def note_if_followed(connection: Connection, tenant: UUID, id: UUID, note: Note) -> None:
    """Send a note to the holder of its decision; where nobody follows, it is not written."""
    await connection.execute(NOTE, tenant, id, note.decision_id, note.evidence, list(note.lines))


async def take_notes(connection: Connection, tenant: UUID, decisions: Sequence[UUID]) -> list[Note]:
    """Those that nobody has taken yet, the oldest first."""
    return [Note(**row) for row in await connection.fetch(TAKE_NOTES, tenant, decisions)]


async def follow(connection: Connection, tenant: UUID, decision: UUID) -> None:
    """Leave the mark."""
    await connection.execute(FOLLOW, tenant, decision)


async def followed(connection: Connection, tenant: UUID, decisions: Sequence[UUID]) -> set[UUID]:
    """Those of these decisions that have the mark."""
    return {row["decision_id"] for row in await connection.fetch(FOLLOWED, tenant, decisions)}


async def append_if_held(
    connection: Connection, tenant: UUID, told: Sequence[tuple[UUID, int, Sequence[Event]]]
) -> None:
    """Write events of decisions, each with the token that its holder has."""
    rows = [
        (id, token, event.number, event.kind, event.data) for id, token, events in told for event in events
    ]
    await connection.execute(APPEND, tenant, *map(list, zip(*rows, strict=True)))


async def events(
    connection: Connection, tenant: UUID, decision: UUID, *, after: int, limit: int
) -> list[Event]:
    return [Event(**row) for row in await connection.fetch(EVENTS, tenant, decision, after, limit)]


async def any_stored(connection: Connection, tenant: UUID, decision: UUID, *, since: int) -> bool:
    """Whether there are events with this number or a higher one."""
    found: bool = await connection.fetchval(STORED, tenant, decision, since)
    return found


async def any_moving(connection: Connection, tenant: UUID, decision: UUID) -> bool:
    """Whether an operation of the decision is in somebody's hands, or something is planned for it."""
    found: bool = await connection.fetchval(MOVING, tenant, decision)
    return found
