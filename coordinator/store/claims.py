"""Tasks as workers see them: claimed, kept by heartbeats, answered.

A claim is one transaction that locks the worker's row first and counts after that: two polls of one worker take turns, so that
together they never get more than it may have, and SKIP LOCKED keeps two workers from the same task. Each claim raises the task's
fencing token and is written down before the worker hears of it.

Every report names the token it was given. One that is no longer the task's, or whose task has ended, changes nothing: `Superseded`.
What such a worker found is kept once as a receipt, because it was paid for. What its present holder says is judged first, while
nobody else can get the task: what is refused changes nothing, and may be corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from coordinator.core.canonical import digest
from coordinator.core.receipt import Receipt
from coordinator.errors import RequestRefused
from coordinator.store import late, log
from coordinator.store.database import Connection
from coordinator.store.handback import task_receipt


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """At most ``limit`` tasks for ``worker``; if ``incarnation`` is given, only while the name is still that process's."""

    worker: UUID
    limit: int
    incarnation: str | None
    lease_ms: int


class ClaimedTask(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    fencing_token: int
    source: str
    capability: str
    request: bytes
    deadline_at: datetime
    remaining_ms: int
    attempts: int
    traceparent: str
    decision_id: UUID
    evidence: str


class Claimed(msgspec.Struct, frozen=True):
    """``name`` and ``capabilities`` are the worker's; ``draining`` says that it will get nothing any more, ``full`` that it had
    nothing free a moment ago."""

    name: str
    capabilities: list[str]
    draining: bool
    full: bool
    tasks: list[ClaimedTask]


class NotYours(msgspec.Struct, frozen=True):
    """The worker's name belongs to another incarnation."""


class Beat(msgspec.Struct, frozen=True):
    task: UUID
    token: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a task, as its worker tells it. ``state`` is completed or failed, ``encoded`` the stored bytes of its answer."""

    task: UUID
    token: int
    state: str
    encoded: bytes


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a task is for that somebody has in progress. ``ceiling_currency`` is that of its decision's own ceiling, if it has one."""

    type: str
    evidence: str
    source: str
    ceiling_currency: str | None


Judge = Callable[[Held, Report], RequestRefused | None]
"""Why the present holder's report is not taken; pure."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The task is still the worker's, until ``lease_expires_at``."""

    decision_id: UUID
    evidence: str
    lease_expires_at: datetime
    deadline_at: datetime
    remaining_ms: int
    draining: bool


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The task has ended as reported; ``first`` unless it had been reported before."""

    state: str
    first: bool


class Superseded(msgspec.Struct, frozen=True, kw_only=True):
    """The report came too late. ``state`` is the task's; ``late``: an answer was now kept as a receipt, for the first time."""

    state: str
    late: bool


class Unknown(msgspec.Struct, frozen=True):
    """There is no such task."""


# Most polls find nothing: they only look. What this look misses is offered to the poll later.
PEEK = """
SELECT w.name, w.capabilities, w.incarnation, w.drain_until IS NOT NULL AS draining, false AS full,
       w.heartbeat_at < clock_timestamp() - $3 * interval '1 ms' AS quiet,
       EXISTS (SELECT FROM tasks t WHERE t.tenant_id = $1 AND t.state = 'waiting'
               AND (t.capability = ANY (w.capabilities) OR '*' = ANY (w.capabilities))) AS worth_it
FROM workers w WHERE w.tenant_id = $1 AND w.id = $2
"""

# A claim that waits here for another of the same worker sees, in its next statement, what that one took.
LOCK = """
UPDATE workers SET heartbeat_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2
RETURNING name, capabilities, max_tasks, incarnation, drain_until IS NOT NULL AS draining,
    max_tasks <= (SELECT count(*) FROM tasks t WHERE t.tenant_id = $1 AND t.worker_id = $2 AND t.state = 'in_progress') AS full
"""

# A task is wanted while its decision does not rest, and as long as somebody waits: another decision may share the reading. What
# nobody wants is neither given out nor kept; it ends at its deadline.
_WANTED = """(t.awaited_at > clock_timestamp() - 2 * {lease_ms}::bigint * interval '1 ms'
           OR EXISTS (SELECT FROM decisions d WHERE d.tenant_id = $1 AND d.id = t.decision_id AND d.answer IS NULL))"""

CLAIM = f"""
WITH room AS (
    SELECT least($6, $4 - count(*)) AS free FROM tasks WHERE tenant_id = $1 AND worker_id = $2 AND state = 'in_progress'
), found AS (
    SELECT t.id FROM tasks t
    WHERE t.tenant_id = $1 AND t.state = 'waiting' AND (t.capability = ANY ($3::text[]) OR '*' = ANY ($3::text[]))
      AND (t.pinned IS NULL OR t.pinned = $5)
      AND t.deadline_at > clock_timestamp()
      AND {_WANTED.format(lease_ms="$7")}
    ORDER BY t.created_at, t.id LIMIT (SELECT greatest(free, 0) FROM room)
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE tasks t
SET state = 'in_progress', worker_id = $2, fencing_token = t.fencing_token + 1, attempts = t.attempts + 1,
    lease_expires_at = least(clock_timestamp() + $7 * interval '1 ms', t.deadline_at), heartbeat_at = clock_timestamp()
FROM found WHERE t.tenant_id = $1 AND t.id = found.id
RETURNING t.id, t.fencing_token, t.source, t.capability, t.request, t.deadline_at, t.attempts, t.traceparent, t.decision_id,
          t.evidence, (extract(epoch FROM t.deadline_at - clock_timestamp()) * 1000)::bigint AS remaining_ms
"""

HEARTBEAT = f"""
UPDATE tasks t
SET lease_expires_at = least(clock_timestamp() + $4 * interval '1 ms', t.deadline_at, w.drain_until), heartbeat_at = clock_timestamp()
FROM unnest($2::uuid[], $3::bigint[]) AS h (id, token), workers w
WHERE t.tenant_id = $1 AND t.id = h.id AND t.fencing_token = h.token AND t.state = 'in_progress'
  AND w.tenant_id = $1 AND w.id = t.worker_id
  AND {_WANTED.format(lease_ms="$4")}
RETURNING t.id, t.fencing_token, t.decision_id, t.evidence, t.lease_expires_at, t.deadline_at, w.drain_until IS NOT NULL AS draining,
          (extract(epoch FROM t.deadline_at - clock_timestamp()) * 1000)::bigint AS remaining_ms
"""

# The row stays locked: whoever is refused here still holds the task when it hears of it, unless its lease ran out since.
HOLD = """
SELECT t.id, t.fencing_token, t.evidence, t.source, d.type, d.request -> 'ceiling' ->> 'currency' AS ceiling_currency
FROM tasks t JOIN decisions d ON d.tenant_id = $1 AND d.id = t.decision_id
WHERE t.tenant_id = $1 AND t.id = ANY ($2::uuid[]) AND t.state = 'in_progress'
ORDER BY t.id FOR NO KEY UPDATE OF t
"""

END = """
UPDATE tasks t
SET state = e.state, answer = e.answer, lease_expires_at = NULL, ended_at = clock_timestamp()
FROM unnest($2::uuid[], $3::bigint[], $4::text[], $5::json[]) AS e (id, token, state, answer)
WHERE t.tenant_id = $1 AND t.id = e.id AND t.fencing_token = e.token AND t.state = 'in_progress'
RETURNING t.id, t.decision_id, t.evidence, t.fencing_token, t.state, t.worker_id, t.attempts, t.answer
"""

LOOK = """
SELECT id, decision_id, evidence, state, fencing_token, answer FROM tasks
WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) FOR NO KEY UPDATE
"""


async def claim(connection: Connection, tenant: UUID, wanted: Claim) -> Claimed | NotYours | None:
    """None if there is no such worker."""
    worker = await connection.fetchrow(PEEK, tenant, wanted.worker, wanted.lease_ms // 3)
    if worker is not None and (worker["quiet"] or worker["worth_it"]):
        worth_it = worker["worth_it"]
        worker = await connection.fetchrow(LOCK, tenant, wanted.worker)
    else:
        worth_it = False
    if worker is None:
        return None
    if wanted.incarnation is not None and worker["incarnation"] != wanted.incarnation:
        return NotYours()
    rows: Sequence[asyncpg.Record] = []
    if worth_it and not worker["draining"]:
        rows = await connection.fetch(
            CLAIM,
            tenant,
            wanted.worker,
            worker["capabilities"],
            worker["max_tasks"],
            worker["name"],
            wanted.limit,
            wanted.lease_ms,
        )
    if rows:
        receipts = [
            task_receipt(row, "task.in-progress", worker=str(wanted.worker), attempt=row["attempts"])
            for row in rows
        ]
        await log.append(connection, tenant, receipts)
    tasks = [ClaimedTask(**row) for row in rows]
    return Claimed(worker["name"], worker["capabilities"], worker["draining"], worker["full"], tasks)


async def heartbeat(
    connection: Connection, tenant: UUID, beats: Sequence[Beat], *, lease_ms: int
) -> Sequence[Kept | Superseded | Unknown]:
    """Prolong the leases of those tasks that are still in the hands that the beats come from."""
    ids, tokens = [beat.task for beat in beats], [beat.token for beat in beats]
    rows = await connection.fetch(HEARTBEAT, tenant, ids, tokens, lease_ms)
    kept = {(row["id"], row["fencing_token"]): _kept(row) for row in rows}
    missed = {beat.task for beat in beats if (beat.task, beat.token) not in kept}
    known = {row["id"]: row for row in await connection.fetch(LOOK, tenant, missed)} if missed else {}
    return [kept.get((beat.task, beat.token)) or _superseded(known.get(beat.task)) for beat in beats]


def _kept(row: asyncpg.Record) -> Kept:
    return Kept(**{name: row[name] for name in Kept.__struct_fields__})


def _superseded(row: asyncpg.Record | None) -> Superseded | Unknown:
    return Unknown() if row is None else Superseded(state=str(row["state"]), late=False)


async def end(
    connection: Connection, tenant: UUID, reports: Sequence[Report], judge: Judge
) -> Sequence[Accepted | Superseded | Unknown | RequestRefused]:
    """For each whether it ended its task. The same report again is accepted again; a late one is kept as a receipt, once, whatever
    it says; what the holder says is taken unless ``judge`` refuses it."""
    first, refused = await _judged(connection, tenant, reports, judge)
    rows = await _end(connection, tenant, list(first.values()))
    ended = {(row["id"], row["fencing_token"]): row for row in rows}
    receipts = [_ended_receipt(row) for row in rows]
    in_time = {id(first[key]) for key in ended}
    missed = {report.task for report in reports if id(report) not in in_time | refused.keys()}
    known = {row["id"]: row for row in await connection.fetch(LOOK, tenant, missed)} if missed else {}
    answers: list[Accepted | Superseded | Unknown | RequestRefused] = []
    for report in reports:
        if (refusal := refused.get(id(report))) is not None:
            answers.append(refusal)
        elif id(report) in in_time:
            answers.append(Accepted(state=report.state, first=True))
        else:
            answers.append(await _late(connection, tenant, report, known.get(report.task), receipts))
    if receipts:
        await log.append(connection, tenant, receipts)
    return answers


async def _judged(
    connection: Connection, tenant: UUID, reports: Sequence[Report], judge: Judge
) -> tuple[dict[tuple[UUID, int], Report], dict[int, RequestRefused]]:
    """The first report of each task and token that may be taken, and by ``id`` those before it that are refused."""
    rows = await connection.fetch(HOLD, tenant, [report.task for report in reports])
    held = {
        (row["id"], row["fencing_token"]): Held(**{name: row[name] for name in Held.__struct_fields__})
        for row in rows
    }
    first: dict[tuple[UUID, int], Report] = {}
    refused: dict[int, RequestRefused] = {}
    for report in reports:
        key = (report.task, report.token)
        if key in first:
            continue
        refusal = judge(held[key], report) if key in held else None
        if refusal is None:
            first[key] = report
        else:
            refused[id(report)] = refusal
    return first, refused


async def _end(connection: Connection, tenant: UUID, reports: Sequence[Report]) -> Sequence[asyncpg.Record]:
    rows: Sequence[asyncpg.Record] = await connection.fetch(
        END,
        tenant,
        [report.task for report in reports],
        [report.token for report in reports],
        [report.state for report in reports],
        [report.encoded for report in reports],
    )
    return rows


async def _late(
    connection: Connection,
    tenant: UUID,
    report: Report,
    row: asyncpg.Record | None,
    receipts: list[Receipt],
) -> Accepted | Superseded | Unknown:
    if row is None:
        return Unknown()
    token: int = row["fencing_token"]
    if (report.token, report.state, report.encoded) == (token, row["state"], row["answer"]):
        return Accepted(state=report.state, first=False)
    state = str(row["state"])
    if not 1 <= report.token <= token:
        return Superseded(state=state, late=False)
    answer = msgspec.json.decode(report.encoded)
    if not await late.remember(connection, tenant, report.task, report.token, answer.get("cost")):
        return Superseded(state=state, late=False)
    facts = {"answered_under": report.token, "learnt": report.state, "answer": answer, "state": state}
    receipts.append(task_receipt(row, "task.late-answer", **facts))
    return Superseded(state=state, late=True)


def _ended_receipt(row: asyncpg.Record) -> Receipt:
    answer: bytes = row["answer"]
    return task_receipt(
        row,
        f"task.{row['state']}",
        worker=str(row["worker_id"]),
        attempt=row["attempts"],
        answer_digest=digest(answer),
        cost=msgspec.json.decode(answer).get("cost"),
    )
