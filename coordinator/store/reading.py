"""Reading what is stored: decisions, operations and receipts, one or a page at a time.

Pages go by id, newest first (ids are UUIDv7, so by time): a page stays the same whatever is inserted meanwhile. Every statement
names the tenant although row-level security would add it: the index begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.store.database import Connection


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """``answer`` and ``view`` are JSON bytes; None until the decision rests (``view`` also when it is the answer). ``held``: a
    process has it under lease. ``now`` is the database's time."""

    id: UUID
    type: str
    class_: str
    status: str
    request: bytes
    fingerprint: bytes
    traceparent: str
    created_at: datetime
    answer: bytes | None
    answer_status: int | None
    view: bytes | None
    fencing_token: int
    held: bool
    now: datetime


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """``after`` and ``compensates`` are ordinals within the decision."""

    id: UUID
    decision_id: UUID
    effect: str
    ordinal: int
    after: list[int]
    compensates: int | None
    has_compensation: bool
    cancel_requested: bool
    in_doubt: bool
    key: str
    state: str
    reason: str | None
    reference: str | None
    guarantee: bytes
    payload: bytes
    payload_hash: str
    sends: int
    lookups: int
    fencing_token: int
    created_at: datetime
    last_sent_at: datetime | None
    due_at: datetime | None
    settled_at: datetime | None
    receipt: int | None


class ReceiptRow(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    at: datetime
    kind: str
    decision_id: UUID | None
    operation_id: UUID | None
    body: bytes


_DECISION = """id, type, class AS class_, status, request, fingerprint, traceparent, created_at, answer, answer_status, view,
fencing_token, lease_owner IS NOT NULL AS held, clock_timestamp() AS now"""
_OPERATION = """o.id, o.decision_id, o.effect, o.ordinal, o.after, o.compensates, o.compensation IS NOT NULL AS has_compensation,
o.cancel_requested, o.in_doubt, o.key, o.state, o.reason, o.reference, o.guarantee, o.payload, o.payload_hash, o.sends, o.lookups,
o.fencing_token, o.created_at, o.last_sent_at, o.due_at, o.settled_at,
(SELECT max(r.index) FROM receipts r WHERE r.tenant_id = o.tenant_id AND r.operation_id = o.id) AS receipt"""

DECISION = f"SELECT {_DECISION} FROM decisions WHERE tenant_id = $1 AND id = $2"

DECISION_BY_KEY = f"SELECT {_DECISION} FROM decisions WHERE tenant_id = $1 AND idempotency_key = $2"

DECISIONS = f"""
SELECT {_DECISION} FROM decisions
WHERE tenant_id = $1
  AND ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR type = $3)
  AND ($4::text IS NULL OR (record_kind = $4 AND record_id = $5)) AND ($6::text IS NULL OR class = $6)
  AND ($7::uuid IS NULL OR id < $7)
ORDER BY id DESC LIMIT $8
"""

OPERATIONS_OF = f"""
SELECT {_OPERATION} FROM operations o
WHERE o.tenant_id = $1 AND o.decision_id = ANY ($2::uuid[]) ORDER BY o.decision_id, o.ordinal
"""

OPERATION = f"SELECT {_OPERATION} FROM operations o WHERE o.tenant_id = $1 AND o.id = $2"

OPERATIONS = f"""
SELECT {_OPERATION} FROM operations o
WHERE o.tenant_id = $1 AND ($2::text IS NULL OR o.state = $2) AND ($3::uuid IS NULL OR o.id < $3)
ORDER BY o.id DESC LIMIT $4
"""

ADDRESSED = """
SELECT o.id, o.decision_type FROM tenants t LEFT JOIN operations o ON o.tenant_id = t.tenant_id AND o.effect = $2 AND o.key = $3
WHERE t.tenant_id = $1
"""

RECEIPTS = """
SELECT index, at, kind, decision_id, operation_id, body FROM receipts
WHERE tenant_id = $1
  AND ($2::uuid IS NULL OR decision_id = $2) AND ($3::uuid IS NULL OR operation_id = $3) AND ($4::text IS NULL OR kind = $4)
  AND ($5::timestamptz IS NULL OR at >= $5) AND ($6::timestamptz IS NULL OR at < $6)
  AND index > $7
ORDER BY index LIMIT $8
"""


async def decision(connection: Connection, tenant: UUID, id: UUID) -> DecisionRow | None:
    row = await connection.fetchrow(DECISION, tenant, id)
    return None if row is None else DecisionRow(**row)


async def decision_by_key(connection: Connection, tenant: UUID, key: str) -> DecisionRow | None:
    row = await connection.fetchrow(DECISION_BY_KEY, tenant, key)
    return None if row is None else DecisionRow(**row)


RESTED = "SELECT id FROM decisions WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND answer IS NOT NULL"


async def rested(connection: Connection, tenant: UUID, ids: Sequence[UUID]) -> Sequence[UUID]:
    """Those of ``ids`` that have come to rest."""
    return [row["id"] for row in await connection.fetch(RESTED, tenant, ids)]


UNFINISHED_OF_SESSION = """
SELECT id FROM decisions WHERE tenant_id = $1 AND session = $2 AND status IN ('queued', 'running') ORDER BY id LIMIT $3
"""


async def unfinished_of_session(
    connection: Connection, tenant: UUID, session: str, *, limit: int
) -> Sequence[UUID]:
    """Oldest first."""
    return [row["id"] for row in await connection.fetch(UNFINISHED_OF_SESSION, tenant, session, limit)]


async def decisions(
    connection: Connection,
    tenant: UUID,
    *,
    status: str | None = None,
    type: str | None = None,
    record: tuple[str, str] | None = None,
    class_: str | None = None,
    before: UUID | None = None,
    limit: int,
) -> Sequence[DecisionRow]:
    """Newest first, those older than ``before``."""
    kind, id = record or (None, None)
    rows = await connection.fetch(DECISIONS, tenant, status, type, kind, id, class_, before, limit)
    return [DecisionRow(**row) for row in rows]


async def operations_of(
    connection: Connection, tenant: UUID, decisions: Sequence[UUID]
) -> Sequence[OperationRow]:
    return [OperationRow(**row) for row in await connection.fetch(OPERATIONS_OF, tenant, decisions)]


async def operation(connection: Connection, tenant: UUID, id: UUID) -> OperationRow | None:
    row = await connection.fetchrow(OPERATION, tenant, id)
    return None if row is None else OperationRow(**row)


async def operations(
    connection: Connection, tenant: UUID, *, state: str | None = None, before: UUID | None = None, limit: int
) -> Sequence[OperationRow]:
    return [OperationRow(**row) for row in await connection.fetch(OPERATIONS, tenant, state, before, limit)]


class Addressed(msgspec.Struct, frozen=True):
    """Whom a provider speaks of: a tenant that exists, and its operation, if it has it."""

    operation: UUID | None
    decision_type: str | None


async def addressed(connection: Connection, tenant: UUID, effect: str, key: str) -> Addressed | None:
    """None if there is no such tenant."""
    row = await connection.fetchrow(ADDRESSED, tenant, effect, key)
    return None if row is None else Addressed(row["id"], row["decision_type"])


async def receipts(
    connection: Connection,
    tenant: UUID,
    *,
    decision_id: UUID | None = None,
    operation_id: UUID | None = None,
    kind: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    after: int = -1,
    limit: int,
) -> Sequence[ReceiptRow]:
    """In the order of the log, those with an index above ``after``."""
    rows = await connection.fetch(
        RECEIPTS, tenant, decision_id, operation_id, kind, since, until, after, limit
    )
    return [ReceiptRow(**row) for row in rows]
