"""Tasks whose worker will not answer go back to waiting, for another claim under a higher token; after the last attempt they fail.

    lost           the lease ran out: the worker fell silent, or its drain reached its limit
    handed back    the worker's name belongs to another process now
    expired        the deadline passed, whoever had it

A pinned task that may fall back is anybody's from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import asyncpg
import msgspec

from coordinator.core.receipt import Receipt, receipt
from coordinator.core.task import NotCompleted, encode_answer
from coordinator.store import log
from coordinator.store.database import Connection

AT_ONCE = 100
LOST = encode_answer(
    NotCompleted(code="worker-lost", message="every worker that had the task fell silent", retryable=True)
)


class HandedBack(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is in nobody's hands any more. ``state`` is what became of it: waiting again, failed or expired."""

    id: UUID
    state: str
    capability: str
    pinned: str | None


class OpenTasks(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tenant and capability: how many tasks wait for a worker (``pinned``: for that one), and whether any is in the hands
    of a worker that fell silent, or waits beyond its deadline."""

    tenant: UUID
    capability: str
    pinned: str | None
    waiting: int
    lost: bool


_HAND_BACK = """
UPDATE tasks t
SET state = found.becomes, worker_id = CASE found.becomes WHEN 'waiting' THEN NULL ELSE t.worker_id END, lease_expires_at = NULL,
    ended_at = CASE found.becomes WHEN 'waiting' THEN NULL ELSE clock_timestamp() END,
    answer = CASE found.becomes WHEN 'failed' THEN $2::json END,
    pinned = CASE WHEN t.may_fall_back THEN NULL ELSE t.pinned END
FROM found WHERE t.tenant_id = $1 AND t.id = found.id
RETURNING t.id, t.state, t.capability, t.pinned, t.decision_id, t.evidence, t.fencing_token, t.attempts, found.worker_id
"""

_BECOMES = """CASE WHEN deadline_at <= clock_timestamp() THEN 'expired' WHEN attempts >= max_attempts THEN 'failed'
     ELSE 'waiting' END AS becomes"""

# SKIP LOCKED: whoever holds the row is about to end it, or hands it back as well.
TAKE_BACK_LOST = f"""
WITH found AS (
    SELECT id, worker_id, {_BECOMES} FROM tasks
    WHERE tenant_id = $1
      AND (state = 'in_progress' AND lease_expires_at < clock_timestamp() OR state = 'waiting' AND deadline_at < clock_timestamp())
    ORDER BY id LIMIT $3
    FOR NO KEY UPDATE SKIP LOCKED
)
{_HAND_BACK}
"""

TAKE_BACK_ALL_OF = f"""
WITH found AS (
    SELECT id, worker_id, {_BECOMES} FROM tasks
    WHERE tenant_id = $1 AND worker_id = $3 AND state = 'in_progress'
    ORDER BY id FOR NO KEY UPDATE
)
{_HAND_BACK}
"""

OPEN = """
SELECT tenant_id AS tenant, capability, pinned,
       count(*) FILTER (WHERE state = 'waiting' AND deadline_at > clock_timestamp()) AS waiting,
       bool_or(state = 'in_progress' AND lease_expires_at < clock_timestamp()
               OR state = 'waiting' AND deadline_at < clock_timestamp()) AS lost
FROM tasks WHERE state IN ('waiting', 'in_progress') GROUP BY tenant_id, capability, pinned
"""


async def hand_back_lost(connection: Connection, tenant: UUID) -> list[HandedBack]:
    """Whatever has run out by now, a hundred at once."""
    rows = await connection.fetch(TAKE_BACK_LOST, tenant, LOST, AT_ONCE)
    return await _handed_back(connection, tenant, rows, "its lease ran out")


async def hand_back_all_of(connection: Connection, tenant: UUID, worker: UUID) -> list[HandedBack]:
    """All that a worker has in progress. Its row is locked. The caller appends to the log after this."""
    rows = await connection.fetch(TAKE_BACK_ALL_OF, tenant, LOST, worker)
    return await _handed_back(connection, tenant, rows, "its worker was started anew")


async def _handed_back(
    connection: Connection, tenant: UUID, rows: Sequence[asyncpg.Record], why: str
) -> list[HandedBack]:
    if rows:
        await log.append(connection, tenant, [_receipt(row, why) for row in rows])
    return [HandedBack(**{name: row[name] for name in HandedBack.__struct_fields__}) for row in rows]


def _receipt(row: asyncpg.Record, why: str) -> Receipt:
    again = row["state"] == "waiting"
    worker = None if row["worker_id"] is None else str(row["worker_id"])
    reason = None if row["state"] == "expired" else why
    kind = "task.requeued" if again else f"task.{row['state']}"
    return task_receipt(row, kind, reason=reason, worker=worker, attempt=row["attempts"])


async def open_tasks(connection: Connection) -> Sequence[OpenTasks]:
    """What has not ended, of all tenants. Runs in the dispatch view, not in a tenant's transaction."""
    return [OpenTasks(**row) for row in await connection.fetch(OPEN)]


def task_receipt(row: asyncpg.Record, kind: str, **facts: object) -> Receipt:
    """A receipt of a task's row, which has its ``id``, ``decision_id``, ``evidence`` and ``fencing_token``."""
    told = {
        "task": str(row["id"]),
        "evidence": row["evidence"],
        "fencing_token": row["fencing_token"],
        **facts,
    }
    return receipt(kind, decision_id=str(row["decision_id"]), operation_id=None, **told)
