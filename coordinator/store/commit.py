"""The commit: a decision comes to rest, with everything it changes and promises, in one transaction.

    1  lock the records it changes or relied on, in (kind, id) order       -> their versions and data, now
       where something was paid: the periods of its budgets, and its reservations
    2  lock the decisions, in id order                                    -> do we still hold them; who was queued leaves the queue
       and the named locks of those that have some, in the order of names -> do they still hold these
    3  judge each proposal against what is locked (pure); the first writer of a record in a batch wins
    4  take the log's indices
    5  write: record versions, decisions with their answers, operations (born claimed), receipts
       where something was paid: what became of its reservations

If the process dies before COMMIT, nothing happened and the lease runs out; if it dies after, the operations' leases run out and
another process dispatches them. A holder whose token is old gets `Superseded` and has changed nothing; one whose lock is another's
gets `LockLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

import msgspec

from coordinator.core.budget import Room
from coordinator.core.canonical import JsonValue
from coordinator.core.events import Event
from coordinator.core.fence import Check, ReadCheck, all_hold
from coordinator.core.lock import Lock
from coordinator.core.receipt import Receipt
from coordinator.core.record import RecordKind
from coordinator.failpoints import failpoint
from coordinator.store import bills, closing, events, locks, log, queue
from coordinator.store.bills import Bill
from coordinator.store.closing import Reservation, Spending
from coordinator.store.database import Connection, transposed
from coordinator.store.records import Key, Locked, lock_records


class NewVersion(msgspec.Struct, frozen=True):
    """New data of a record that the decision read at version ``base``."""

    kind: str
    id: str
    base: int
    data: bytes


class NewOperation(msgspec.Struct, frozen=True):
    """``after``: ordinals that have to succeed first; without any, it is born claimed. ``compensation`` is the operation that
    would undo it, in JSON, as `store.follow` would insert it."""

    id: UUID
    effect: str
    ordinal: int
    key: str
    payload: bytes
    payload_hash: str
    guarantee: bytes
    linked: bool
    after: Sequence[int]
    on_failure: str
    compensation: bytes | None
    paid: bool = False
    """Whether its decision holds reservations for its operations."""


class Facts(msgspec.Struct, frozen=True):
    """What only the transaction knows: the database's time, the checks made under lock, and the index of the last of the
    decision's own receipts (its operations' follow)."""

    now: datetime
    checks: list[Check]
    receipt: int


class KeptReview(msgspec.Struct, frozen=True):
    """What an approval would commit, for the engine, and until when somebody has to review it."""

    kept: bytes
    expires_at: datetime


class Finished(msgspec.Struct, frozen=True):
    """The bytes to keep: ``answer`` is what POST answers, unless the decision has its answer since it came into review; ``view``
    is the decision, if the answer is something else. ``review`` if it is in review now."""

    answer: bytes
    answer_status: int
    view: bytes | None
    receipts: Sequence[Receipt]
    review: KeptReview | None = None
    events: Sequence[Event] = ()
    """Those of its run, if somebody follows it."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """How one decision wants to rest. ``fresh`` says, under lock, whether its evidence still counts; ``finish`` renders what is
    stored and answered, once it is certain that this proposal is accepted, with ``own_receipts`` before those of its operations.
    ``under`` maps the named locks that it was concluded under to their tokens; ``locks`` are those that its decision may hold, and
    lets go of."""

    decision_id: UUID
    decision_type: str
    token: int
    status: str
    changes: Sequence[NewVersion]
    reads: Sequence[ReadCheck]
    operations: Sequence[NewOperation]
    traceparent: str
    lease_owner: UUID
    lease_ms: int
    fresh: Callable[[], bool]
    finish: Callable[[Facts], Finished]
    own_receipts: int = 1
    spending: Spending | None = None
    """Where it reserves, or was billed all the same: what its work cost."""
    unreserved: Sequence[Bill] = ()
    locks: Sequence[str] = ()
    under: Mapping[str, int] = {}


class Committed(msgspec.Struct, frozen=True):
    """``operations`` are held by this process now, until ``lease_ms`` after the proposal was rendered."""

    finished: Finished
    operations: Sequence[NewOperation] = ()


class Moved(msgspec.Struct, frozen=True):
    """Something the policy relied on is different now; ``locked`` is what the records hold."""

    checks: list[Check]
    locked: dict[Key, Locked]


class OutOfDate(msgspec.Struct, frozen=True):
    """The evidence became too old while the commit waited its turn."""


class NotAllowed(msgspec.Struct, frozen=True):
    """The record kind refuses this transition."""

    reason: str


class LockLost(msgspec.Struct, frozen=True):
    """The decision is held still, but these locks went to others while it ran: what it read under them may have changed."""

    names: Sequence[str]


class Superseded(msgspec.Struct, frozen=True):
    """Another process holds the decision, or it already rests."""


Result: TypeAlias = Committed | Moved | OutOfDate | NotAllowed | LockLost | Superseded

HOLD = """
SELECT id, status, class, fencing_token, lease_owner FROM decisions
WHERE tenant_id = $1 AND id = ANY ($2::uuid[])
ORDER BY id
FOR NO KEY UPDATE
"""

WRITE = """
WITH version AS (
    SELECT * FROM unnest($2::text[], $3::text[], $4::bigint[], $5::json[], $6::uuid[]) AS v (kind, id, base, data, decision_id)
), latest AS (    -- a batch may hold a chain of versions of one record
    SELECT kind, id, min(base) AS base, count(*) AS steps, (array_agg(data ORDER BY base DESC))[1] AS data
    FROM version GROUP BY kind, id
), changed AS (
    UPDATE records r SET version = r.version + l.steps, data = l.data, updated_at = clock_timestamp()
    FROM latest l
    WHERE r.tenant_id = $1 AND r.kind = l.kind AND r.id = l.id AND r.version = l.base
    RETURNING r.version
), history AS (
    INSERT INTO record_versions (tenant_id, kind, id, version, data, decision_id)
    SELECT $1, v.kind, v.id, v.base + 1, v.data, v.decision_id FROM version v
), rested AS (
    UPDATE decisions d
    SET status = u.status, view = u.view, lease_owner = NULL, lease_expires_at = NULL,
        answer = coalesce(d.answer, u.answer), answer_status = coalesce(d.answer_status, u.answer_status),    -- the first one stays
        finished_at = CASE u.status WHEN 'in_review' THEN coalesce(d.finished_at, $7) ELSE $7 END,
        review = u.review, review_expires_at = u.review_expires_at
    FROM unnest($8::uuid[], $9::bigint[], $10::text[], $11::json[], $12::smallint[], $13::json[], $36::json[],
                $37::timestamptz[])
         AS u (id, token, status, answer, answer_status, view, review, review_expires_at)
    WHERE d.tenant_id = $1 AND d.id = u.id AND d.fencing_token = u.token
      AND (d.status IN ('queued', 'running') OR d.lease_owner IS NOT NULL)
    RETURNING d.id
), promised AS (
    INSERT INTO operations (tenant_id, id, decision_id, decision_type, effect, ordinal, key, payload, payload_hash, guarantee,
                            linked, after, on_failure, compensation, paid, state, traceparent, lease_owner, lease_expires_at)
    SELECT $1, o.id, o.decision_id, o.decision_type, o.effect, o.ordinal, o.key, o.payload, o.payload_hash, o.guarantee,
           o.linked, o.after::int[], o.on_failure, o.compensation, o.paid, o.state, o.traceparent, o.lease_owner,
           CASE WHEN o.lease_owner IS NOT NULL THEN clock_timestamp() + o.lease_ms * interval '1 ms' END
    FROM unnest($14::uuid[], $15::uuid[], $16::text[], $17::text[], $18::int[], $19::text[], $20::json[], $21::text[],
                $22::json[], $23::bool[], $24::text[], $25::text[], $26::json[], $27::text[], $28::text[], $29::uuid[],
                $30::int[], $38::bool[])
         AS o (id, decision_id, decision_type, effect, ordinal, key, payload, payload_hash, guarantee, linked, after,
               on_failure, compensation, state, traceparent, lease_owner, lease_ms, paid)
), receipt AS (
    INSERT INTO receipts (tenant_id, index, kind, decision_id, operation_id, body)
    SELECT $1, $31 + r.n - 1, r.kind, r.decision_id, r.operation_id, r.body
    FROM unnest($32::text[], $33::uuid[], $34::uuid[], $35::json[]) WITH ORDINALITY
         AS r (kind, decision_id, operation_id, body, n)
)
SELECT (SELECT count(*) FROM changed), (SELECT count(*) FROM rested)
"""

Kinds = Mapping[str, RecordKind[object]]


async def commit(
    connection: Connection, tenant: UUID, proposals: Sequence[Proposal], *, kinds: Kinds
) -> Sequence[Result]:
    """Bring a batch of decisions to rest, each on its own merits."""
    new = {(v.kind, v.id) for proposal in proposals for v in proposal.changes if v.base == 0}
    locked = await lock_records(connection, tenant, _keys(proposals), absent=new)
    reserved, rooms = await _lock_paid(connection, tenant, proposals)
    held = await connection.fetch(HOLD, tenant, [proposal.decision_id for proposal in proposals])
    holders = {
        row["id"]: row["fencing_token"]
        for row in held
        if row["status"] in ("queued", "running") or row["lease_owner"] is not None
    }
    named = {name for proposal in proposals for name in proposal.locks}
    standing = await locks.lock_rows(connection, tenant, named) if named else {}
    lost = {p.decision_id: gone for p in proposals if (gone := locks.lost(standing, p.decision_id, p.under))}
    verdicts = _judge_all(proposals, dict(locked), holders, lost, kinds)
    accepted = [
        (proposal, verdict)
        for proposal, verdict in zip(proposals, verdicts, strict=True)
        if isinstance(verdict, list)
    ]
    resting = {proposal.decision_id for proposal, _ in accepted}
    if unqueued := [row["class"] for row in held if row["status"] == "queued" and row["id"] in resting]:
        await queue.leave(connection, tenant, unqueued)
    finished = await _write(connection, tenant, accepted, standing) if accepted else {}
    was = {row["id"]: row["status"] for row in held}
    await _close_paid(connection, tenant, [proposal for proposal, _ in accepted], reserved, rooms, was)
    await failpoint("commit.before")
    return [
        Committed(finished[proposal.decision_id], proposal.operations)
        if isinstance(verdict, list)
        else verdict
        for proposal, verdict in zip(proposals, verdicts, strict=True)
    ]


async def _lock_paid(
    connection: Connection, tenant: UUID, proposals: Sequence[Proposal]
) -> tuple[Sequence[Reservation], Sequence[Room]]:
    """Nothing, where nothing is paid. What was not reserved for draws on the budgets' present periods."""
    rooms = await bills.rooms_for(connection, tenant, [bill for p in proposals for bill in p.unreserved])
    paid = [p.decision_id for p in proposals if p.spending is not None]
    return await closing.lock(connection, tenant, decisions=paid), rooms


async def _close_paid(
    connection: Connection,
    tenant: UUID,
    accepted: Sequence[Proposal],
    reserved: Sequence[Reservation],
    rooms: Sequence[Room],
    was: Mapping[UUID, str],
) -> None:
    closed = [
        each
        for p in accepted
        if p.spending is not None
        for each in closing.at_rest(
            [r for r in reserved if r.decision_id == p.decision_id], p.spending, was=was[p.decision_id]
        )
    ]
    await closing.write(connection, tenant, closed)
    for proposal in accepted:
        if proposal.unreserved:
            await bills.unreserved(connection, tenant, rooms, proposal.decision_id, proposal.unreserved)


def _keys(proposals: Sequence[Proposal]) -> set[Key]:
    return {
        *((read.kind, read.id) for proposal in proposals for read in proposal.reads),
        *((new.kind, new.id) for proposal in proposals for new in proposal.changes),
    }


def _judge_all(
    proposals: Sequence[Proposal],
    records: dict[Key, Locked],
    holders: dict[UUID, int],
    lost: Mapping[UUID, Sequence[str]],
    kinds: Kinds,
) -> list[list[Check] | Result]:
    """For each proposal its checks if it is accepted, else why not. An accepted one moves the records for those behind it, and
    rests its decision: nobody holds that any more."""
    verdicts: list[list[Check] | Result] = []
    for proposal in proposals:
        verdict = _judge(proposal, records, holders.get(proposal.decision_id), kinds)
        if isinstance(verdict, list) and proposal.decision_id in lost:
            verdict = LockLost(lost[proposal.decision_id])
        verdicts.append(verdict)
        if isinstance(verdict, list):
            del holders[proposal.decision_id]
            records |= {(new.kind, new.id): Locked(new.base + 1, new.data) for new in proposal.changes}
    return verdicts


def _judge(
    proposal: Proposal, records: Mapping[Key, Locked], token: int | None, kinds: Kinds
) -> list[Check] | Result:
    if token != proposal.token:
        return Superseded()
    if not proposal.fresh():
        return OutOfDate()
    checks: list[Check] = []
    for read in proposal.reads:
        present = records[read.kind, read.id]
        checks += read.compare(present.version, _decoded(present.data))
    for new in proposal.changes:
        present = records[new.kind, new.id]
        if present.version != new.base:
            checks += ReadCheck("record", new.kind, new.id, new.base, None).compare(present.version, None)
    if not all_hold(checks):
        return Moved(checks, {key: records[key] for key in _keys([proposal])})
    for new in proposal.changes:
        kind = kinds.get(new.kind)
        refusal = kind and kind.refusal(_decoded(records[new.kind, new.id].data), _decoded(new.data))
        if refusal:
            return NotAllowed(refusal)
    return [msgspec.structs.replace(check, confirmed_ms_before_commit=0) for check in checks]


def _decoded(data: bytes | None) -> JsonValue:
    return None if data is None else msgspec.json.decode(data)


async def _write(
    connection: Connection,
    tenant: UUID,
    accepted: Sequence[tuple[Proposal, list[Check]]],
    standing: Mapping[str, Lock],
) -> dict[UUID, Finished]:
    proposals = [proposal for proposal, _ in accepted]
    releases = await locks.release(connection, tenant, standing, {p.decision_id for p in proposals})
    count = sum(p.own_receipts + len(p.operations) for p in proposals) + len(releases)
    first, now = await log.reserve(connection, tenant, count)
    index = first
    finished: dict[UUID, Finished] = {}
    for proposal, checks in accepted:
        last = index + proposal.own_receipts - 1
        finished[proposal.decision_id] = proposal.finish(Facts(now, checks, last))
        index = last + 1 + len(proposal.operations)
    done = [finished[proposal.decision_id] for proposal in proposals]
    receipts = log.columns([receipt for each in done for receipt in each.receipts] + releases)
    if told := [(p.decision_id, p.token, f.events) for p, f in zip(proposals, done, strict=True) if f.events]:
        await events.append_if_held(connection, tenant, told)
    reviews = [(each.review.kept, each.review.expires_at) if each.review else (None, None) for each in done]
    paid = [o.paid for p in proposals for o in p.operations]
    columns = (*_columns(proposals, now, done), first, *receipts, *transposed(reviews, 2), paid)
    changed, rested = await connection.fetchrow(WRITE, tenant, *columns)  # type: ignore[misc]  # always one row
    if changed != len({(v.kind, v.id) for p in proposals for v in p.changes}) or rested != len(proposals):
        raise AssertionError("a locked row changed under its lock")
    return finished


def _columns(proposals: Sequence[Proposal], now: datetime, finished: Sequence[Finished]) -> list[object]:
    versions = [(v.kind, v.id, v.base, v.data, p.decision_id) for p in proposals for v in p.changes]
    rests = [
        (p.decision_id, p.token, p.status, done.answer, done.answer_status, done.view)
        for p, done in zip(proposals, finished, strict=True)
    ]
    operations = [_operation(p, o) for p in proposals for o in p.operations]
    return [*transposed(versions, 5), now, *transposed(rests, 6), *transposed(operations, 17)]


def _operation(p: Proposal, o: NewOperation) -> tuple[object, ...]:
    """Born claimed, or waiting for those it comes after, held by nobody."""
    what = (
        o.id,
        p.decision_id,
        p.decision_type,
        o.effect,
        o.ordinal,
        o.key,
        o.payload,
        o.payload_hash,
        o.guarantee,
    )
    after = "{" + ",".join(map(str, o.after)) + "}"
    links = (o.linked, after, o.on_failure, o.compensation)
    held = ("ready", p.traceparent, None) if o.after else ("dispatching", p.traceparent, p.lease_owner)
    return (*what, *links, *held, p.lease_ms)
