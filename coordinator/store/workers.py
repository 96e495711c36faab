"""Workers: a name, what it can do and how much of it at once; everything else about it is derived from its tasks.

register   by name: the first time makes it, later times update it and end a drain. Another incarnation of the name is another
           process: what the one before had in progress is handed back at once. One that says nothing of itself gets it back
           when the leases have run out.
touch      it was heard of: a registration, a claim, a poll that is still open; what is heard of its tasks is with them
drain      no new task; at `drain_until` the leases of what it still has run out
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.receipt import receipt
from coordinator.store import log
from coordinator.store.database import Connection
from coordinator.store.handback import HandedBack, hand_back_all_of


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """``id`` is what it will have if the name is new."""

    id: UUID
    name: str
    capabilities: Sequence[str]
    max_tasks: int
    incarnation: str | None


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """``current`` counts its tasks in progress."""

    id: UUID
    name: str
    capabilities: list[str]
    max_tasks: int
    current: int
    offline: bool
    drain_until: datetime | None
    registered_at: datetime
    heartbeat_at: datetime


class Registered(msgspec.Struct, frozen=True):
    """``created``: the name was new."""

    id: UUID
    created: bool
    handed_back: list[HandedBack]


_ROW = """w.id, w.name, w.capabilities, w.max_tasks, w.drain_until, w.registered_at, busy.current,
greatest(w.heartbeat_at, busy.heartbeat_at) AS heartbeat_at,
greatest(w.heartbeat_at, busy.heartbeat_at) < clock_timestamp() - $2 * interval '1 ms' AS offline
FROM workers w CROSS JOIN LATERAL (
    SELECT count(*) AS current, max(t.heartbeat_at) AS heartbeat_at FROM tasks t
    WHERE t.tenant_id = w.tenant_id AND t.worker_id = w.id AND t.state = 'in_progress'
) busy"""

MAKE = """
INSERT INTO workers (tenant_id, id, name, capabilities, max_tasks, incarnation) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (tenant_id, name) DO NOTHING RETURNING id
"""

LOCK_NAMED = "SELECT id, incarnation FROM workers WHERE tenant_id = $1 AND name = $2 FOR NO KEY UPDATE"

RENEW = """
UPDATE workers SET capabilities = $3, max_tasks = $4, incarnation = coalesce($5, incarnation), drain_until = NULL,
    heartbeat_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2
"""

TOUCH = "UPDATE workers SET heartbeat_at = clock_timestamp() WHERE tenant_id = $1 AND id = ANY ($2::uuid[])"

DRAIN = """
UPDATE workers SET drain_until = clock_timestamp() + $3 * interval '1 ms', heartbeat_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2 RETURNING name, drain_until
"""

CUT_LEASES = """
UPDATE tasks SET lease_expires_at = least(lease_expires_at, $3)
WHERE tenant_id = $1 AND worker_id = $2 AND state = 'in_progress'
"""

WORKER = f"SELECT {_ROW} WHERE w.tenant_id = $1 AND w.id = $3"

BY_NAME = f"SELECT {_ROW} WHERE w.tenant_id = $1 AND w.name = $3"

WORKERS = f"""
SELECT {_ROW} WHERE w.tenant_id = $1 AND ($3::uuid IS NULL OR w.id < $3) ORDER BY w.id DESC LIMIT $4
"""


async def register(connection: Connection, tenant: UUID, wanted: Registration) -> Registered:
    """The name's worker is now as ``wanted``."""
    row = (wanted.id, wanted.name, list(wanted.capabilities), wanted.max_tasks, wanted.incarnation)
    if await connection.fetchval(MAKE, tenant, *row) is not None:
        await _told(connection, tenant, wanted.id, wanted)
        return Registered(wanted.id, True, [])
    known = await connection.fetchrow(LOCK_NAMED, tenant, wanted.name)
    if known is None:
        raise AssertionError(f"worker {wanted.name} was there a moment ago")
    id: UUID = known["id"]
    await connection.execute(
        RENEW, tenant, id, list(wanted.capabilities), wanted.max_tasks, wanted.incarnation
    )
    anew = wanted.incarnation is not None and wanted.incarnation != known["incarnation"]
    handed_back = await hand_back_all_of(connection, tenant, id) if anew else []
    await _told(connection, tenant, id, wanted)
    return Registered(id, False, handed_back)


async def _told(connection: Connection, tenant: UUID, id: UUID, wanted: Registration) -> None:
    facts: dict[str, object] = {
        "name": wanted.name,
        "capabilities": list(wanted.capabilities),
        "max_tasks": wanted.max_tasks,
    }
    facts |= {"worker": str(id), "incarnation": wanted.incarnation}
    registered = receipt("worker.registered", decision_id=None, operation_id=None, **facts)
    await log.append(connection, tenant, [registered])


async def touch(connection: Connection, tenant: UUID, ids: Sequence[UUID]) -> None:
    """They have been heard of."""
    await connection.execute(TOUCH, tenant, ids)


async def drain(connection: Connection, tenant: UUID, id: UUID, *, limit_ms: int) -> bool:
    """Whether there is such a worker. Draining again sets the limit anew."""
    row = await connection.fetchrow(DRAIN, tenant, id, limit_ms)
    if row is None:
        return False
    await connection.execute(CUT_LEASES, tenant, id, row["drain_until"])
    draining = receipt(
        "worker.draining", decision_id=None, worker=str(id), name=row["name"], limit_ms=limit_ms
    )
    await log.append(connection, tenant, [draining])
    return True


async def worker(connection: Connection, tenant: UUID, id: UUID, *, lease_ms: int) -> WorkerRow | None:
    row = await connection.fetchrow(WORKER, tenant, lease_ms, id)
    return None if row is None else WorkerRow(**row)


async def lock_named(connection: Connection, tenant: UUID, name: str, *, lease_ms: int) -> WorkerRow | None:
    """Locked first and then looked at: what a claim that was waited for has taken, counts."""
    if await connection.fetchrow(LOCK_NAMED, tenant, name) is None:
        return None
    row = await connection.fetchrow(BY_NAME, tenant, lease_ms, name)
    return None if row is None else WorkerRow(**row)


async def workers(
    connection: Connection, tenant: UUID, *, lease_ms: int, before: UUID | None, limit: int
) -> list[WorkerRow]:
    """The newest first."""
    return [WorkerRow(**row) for row in await connection.fetch(WORKERS, tenant, lease_ms, before, limit)]
