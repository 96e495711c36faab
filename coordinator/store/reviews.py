"""Reviews: look at one under lock, claim it for an approval, end it, find those whose time is over, list them by urgency.

    claim    in_review, held by nobody, token as seen   -> under lease, token + 1, one receipt; `store.commit` ends the claim
    end      in_review, held by nobody, token as seen   -> declined, cancelled or expired, token + 1, with its receipts

The fencing token is the review's ETag: whoever acts first raises it, so that the second finds it stale. If the process that claimed
dies, its lease runs out and the review is as it was, but for its token. `reviewed` keeps the latest verdict that was begun, for a
caller who lost the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.receipt import Receipt
from coordinator.store import log
from coordinator.store.database import Connection


class ReviewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as a review needs it. ``held``: its lease is good; ``abandoned``: it has run out. ``now`` is the database's time."""

    id: UUID
    type: str
    class_: str
    status: str
    request: bytes
    traceparent: str
    requested_by: UUID
    created_at: datetime
    fencing_token: int
    lease_owner: UUID | None
    held: bool
    abandoned: bool
    view: bytes | None
    review: bytes | None
    review_expires_at: datetime | None
    reviewed: bytes | None
    now: datetime


_REVIEW = """id, type, class AS class_, status, request, traceparent, requested_by, created_at, fencing_token, lease_owner,
lease_owner IS NOT NULL AND lease_expires_at >= clock_timestamp() AS held,
lease_owner IS NOT NULL AND lease_expires_at < clock_timestamp() AS abandoned,
coalesce(view, answer) AS view, review, review_expires_at, reviewed, clock_timestamp() AS now"""

LOCK = f"SELECT {_REVIEW} FROM decisions WHERE tenant_id = $1 AND id = $2 FOR NO KEY UPDATE"

CLAIM = """
UPDATE decisions
SET fencing_token = fencing_token + 1, lease_owner = $4, lease_expires_at = clock_timestamp() + $5 * interval '1 ms', reviewed = $6
WHERE tenant_id = $1 AND id = $2 AND fencing_token = $3 AND status = 'in_review'
RETURNING fencing_token
"""

END = """
UPDATE decisions
SET status = $4, view = $5, finished_at = $6, reviewed = coalesce($7, reviewed), fencing_token = fencing_token + 1,
    review = NULL, review_expires_at = NULL, lease_owner = NULL, lease_expires_at = NULL
WHERE tenant_id = $1 AND id = $2 AND fencing_token = $3 AND status = 'in_review'
RETURNING fencing_token
"""

# Cheap for tenants without any: their part of the partial index is empty.
OVERDUE = f"""
SELECT {_REVIEW} FROM decisions
WHERE tenant_id = $1 AND status = 'in_review' AND review_expires_at <= clock_timestamp()
  AND (lease_owner IS NULL OR lease_expires_at < clock_timestamp())
ORDER BY review_expires_at LIMIT $2
FOR NO KEY UPDATE SKIP LOCKED
"""

TENANTS_WITH_OVERDUE = """
SELECT DISTINCT tenant_id FROM decisions WHERE status = 'in_review' AND review_expires_at <= clock_timestamp()
"""

OPEN = "SELECT type, count(*) AS count FROM decisions WHERE status = 'in_review' GROUP BY type"

# A review keeps its place for as long as it is open: neither its class nor its end changes.
BY_URGENCY = f"""
WITH open AS (
    SELECT {_REVIEW}, coalesce(array_position($2::text[], class), cardinality($2::text[]) + 1) AS rank
    FROM decisions WHERE tenant_id = $1 AND status = 'in_review'
)
SELECT * FROM open
WHERE $3::int IS NULL OR (rank, review_expires_at, id) > ($3, $4::timestamptz, $5::uuid)
ORDER BY rank, review_expires_at, id LIMIT $6
"""


class Place(msgspec.Struct, frozen=True):
    """Where a review stands in the list."""

    rank: int
    expires_at: datetime
    id: UUID


async def lock(connection: Connection, tenant: UUID, id: UUID) -> ReviewRow | None:
    row = await connection.fetchrow(LOCK, tenant, id)
    return None if row is None else ReviewRow(**row)


async def claim(
    connection: Connection,
    tenant: UUID,
    row: ReviewRow,
    *,
    owner: UUID,
    lease_ms: int,
    reviewed: bytes,
    receipts: Sequence[Receipt],
) -> int:
    """Hold a locked review that nobody holds; the new token."""
    token = await connection.fetchval(CLAIM, tenant, row.id, row.fencing_token, owner, lease_ms, reviewed)
    await log.append(connection, tenant, receipts)
    return _changed(token)


async def end(
    connection: Connection,
    tenant: UUID,
    row: ReviewRow,
    *,
    status: str,
    view: bytes,
    reviewed: bytes | None,
    receipts: Sequence[Receipt],
) -> None:
    """Bring a locked review that nobody holds to its end."""
    columns = (row.id, row.fencing_token, status, view, row.now, reviewed)
    _changed(await connection.fetchval(END, tenant, *columns))
    await log.append(connection, tenant, receipts)


def _changed(token: int | None) -> int:
    if token is None:
        raise AssertionError("a locked row changed under its lock")
    return token


async def overdue(connection: Connection, tenant: UUID, *, limit: int) -> Sequence[ReviewRow]:
    """Reviews whose time is over and that nobody carries out, locked."""
    return [ReviewRow(**row) for row in await connection.fetch(OVERDUE, tenant, limit)]


async def tenants_with_overdue(connection: Connection) -> Sequence[UUID]:
    """Runs in the dispatch view, not in a tenant's transaction."""
    return [row["tenant_id"] for row in await connection.fetch(TENANTS_WITH_OVERDUE)]


async def open_by_type(connection: Connection) -> dict[str, int]:
    """How many wait, of all tenants together. Runs in the dispatch view."""
    return {row["type"]: row["count"] for row in await connection.fetch(OPEN)}


async def by_urgency(
    connection: Connection, tenant: UUID, *, classes: Sequence[str], after: Place | None, limit: int
) -> list[tuple[Place, ReviewRow]]:
    """Open reviews: in the order of the classes, and of those the one first that expires first."""
    place = (after.rank, after.expires_at, after.id) if after else (None, None, None)
    found = []
    for row in await connection.fetch(BY_URGENCY, tenant, list(classes), *place, limit):
        fields = dict(row)
        rank = fields.pop("rank")
        found.append((Place(rank, row["review_expires_at"], row["id"]), ReviewRow(**fields)))
    return found
