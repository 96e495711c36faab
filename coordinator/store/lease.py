"""Leases: how a process holds decisions and operations, and how another takes operations over when it falls silent.

    claim    an operation that is due, or whose lease has run out on the database's clock: SKIP LOCKED, token + 1, one receipt
    renew    what this process still works on, by owner; a row that was taken meanwhile is not touched
    release  a stopping process lets go

Decisions are claimed from the queue, and go back to it: see `store/queue.py`.

A process that was paused past its lease finds its token refused by every write; nothing else needs to be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from coordinator.core.receipt import receipt
from coordinator.store import log
from coordinator.store.database import Connection


class Claim(msgspec.Struct, frozen=True):
    """Who claims, for how long, and of which decision types."""

    owner: UUID
    lease_ms: int
    types: Sequence[str]


class ClaimedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that this process now holds. ``was`` is the state it was found in: ``dispatching`` means that its last holder
    may have sent it. ``decision_sends`` counts the sends of all operations of its decision. ``age_ms`` counts from the commit,
    which is before any send; ``last_sent_age_ms`` from the end of the last send whose end is known."""

    id: UUID
    token: int
    was: str
    decision_id: UUID
    decision_type: str
    effect: str
    key: str
    payload: bytes
    traceparent: str
    sends: int
    lookups: int
    in_doubt: bool
    linked: bool
    paid: bool = False
    decision_sends: int
    age_ms: int
    last_sent_age_ms: int | None


TENANTS_WITH_WORK = """
SELECT tenant_id FROM decisions WHERE status = 'running' AND lease_expires_at < clock_timestamp()
UNION
SELECT tenant_id FROM decisions WHERE status = 'queued' AND deadline_at < clock_timestamp()
UNION
SELECT tenant_id FROM operations WHERE lease_owner IS NOT NULL AND lease_expires_at < clock_timestamp()
UNION
SELECT tenant_id FROM operations WHERE state IN ('ready', 'uncertain') AND due_at < clock_timestamp()
"""

CLAIM_OPERATIONS = """
WITH found AS (
    SELECT id, state FROM operations
    WHERE tenant_id = $1
      AND ((lease_owner IS NOT NULL AND lease_expires_at < clock_timestamp())
           OR (lease_owner IS NULL AND state IN ('ready', 'uncertain') AND due_at < clock_timestamp()))
      AND decision_type = ANY ($5::text[])
    ORDER BY coalesce(due_at, lease_expires_at) LIMIT $2
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE operations o
SET fencing_token = o.fencing_token + 1, lease_owner = $3, lease_expires_at = clock_timestamp() + $4 * interval '1 ms',
    state = CASE found.state WHEN 'ready' THEN 'dispatching' ELSE found.state END, due_at = NULL
FROM found WHERE o.tenant_id = $1 AND o.id = found.id
RETURNING o.id, o.fencing_token, found.state AS was, o.decision_id, o.decision_type, o.effect, o.key, o.payload, o.traceparent,
          o.sends, o.lookups, o.in_doubt, o.linked, o.paid,
          (SELECT sum(s.sends) FROM operations s WHERE s.tenant_id = $1 AND s.decision_id = o.decision_id) AS decision_sends,
          (extract(epoch FROM clock_timestamp() - o.created_at) * 1000)::bigint AS age_ms,
          (extract(epoch FROM clock_timestamp() - o.last_sent_at) * 1000)::bigint AS last_sent_age_ms
"""

RENEW = """
WITH d AS (
    UPDATE decisions SET lease_expires_at = clock_timestamp() + $4 * interval '1 ms'
    WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner = $3 AND status IN ('running', 'in_review')
)
UPDATE operations SET lease_expires_at = clock_timestamp() + $4 * interval '1 ms'
WHERE tenant_id = $1 AND id = ANY ($5::uuid[]) AND lease_owner = $3
RETURNING id
"""

RELEASE = """
WITH r AS (    -- approvals that were under way: the reviews are open again
    UPDATE decisions SET lease_expires_at = clock_timestamp()
    WHERE tenant_id = $1 AND status = 'in_review' AND lease_owner = $3
)
UPDATE operations SET lease_expires_at = clock_timestamp()
WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner = $3
"""


async def tenants_with_work(connection: Connection) -> Sequence[UUID]:
    """Tenants that have something nobody holds. Runs in the dispatch view, not in a tenant's transaction."""
    return [row["tenant_id"] for row in await connection.fetch(TENANTS_WITH_WORK)]


async def claim_operations(
    connection: Connection, tenant: UUID, claim: Claim, *, limit: int
) -> Sequence[ClaimedOperation]:
    """Take operations that are due, and those whose holder fell silent."""
    rows = await connection.fetch(CLAIM_OPERATIONS, tenant, limit, claim.owner, claim.lease_ms, claim.types)
    claimed = [
        ClaimedOperation(
            token=row["fencing_token"],
            **{name: row[name] for name in ClaimedOperation.__struct_fields__ if name != "token"},
        )
        for row in rows
    ]
    if claimed:
        await log.append(
            connection,
            tenant,
            [
                receipt(
                    "operation.dispatching" if c.was == "ready" else "operation.taken-over",
                    decision_id=str(c.decision_id),
                    operation_id=str(c.id),
                    fencing_token=c.token,
                    was=c.was,
                )
                for c in claimed
            ],
        )
    return claimed


async def renew(
    connection: Connection,
    tenant: UUID,
    *,
    owner: UUID,
    lease_ms: int,
    decisions: Sequence[UUID],
    operations: Sequence[UUID],
) -> set[UUID]:
    """Those of the operations that this owner still holds."""
    rows = await connection.fetch(RENEW, tenant, decisions, owner, lease_ms, operations)
    return {row["id"] for row in rows}


async def release(connection: Connection, tenant: UUID, owner: UUID, operations: Sequence[UUID]) -> None:
    """Let go of operations that a stopping process could not finish, so that others need not wait for the lease to run out."""
    await connection.execute(RELEASE, tenant, operations, owner)
