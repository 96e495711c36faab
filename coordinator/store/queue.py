"""The queue: decisions that wait in the database, held by nobody, until some process has a slot for them.

    admit    (store/admit.py) a decision is born running if its process has a slot, else queued
    claim    queued -> running: the oldest of a class, SKIP LOCKED, token + 1, under the claiming process's lease
    requeue  running -> queued, at its old place, token + 1: its holder fell silent, stops, or ran into the ceiling of one run
    overdue  a queued decision whose time limit is over is claimed without a slot, only to be brought to rest

What a decision had reserved when it was requeued is uncertain from then on, since its work may still be billed; it reserves anew.
`queues.depth` counts the queued rows of a class. Whoever changes that number locks its row after the decisions and before the log.
A holder that was paused finds its token out of date and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from coordinator.core.receipt import receipt
from coordinator.store import closing, log
from coordinator.store.database import Connection
from coordinator.store.lease import Claim
from coordinator.store.records import Locked


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that this process now holds. ``remaining_ms`` until its deadline may be negative; ``record`` is what its record
    holds now."""

    id: UUID
    token: int
    type: str
    class_: str
    request: bytes
    traceparent: str
    requested_by: UUID
    created_at: datetime
    remaining_ms: int
    waited_ms: int
    estimated_ms: int | None
    requeues: int
    record: Locked


class Waiting(msgspec.Struct, frozen=True):
    """What waits of one class and tenant, and since when its oldest does."""

    tenant: UUID
    class_: str
    depth: int
    oldest_ms: float


_CLAIMED = """
d.id, d.fencing_token, d.type, d.class, d.request, d.traceparent, d.requested_by, d.created_at, d.record_kind,
d.record_id, d.estimated_ms, d.requeues,
(extract(epoch FROM d.deadline_at - clock_timestamp()) * 1000)::bigint AS remaining_ms,
(extract(epoch FROM clock_timestamp() - d.queued_at) * 1000)::bigint AS waited_ms
"""

_TAKEN = f"""
taken AS (
    UPDATE decisions d
    SET status = 'running', fencing_token = d.fencing_token + 1, lease_owner = $2,
        lease_expires_at = clock_timestamp() + $3 * interval '1 ms'
    FROM found WHERE d.tenant_id = $1 AND d.id = found.id
    RETURNING {_CLAIMED}
), gone AS (
    UPDATE queues q SET depth = q.depth - c.change
    FROM (SELECT class, count(*) AS change FROM taken GROUP BY class) c
    WHERE q.tenant_id = $1 AND q.class = c.class
)
SELECT t.*, coalesce(r.version, 0) AS version, r.data
FROM taken t LEFT JOIN records r ON r.tenant_id = $1 AND r.kind = t.record_kind AND r.id = t.record_id
"""

# SKIP LOCKED: processes that claim from one queue take different rows, and none waits for another.
CLAIM = f"""
WITH found AS (
    SELECT q.id FROM unnest($5::text[], $6::int[]) AS wanted (class, count)
    CROSS JOIN LATERAL (
        SELECT id FROM decisions
        WHERE tenant_id = $1 AND class = wanted.class AND status = 'queued'
          AND type = ANY ($4::text[])    -- what this service declares; another version of it may declare the others
        ORDER BY queued_at, id LIMIT wanted.count
        FOR NO KEY UPDATE SKIP LOCKED
    ) q
), {_TAKEN}
"""

OVERDUE = f"""
WITH found AS (
    SELECT id FROM decisions
    WHERE tenant_id = $1 AND status = 'queued' AND deadline_at < clock_timestamp() AND type = ANY ($4::text[])
    ORDER BY deadline_at LIMIT $5
    FOR NO KEY UPDATE SKIP LOCKED
), {_TAKEN}
"""

# The old holder's token is raised away at once: between here and the next claim nobody can write this decision.
REQUEUE = """
WITH found AS (
    SELECT id FROM decisions
    WHERE tenant_id = $1 AND status = 'running'
      AND CASE WHEN $2::uuid[] IS NULL THEN lease_expires_at < clock_timestamp()
               ELSE id = ANY ($2) AND lease_owner = $3 END
    ORDER BY lease_expires_at LIMIT $4
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE decisions d
SET status = 'queued', fencing_token = d.fencing_token + 1, lease_owner = NULL, lease_expires_at = NULL,
    requeues = d.requeues + 1
FROM found WHERE d.tenant_id = $1 AND d.id = found.id
RETURNING d.id, d.class, d.fencing_token
"""

# An upsert, so that the row is there and locked whichever process needs it first.
LOCK_DEPTHS = """
INSERT INTO queues (tenant_id, class) SELECT $1, class FROM unnest($2::text[]) AS c (class) ORDER BY class
ON CONFLICT (tenant_id, class) DO UPDATE SET depth = queues.depth
RETURNING class, depth
"""

COUNT = """
INSERT INTO queues AS q (tenant_id, class, depth)
SELECT $1, class, change FROM unnest($2::text[], $3::int[]) AS c (class, change) ORDER BY class
ON CONFLICT (tenant_id, class) DO UPDATE SET depth = q.depth + excluded.depth
"""

UNCOUNT = """
UPDATE queues q SET depth = q.depth - c.change
FROM unnest($2::text[], $3::int[]) AS c (class, change)
WHERE q.tenant_id = $1 AND q.class = c.class
"""

WAITING = """
SELECT q.tenant_id, q.class, q.depth, coalesce((
    SELECT extract(epoch FROM clock_timestamp() - d.queued_at) * 1000 FROM decisions d
    WHERE d.tenant_id = q.tenant_id AND d.class = q.class AND d.status = 'queued'
    ORDER BY d.queued_at LIMIT 1), 0)::float8 AS oldest_ms
FROM queues q WHERE q.depth > 0
"""

WAITING_OF_TENANT = f"{WAITING} AND q.tenant_id = $1"

RUNNING_OF_TENANT = """
SELECT class, count(*) AS running FROM decisions WHERE tenant_id = $1 AND status = 'running' GROUP BY class
"""

POSITION = """
SELECT (SELECT count(*) FROM decisions d
        WHERE d.tenant_id = $1 AND d.class = mine.class AND d.status = 'queued'
          AND (d.queued_at, d.id) <= (mine.queued_at, mine.id)) AS position
FROM decisions mine WHERE mine.tenant_id = $1 AND mine.id = $2 AND mine.status = 'queued'
"""


async def claim(
    connection: Connection, tenant: UUID, wanted: Sequence[str], by: Claim
) -> Sequence[Claimed | None]:
    """For each class in ``wanted`` its oldest queued decision that nobody else is taking, or None."""
    counts = Counter(wanted)
    rows = await connection.fetch(
        CLAIM, tenant, by.owner, by.lease_ms, by.types, list(counts), list(counts.values())
    )
    claimed = await _taken(connection, tenant, rows)
    return [
        next((claimed.pop(i) for i, c in enumerate(claimed) if c.class_ == class_), None) for class_ in wanted
    ]


async def claim_overdue(connection: Connection, tenant: UUID, by: Claim, *, limit: int) -> Sequence[Claimed]:
    """Queued decisions whose time limit is over."""
    rows = await connection.fetch(OVERDUE, tenant, by.owner, by.lease_ms, by.types, limit)
    return await _taken(connection, tenant, rows)


async def _taken(connection: Connection, tenant: UUID, rows: Sequence[asyncpg.Record]) -> list[Claimed]:
    """Oldest first, counted out of the queue, with a receipt each."""
    claimed = sorted(map(_claimed, rows), key=lambda each: -each.waited_ms)
    if claimed:
        receipts = [
            receipt("decision.running", decision_id=str(each.id), fencing_token=each.token)
            for each in claimed
        ]
        await log.append(connection, tenant, receipts)
    return claimed


def _claimed(row: asyncpg.Record) -> Claimed:
    return Claimed(
        token=row["fencing_token"],
        class_=row["class"],
        record=Locked(row["version"], row["data"]),
        **{
            name: row[name] for name in Claimed.__struct_fields__ if name not in ("token", "class_", "record")
        },
    )


async def requeue_expired(connection: Connection, tenant: UUID, *, limit: int) -> Sequence[str]:
    """Queue what silent processes held; the classes of what was queued."""
    return await _requeue(connection, tenant, None, None, limit, "lease-expired")


async def requeue_held(
    connection: Connection, tenant: UUID, owner: UUID, ids: Sequence[UUID], reason: str
) -> Sequence[str]:
    """Queue again what this process still holds of ``ids``; the classes of what was queued."""
    return await _requeue(connection, tenant, ids, owner, len(ids), reason)


async def _requeue(
    connection: Connection,
    tenant: UUID,
    ids: Sequence[UUID] | None,
    owner: UUID | None,
    limit: int,
    reason: str,
) -> Sequence[str]:
    locked = await closing.lock_running(connection, tenant, ids)
    rows = await connection.fetch(REQUEUE, tenant, ids, owner, limit)
    if rows:
        await enter(connection, tenant, [row["class"] for row in rows])
        receipts = [
            receipt(
                "decision.queued",
                decision_id=str(row["id"]),
                fencing_token=row["fencing_token"],
                reason=reason,
            )
            for row in rows
        ]
        await log.append(connection, tenant, receipts)
        await closing.give_up(connection, tenant, locked, {row["id"] for row in rows}, reason)
    return [row["class"] for row in rows]


async def lock_depths(connection: Connection, tenant: UUID, classes: Sequence[str]) -> dict[str, int]:
    """How many are queued of each class; nobody changes it before this transaction ends."""
    rows = await connection.fetch(LOCK_DEPTHS, tenant, sorted(set(classes)))
    return {row["class"]: row["depth"] for row in rows}


async def enter(connection: Connection, tenant: UUID, classes: Sequence[str]) -> None:
    """Count decisions of these classes into the queue."""
    counts = Counter(classes)
    await connection.execute(COUNT, tenant, list(counts), list(counts.values()))


async def leave(connection: Connection, tenant: UUID, classes: Sequence[str]) -> None:
    """Count decisions of these classes out of the queue."""
    counts = Counter(classes)
    await connection.execute(UNCOUNT, tenant, sorted(counts), [counts[class_] for class_ in sorted(counts)])


async def waiting(connection: Connection) -> Sequence[Waiting]:
    """What waits, of all tenants. Runs in the dispatch view, not in a tenant's transaction."""
    return [Waiting(*row) for row in await connection.fetch(WAITING)]


async def waiting_of(connection: Connection, tenant: UUID) -> Sequence[Waiting]:
    return [Waiting(*row) for row in await connection.fetch(WAITING_OF_TENANT, tenant)]


async def running_of(connection: Connection, tenant: UUID) -> Mapping[str, int]:
    """How many decisions of the tenant run, by class."""
    return {row["class"]: row["running"] for row in await connection.fetch(RUNNING_OF_TENANT, tenant)}


async def position(connection: Connection, tenant: UUID, id: UUID) -> int:
    """1 for the tenant's next one of its class; 0 for one that does not wait."""
    return await connection.fetchval(POSITION, tenant, id) or 0
