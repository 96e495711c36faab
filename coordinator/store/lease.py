"""Leases: how a process holds decisions and operations, and how another takes them over when it falls silent.

    claim    a row that nobody holds, or whose lease has run out on the database's clock: SKIP LOCKED, token + 1, one receipt
    renew    what this process still works on, by owner; a row that was taken meanwhile is not touched
    start    a queued decision gets its slot: queued -> running, by token
    release  a stopping process lets go

A process that was paused past its lease finds its token refused by every write; nothing else needs to be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
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


class ClaimedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that this process now holds. ``remaining_ms`` until its deadline may be negative."""

    id: UUID
    token: int
    type: str
    class_: str
    request: bytes
    traceparent: str
    requested_by: UUID
    created_at: datetime
    remaining_ms: int


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
    decision_sends: int
    age_ms: int
    last_sent_age_ms: int | None


TENANTS_WITH_WORK = """
SELECT tenant_id FROM decisions WHERE status IN ('queued', 'running') AND lease_expires_at < clock_timestamp()
UNION
SELECT tenant_id FROM operations WHERE lease_owner IS NOT NULL AND lease_expires_at < clock_timestamp()
UNION
SELECT tenant_id FROM operations WHERE state IN ('ready', 'uncertain') AND due_at < clock_timestamp()
"""

CLAIM_DECISIONS = """
WITH found AS (
    SELECT id FROM decisions
    WHERE tenant_id = $1 AND status IN ('queued', 'running') AND lease_expires_at < clock_timestamp()
      AND type = ANY ($5::text[])    -- what this service declares; another version of it may declare the others
    ORDER BY lease_expires_at LIMIT $2
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE decisions d
SET fencing_token = d.fencing_token + 1, status = 'running', lease_owner = $3,
    lease_expires_at = clock_timestamp() + $4 * interval '1 ms'
FROM found WHERE d.tenant_id = $1 AND d.id = found.id
RETURNING d.id, d.fencing_token, d.type, d.class, d.request, d.traceparent, d.requested_by, d.created_at,
          (extract(epoch FROM d.deadline_at - clock_timestamp()) * 1000)::bigint AS remaining_ms
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
          o.sends, o.lookups, o.in_doubt, o.linked,
          (SELECT sum(s.sends) FROM operations s WHERE s.tenant_id = $1 AND s.decision_id = o.decision_id) AS decision_sends,
          (extract(epoch FROM clock_timestamp() - o.created_at) * 1000)::bigint AS age_ms,
          (extract(epoch FROM clock_timestamp() - o.last_sent_at) * 1000)::bigint AS last_sent_age_ms
"""

RENEW = """
WITH d AS (
    UPDATE decisions SET lease_expires_at = clock_timestamp() + $4 * interval '1 ms'
    WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner = $3 AND status IN ('queued', 'running')
)
UPDATE operations SET lease_expires_at = clock_timestamp() + $4 * interval '1 ms'
WHERE tenant_id = $1 AND id = ANY ($5::uuid[]) AND lease_owner = $3
RETURNING id
"""

RELEASE = """
WITH d AS (
    UPDATE decisions SET lease_expires_at = clock_timestamp()
    WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner = $3 AND status IN ('queued', 'running')
)
UPDATE operations SET lease_expires_at = clock_timestamp()
WHERE tenant_id = $1 AND id = ANY ($4::uuid[]) AND lease_owner = $3
"""

START = """
UPDATE decisions d SET status = 'running'
FROM unnest($2::uuid[], $3::bigint[]) AS u (id, token)
WHERE d.tenant_id = $1 AND d.id = u.id AND d.fencing_token = u.token AND d.status = 'queued'
RETURNING d.id
"""


async def tenants_with_work(connection: Connection) -> Sequence[UUID]:
    """Tenants that have something nobody holds. Runs in the dispatch view, not in a tenant's transaction."""
    return [row["tenant_id"] for row in await connection.fetch(TENANTS_WITH_WORK)]


async def claim_decisions(
    connection: Connection, tenant: UUID, claim: Claim, *, limit: int
) -> Sequence[ClaimedDecision]:
    """Take over decisions whose holder fell silent."""
    rows = await connection.fetch(CLAIM_DECISIONS, tenant, limit, claim.owner, claim.lease_ms, claim.types)
    claimed = [
        ClaimedDecision(
            id=row["id"],
            token=row["fencing_token"],
            type=row["type"],
            class_=row["class"],
            request=row["request"],
            traceparent=row["traceparent"],
            requested_by=row["requested_by"],
            created_at=row["created_at"],
            remaining_ms=row["remaining_ms"],
        )
        for row in rows
    ]
    if claimed:
        await log.append(
            connection,
            tenant,
            [receipt("decision.taken-over", decision_id=str(c.id), fencing_token=c.token) for c in claimed],
        )
    return claimed


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


async def release(
    connection: Connection,
    tenant: UUID,
    *,
    owner: UUID,
    decisions: Sequence[UUID],
    operations: Sequence[UUID],
) -> None:
    """Let go of what a stopping process could not finish, so that others need not wait for the lease to run out."""
    await connection.execute(RELEASE, tenant, decisions, owner, operations)


async def start_if_queued(
    connection: Connection, tenant: UUID, holders: Sequence[tuple[UUID, int]]
) -> Sequence[bool]:
    """queued -> running for those that still hold their token; for each whether it did."""
    rows = await connection.fetch(START, tenant, [id for id, _ in holders], [token for _, token in holders])
    started = {row["id"] for row in rows}
    if started:
        await log.append(
            connection,
            tenant,
            [
                receipt("decision.running", decision_id=str(id), fencing_token=token)
                for id, token in holders
                if id in started
            ],
        )
    return [id in started for id, _ in holders]
