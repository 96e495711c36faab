"""Admission: a decision becomes durable, at most once per (tenant, idempotency key).

`INSERT .. ON CONFLICT DO NOTHING` on the key settles every race between callers: exactly one of them inserts; the others read
the row that is there and are told what it is. A row is born running, under its process's lease and with fencing token 1, or queued,
held by nobody, with token 0 (`store/queue.py`): whoever dies next, another process finds it. How many may be queued is checked and
counted here, under the lock of the queue's depth, so the bound is exact over all processes. The record's present version is read in
the same transaction, which saves the gathering a trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.receipt import Receipt, receipt
from coordinator.failpoints import failpoint
from coordinator.store import queue
from coordinator.store.database import Connection
from coordinator.store.records import Locked


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is ready to be stored. ``lease_owner`` is the process that has a slot for it, None if it is to be queued:
    then ``queue_depth`` is how many of its class may be, and ``estimated_ms`` when it is expected to start. ``session`` is the caller's
    own, if it named one."""

    id: UUID
    key: str
    fingerprint: bytes
    type: str
    class_: str
    request: bytes
    record_kind: str | None
    record_id: str | None
    requested_by: UUID
    traceparent: str
    time_limit_ms: int
    lease_owner: UUID | None
    lease_ms: int
    estimated_ms: int | None = None
    session: str | None = None
    queue_depth: int = 0

    @property
    def status(self) -> str:
        return "queued" if self.lease_owner is None else "running"


class Admitted(msgspec.Struct, frozen=True):
    """Stored now. ``record`` is the version and data of the decision's record at this moment."""

    created_at: datetime
    record: Locked


class NoRoom(msgspec.Struct, frozen=True):
    """As many of the class are queued as may be; nothing was stored."""


class Known(msgspec.Struct, frozen=True):
    """The key was used before; ``answer`` is None while that decision has not come to rest."""

    id: UUID
    fingerprint: bytes
    answer: bytes | None
    answer_status: int | None


# One statement: the decisions, their receipts, and what their records hold. The log is locked last, once it is known how many are
# new; if none is, it is left alone.
ADMIT = """
WITH fresh AS (
    INSERT INTO decisions (tenant_id, id, idempotency_key, fingerprint, type, class, status, request, record_kind, record_id,
                           requested_by, traceparent, deadline_at, lease_owner, lease_expires_at, estimated_ms, fencing_token,
                           session)
    SELECT $1, a.id, a.key, a.fingerprint, a.type, a.class, CASE WHEN a.lease_owner IS NULL THEN 'queued' ELSE 'running' END,
           a.request, a.record_kind, a.record_id,
           a.requested_by, a.traceparent, clock_timestamp() + a.time_limit_ms * interval '1 ms',
           a.lease_owner, CASE WHEN a.lease_owner IS NOT NULL THEN clock_timestamp() + a.lease_ms * interval '1 ms' END,
           a.estimated_ms, CASE WHEN a.lease_owner IS NULL THEN 0 ELSE 1 END, a.session
    FROM unnest($2::uuid[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::json[], $8::text[], $9::text[],
                $10::uuid[], $11::text[], $12::int[], $13::uuid[], $14::int[], $15::int[], $16::text[])
         AS a (id, key, fingerprint, type, class, request, record_kind, record_id, requested_by, traceparent,
               time_limit_ms, lease_owner, lease_ms, estimated_ms, session)
    ORDER BY a.key    -- one order everywhere, or two batches that share two keys wait for each other
    ON CONFLICT (tenant_id, idempotency_key) DO NOTHING
    RETURNING id, created_at, record_kind, record_id
), place AS (
    UPDATE logs SET size = size + (SELECT count(*) FROM fresh)
    WHERE tenant_id = $1 AND EXISTS (SELECT FROM fresh)
    RETURNING size - (SELECT count(*) FROM fresh) AS first
), receipt AS (
    INSERT INTO receipts (tenant_id, index, kind, decision_id, body)
    SELECT $1, place.first + row_number() OVER (ORDER BY r.n) - 1, r.kind, r.id, r.body
    FROM place
    CROSS JOIN unnest($17::text[], $2::uuid[], $18::json[]) WITH ORDINALITY AS r (kind, id, body, n)
    JOIN fresh USING (id)
)
SELECT f.id, f.created_at, coalesce(r.version, 0) AS version, r.data
FROM fresh f LEFT JOIN records r ON r.tenant_id = $1 AND r.kind = f.record_kind AND r.id = f.record_id
"""

KNOWN = """
SELECT idempotency_key, id, fingerprint, answer, answer_status FROM decisions
WHERE tenant_id = $1 AND idempotency_key = ANY ($2::text[])
"""


async def admit(
    connection: Connection, tenant: UUID, admissions: Sequence[Admission]
) -> Sequence[Admitted | Known | NoRoom]:
    """Store each admission unless its key is known. Two of one key in one batch: the first is stored, the other finds it."""
    refused = await _without_room(connection, tenant, admissions)
    fitting = [admission for admission in admissions if admission.id not in refused]
    receipts = [_receipt(admission) for admission in fitting]
    kinds, bodies = [receipt.kind for receipt in receipts], [receipt.body for receipt in receipts]
    rows = await connection.fetch(ADMIT, tenant, *_columns(fitting), kinds, bodies) if fitting else []
    fresh = {row["id"]: Admitted(row["created_at"], Locked(row["version"], row["data"])) for row in rows}
    if queued := [a.class_ for a in fitting if a.id in fresh and a.status == "queued"]:
        await queue.enter(connection, tenant, queued)
    known = await known_keys(connection, tenant, [a.key for a in admissions if a.id not in fresh])
    await failpoint("admit.before")
    return [fresh.get(a.id) or known.get(a.key) or NoRoom() for a in admissions]


async def _without_room(connection: Connection, tenant: UUID, admissions: Sequence[Admission]) -> set[UUID]:
    """Those that may not be queued any more. The queue's depth stays locked until this transaction ends."""
    queued = [admission for admission in admissions if admission.status == "queued"]
    if not queued:
        return set()
    depths = await queue.lock_depths(connection, tenant, [admission.class_ for admission in queued])
    refused = set()
    for admission in queued:
        if depths[admission.class_] < admission.queue_depth:
            depths[admission.class_] += 1
        else:
            refused.add(admission.id)
    return refused


async def known_keys(connection: Connection, tenant: UUID, keys: Sequence[str]) -> dict[str, Known]:
    """Those of the keys that were used before."""
    if not keys:
        return {}
    rows = await connection.fetch(KNOWN, tenant, keys)
    return {
        row["idempotency_key"]: Known(row["id"], row["fingerprint"], row["answer"], row["answer_status"])
        for row in rows
    }


def _columns(admissions: Sequence[Admission]) -> list[list[object]]:
    """All fields in their order, but for the last, which is the bound."""
    return [list(column) for column in zip(*map(msgspec.structs.astuple, admissions), strict=True)][:-1]


def _receipt(admission: Admission) -> Receipt:
    return receipt(
        f"decision.{admission.status}",
        decision_id=str(admission.id),
        type=admission.type,
        **{"class": admission.class_},
        idempotency_key=admission.key,
        fingerprint=admission.fingerprint.hex(),
        requested_by=str(admission.requested_by),
        session=admission.session,
        fencing_token=0 if admission.lease_owner is None else 1,
    )
