"""Tasks as the deciding side sees them: asked for, waited for, given up.

    ask      a task becomes durable, waiting for a worker; or a pinned worker is at capacity, and nothing is stored
    adopt    whoever took a decision over goes on with the task that its last holder asked for, if the request is the same
    give up  nobody waits any more: waiting and in progress end as cancelled, or as expired past the deadline
    fetch    what became of tasks that have ended

Asking and giving up go through one queue of a process, so that giving up never overtakes the asking. A pinned task is counted
under its worker's row lock, like a claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from coordinator.core.evidence import Failed
from coordinator.core.receipt import Receipt, receipt
from coordinator.core.task import AtCapacity, able
from coordinator.store import log
from coordinator.store.database import Connection
from coordinator.store.handback import task_receipt
from coordinator.store.workers import lock_named


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A reading for a worker to make. ``decision_token`` is the asking holder's; ``deadline_ms`` counts from now."""

    id: UUID
    decision_id: UUID
    decision_token: int
    evidence: str
    source: str
    capability: str
    pinned: str | None
    may_fall_back: bool
    request: bytes
    traceparent: str
    deadline_ms: int
    max_attempts: int


class GiveUp(msgspec.Struct, frozen=True):
    """By the holder of that ``decision_token``: a task that a later one has adopted is no longer its to give up."""

    id: UUID
    decision_token: int


class Waiting(msgspec.Struct, frozen=True):
    """The task of that id is waiting for a worker, or in progress; ``pinned`` as it is now. ``older_ms``: how long ago it was
    asked for."""

    id: UUID
    pinned: str | None = None
    older_ms: int = 0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A task that has ended. ``answer`` is JSON, for completed and failed ones; ``token`` counts how often it was claimed."""

    id: UUID
    state: str
    answer: bytes | None
    token: int
    older_ms: int = 0


class GivenUp(msgspec.Struct, frozen=True):
    """``begun``: how often it was given to a worker; None if there is no such task."""

    begun: int | None


Asked = Waiting | Ended | Failed | GivenUp


# Whatever earlier holders of the decision asked for this evidence is this holder's from now on, the newest first.
ADOPT = """
WITH earlier AS (
    UPDATE tasks SET decision_token = $4
    WHERE tenant_id = $1 AND decision_id = $2 AND evidence = $3 AND decision_token < $4
    RETURNING id, state, answer, pinned, request::text = $5::json::text AS same, created_at, fencing_token AS token
)
SELECT id, state, answer, token, pinned, same, (extract(epoch FROM clock_timestamp() - created_at) * 1000)::bigint AS older_ms
FROM earlier ORDER BY created_at DESC
"""

EXTEND = """
UPDATE tasks
SET awaited_at = clock_timestamp(), deadline_at = greatest(deadline_at, clock_timestamp() + $3 * interval '1 ms')
WHERE tenant_id = $1 AND id = $2
"""

INSERT = """
INSERT INTO tasks (tenant_id, id, decision_id, decision_token, evidence, source, capability, pinned, may_fall_back, request,
                   traceparent, max_attempts, state, deadline_at)
SELECT $1, t.id, t.decision_id, t.decision_token, t.evidence, t.source, t.capability, t.pinned, t.may_fall_back, t.request,
       t.traceparent, t.max_attempts, 'waiting', clock_timestamp() + t.deadline_ms * interval '1 ms'
FROM unnest($2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::text[], $9::bool[], $10::json[],
            $11::text[], $12::int[], $13::int[])
     AS t (id, decision_id, decision_token, evidence, source, capability, pinned, may_fall_back, request, traceparent,
           deadline_ms, max_attempts)
"""

WAITING_FOR = "SELECT count(*) FROM tasks WHERE tenant_id = $1 AND state = 'waiting' AND pinned = $2"

GIVE_UP = """
UPDATE tasks t SET state = CASE WHEN deadline_at <= clock_timestamp() THEN 'expired' ELSE 'cancelled' END,
    lease_expires_at = NULL, ended_at = clock_timestamp()
FROM unnest($2::uuid[], $3::bigint[]) AS u (id, decision_token)
WHERE t.tenant_id = $1 AND t.id = u.id AND t.decision_token = u.decision_token AND t.state IN ('waiting', 'in_progress')
RETURNING t.id, t.decision_id, t.evidence, t.state, t.fencing_token
"""

# What ended by itself before it was given up is seen here, too.
BEGUN = "SELECT id, fencing_token AS begun FROM tasks WHERE tenant_id = $1 AND id = ANY ($2::uuid[])"

FETCH = """
SELECT id, state, answer, fencing_token AS token FROM tasks
WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND ended_at IS NOT NULL
"""

AWAIT = "UPDATE tasks SET awaited_at = clock_timestamp() WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND ended_at IS NULL"

ENDED_OF_ALL = """
SELECT t.tenant_id, t.id FROM unnest($1::uuid[], $2::uuid[]) AS u (tenant_id, id) JOIN tasks t USING (tenant_id, id)
WHERE t.state NOT IN ('waiting', 'in_progress')
"""


async def ask(
    connection: Connection, tenant: UUID, items: Sequence[NewTask | GiveUp], *, lease_ms: int
) -> Sequence[Asked]:
    """For each new task what it is now: waiting, ended already (an adopted one), or refused."""
    asked: dict[UUID, Asked] = {}
    fresh: list[NewTask] = []
    given_up = [item for item in items if isinstance(item, GiveUp)]
    for item in items:
        if isinstance(item, NewTask):
            answer: Asked | None = None
            if item.decision_token > 1:
                answer = await _adopted(connection, tenant, item, given_up)
            if answer is None:
                answer, task = await _placed(connection, tenant, item, fresh, lease_ms)
                fresh += [task] if task else []
            asked[item.id] = answer
    if fresh:
        await connection.execute(INSERT, tenant, *_columns(fresh))
    ids = [item.id for item in given_up]
    tokens = [item.decision_token for item in given_up]
    ended = await connection.fetch(GIVE_UP, tenant, ids, tokens) if given_up else []
    receipts = [_asked(task) for task in fresh]
    receipts += [task_receipt(row, f"task.{row['state']}") for row in ended]
    if receipts:
        await log.append(connection, tenant, receipts)
    begun: dict[UUID, int] = {}
    if any(isinstance(item, GiveUp) for item in items):
        begun = {row["id"]: row["begun"] for row in await connection.fetch(BEGUN, tenant, ids)}
    return [GivenUp(begun.get(item.id)) if isinstance(item, GiveUp) else asked[item.id] for item in items]


async def _adopted(
    connection: Connection, tenant: UUID, task: NewTask, useless: list[GiveUp]
) -> Waiting | Ended | None:
    """The task that this one need not repeat; what else there was goes to ``useless``."""
    rows = await connection.fetch(
        ADOPT, tenant, task.decision_id, task.evidence, task.decision_token, task.request
    )
    usable = [row for row in rows if row["same"] and row["state"] in ("waiting", "in_progress", "completed")]
    useless += [GiveUp(row["id"], task.decision_token) for row in rows if row not in usable[:1]]
    if not usable:
        return None
    row = usable[0]
    if row["state"] == "completed":
        return Ended(
            id=row["id"],
            state="completed",
            answer=row["answer"],
            token=row["token"],
            older_ms=row["older_ms"],
        )
    await connection.execute(EXTEND, tenant, row["id"], task.deadline_ms)
    return Waiting(row["id"], row["pinned"], row["older_ms"])


async def _placed(
    connection: Connection, tenant: UUID, task: NewTask, before: Sequence[NewTask], lease_ms: int
) -> tuple[Waiting | Failed, NewTask | None]:
    """Whether the worker that a task is pinned to can have it; ``before`` are those of the same transaction. Without a pin every
    task may wait."""
    if task.pinned is None:
        return Waiting(task.id), task
    refusal = await _refusal(connection, tenant, task, before, lease_ms)
    if refusal is None:
        return Waiting(task.id, task.pinned), task
    if not task.may_fall_back:
        return refusal, None
    return Waiting(task.id), msgspec.structs.replace(task, pinned=None)


async def _refusal(
    connection: Connection, tenant: UUID, task: NewTask, before: Sequence[NewTask], lease_ms: int
) -> Failed | None:
    name = str(task.pinned)
    worker = await lock_named(connection, tenant, name, lease_ms=lease_ms)
    if worker is None:
        return Failed("worker-unknown", f"there is no worker {name}")
    if not able(worker.capabilities, task.capability):
        return Failed("worker-incapable", f"worker {name} does not have the capability {task.capability}")
    if worker.offline or worker.drain_until is not None:
        why = "is offline" if worker.offline else "is draining and takes no new tasks"
        return Failed("worker-offline", f"worker {name} {why}", retryable=True)
    waiting = await connection.fetchval(WAITING_FOR, tenant, name) + sum(t.pinned == name for t in before)
    if worker.current + waiting < worker.max_tasks:
        return None
    full = AtCapacity(worker=name, current=worker.current, max=worker.max_tasks, waiting=waiting)
    return full.as_failure()


async def still_awaited(connection: Connection, tenant: UUID, ids: Sequence[UUID]) -> None:
    """Somebody waits for them."""
    await connection.execute(AWAIT, tenant, ids)


async def fetch(connection: Connection, tenant: UUID, ids: Sequence[UUID]) -> list[Ended]:
    """Those of the tasks that have ended."""
    return [Ended(**row) for row in await connection.fetch(FETCH, tenant, ids)]


async def ended_of_all(connection: Connection, tasks: Sequence[tuple[UUID, UUID]]) -> list[tuple[UUID, UUID]]:
    """Those of the tasks, given as (tenant, id), that have ended. Runs in the dispatch view, not in a tenant's transaction."""
    rows = await connection.fetch(ENDED_OF_ALL, [tenant for tenant, _ in tasks], [id for _, id in tasks])
    return [(row["tenant_id"], row["id"]) for row in rows]


def _asked(task: NewTask) -> Receipt:
    return receipt(
        "task.waiting",
        decision_id=str(task.decision_id),
        task=str(task.id),
        evidence=task.evidence,
        capability=task.capability,
        pinned=task.pinned,
    )


def _columns(tasks: Sequence[NewTask]) -> list[list[object]]:
    return [list(column) for column in zip(*map(msgspec.structs.astuple, tasks), strict=True)]
