"""Closing: what becomes of reservations, in the transaction of what decides it.

    held       -> settled | released | uncertain     the decision rests; its operation has ended
               -> uncertain                          the decision was requeued, its process silent; nobody can be working any more
    uncertain  -> settled | released                 the operation has ended; the provider or a person says what it cost
    settled, released                                absorb: what is billed later is an overage, once for each bill

First `lock`, before any decision is locked: the periods that the reservations draw on, by (name, starts_at), then the reservations.
Then `write`, in one statement: reservations, periods, overages, receipts. Every UPDATE names the state that was locked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from coordinator.core.budget import Cause, Change, Closing, ReservationState, change, close, per_period
from coordinator.core.money import Money
from coordinator.core.receipt import Receipt, receipt
from coordinator.store import log
from coordinator.store.database import Connection, transposed


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A locked reservation. ``budgets`` and ``starts`` are the periods it draws on."""

    id: UUID
    decision_id: UUID
    operation_id: UUID | None
    kind: str
    item: str
    state: ReservationState
    reason: str | None
    drawn_minor: int
    currency: str
    budgets: Sequence[str]
    starts: Sequence[datetime]

    @property
    def is_open(self) -> bool:
        return self.state in ("held", "uncertain")

    @property
    def is_its_decisions(self) -> bool:
        """Whether the decision still answers for it: held, or given up only because it took too long to rest."""
        return self.operation_id is None and (
            self.state == "held" or (self.state == "uncertain" and self.reason == "expired")
        )


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one. ``operation_id``: which operation has it from now on. ``by``: who says so, for the receipt."""

    reservation: Reservation
    closing: Closing
    operation_id: UUID | None = None
    cause: Cause = "bigger-bill"
    by: Mapping[str, object] = {}


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What the work of a decision cost, as it comes to rest: ``spent`` by evidence, in minor units; ``silent`` is evidence of which
    something was begun that did not say. Not ``accounted``: it was brought to rest by somebody who does not know. ``operations``:
    which operation takes over the reservation of its effect."""

    spent: Mapping[str, Sequence[int]]
    silent: Collection[str]
    accounted: bool
    operations: Mapping[str, UUID]


# That the count of the periods is asked for makes sure that they are locked before any reservation is.
LOCK = """
WITH period AS MATERIALIZED (
    SELECT p.name FROM budget_periods p
    WHERE p.tenant_id = $1 AND (p.name, p.starts_at) IN (
        SELECT d.budget, d.starts_at
        FROM reservations r JOIN draws d ON d.tenant_id = $1 AND d.reservation_id = r.id
        WHERE r.tenant_id = $1 AND (r.decision_id = ANY ($2::uuid[]) OR r.id = ANY ($3::uuid[]))
    )
    ORDER BY p.name COLLATE "C", p.starts_at
    FOR NO KEY UPDATE
), locked AS MATERIALIZED (
    SELECT r.* FROM reservations r
    WHERE r.tenant_id = $1 AND (r.decision_id = ANY ($2::uuid[]) OR r.id = ANY ($3::uuid[]))
      AND (SELECT count(*) FROM period) >= 0
    ORDER BY r.id
    FOR NO KEY UPDATE
)
SELECT l.id, l.decision_id, l.operation_id, l.kind, l.item, l.state, l.reason, l.drawn_minor, l.currency,
       ARRAY (SELECT d.budget FROM draws d WHERE d.tenant_id = $1 AND d.reservation_id = l.id ORDER BY d.budget) AS budgets,
       ARRAY (SELECT d.starts_at FROM draws d WHERE d.tenant_id = $1 AND d.reservation_id = l.id ORDER BY d.budget) AS starts
FROM locked l
"""

WRITE = """
WITH closed AS (
    UPDATE reservations r
    SET state = c.state, drawn_minor = c.drawn, reason = c.reason, operation_id = coalesce(c.operation_id, r.operation_id),
        expires_at = NULL,
        ask_at = CASE WHEN c.state = 'uncertain' AND r.kind = 'evidence' THEN clock_timestamp() END,
        closed_at = CASE WHEN c.state IN ('settled', 'released') THEN coalesce(r.closed_at, clock_timestamp()) END
    FROM unnest($2::uuid[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::uuid[])
         AS c (id, was, state, drawn, reason, operation_id)
    WHERE r.tenant_id = $1 AND r.id = c.id AND r.state = c.was
    RETURNING r.id
), period AS (
    UPDATE budget_periods p
    SET held = p.held + m.held, uncertain = p.uncertain + m.uncertain, settled = p.settled + m.settled,
        overage = p.overage + m.overage
    FROM unnest($8::text[], $9::timestamptz[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[])
         AS m (name, starts_at, held, uncertain, settled, overage)
    WHERE p.tenant_id = $1 AND p.name = m.name AND p.starts_at = m.starts_at
    RETURNING p.name
), beyond AS (
    INSERT INTO overages (tenant_id, budget, starts_at, reservation_id, amount_minor, cause)
    SELECT $1, o.budget, o.starts_at, o.reservation_id, o.amount, o.cause
    FROM unnest($14::text[], $15::timestamptz[], $16::uuid[], $17::bigint[], $18::text[])
         AS o (budget, starts_at, reservation_id, amount, cause)
), place AS (
    UPDATE logs SET size = size + cardinality($19::text[]) WHERE tenant_id = $1 AND cardinality($19::text[]) > 0
    RETURNING size - cardinality($19::text[]) AS first
), receipt AS (
    INSERT INTO receipts (tenant_id, index, kind, decision_id, operation_id, body)
    SELECT $1, place.first + r.n - 1, r.kind, r.decision_id, r.operation_id, r.body
    FROM place, unnest($19::text[], $20::uuid[], $21::uuid[], $22::json[]) WITH ORDINALITY
         AS r (kind, decision_id, operation_id, body, n)
)
SELECT (SELECT count(*) FROM closed), (SELECT count(*) FROM period)
"""

RUNNING_PAID = """
SELECT d.id FROM decisions d
WHERE d.tenant_id = $1 AND d.status = 'running'
  AND CASE WHEN $2::uuid[] IS NULL THEN d.lease_expires_at < clock_timestamp() ELSE d.id = ANY ($2) END
  AND EXISTS (SELECT FROM reservations r WHERE r.tenant_id = $1 AND r.decision_id = d.id AND r.state = 'held')
"""

EXPIRED = """
SELECT id FROM reservations
WHERE tenant_id = $1 AND state = 'held' AND expires_at < clock_timestamp()
ORDER BY expires_at LIMIT $2
"""


async def lock(
    connection: Connection, tenant: UUID, *, decisions: Collection[UUID] = (), ids: Collection[UUID] = ()
) -> list[Reservation]:
    """All reservations of these decisions, and those of these ids."""
    if not decisions and not ids:
        return []
    return [Reservation(**row) for row in await connection.fetch(LOCK, tenant, list(decisions), list(ids))]


def at_rest(reservations: Sequence[Reservation], spending: Spending, *, was: str) -> list[Closed]:
    """What becomes of the reservations of a decision that comes to rest; ``was`` is its status until now."""
    return [
        _of_effect(each, spending) if each.kind == "effect" else _of_evidence(each, spending, was)
        for each in reservations
        if each.is_its_decisions
    ]


def _of_effect(reservation: Reservation, spending: Spending) -> Closed:
    """No effect was begun before the commit. One that is promised now takes its reservation along."""
    if reservation.item not in spending.operations:
        return Closed(reservation=reservation, closing=Closing("released", 0, 0))
    same = Closing(reservation.state, reservation.drawn_minor, 0, reservation.reason)
    return Closed(reservation=reservation, closing=same, operation_id=spending.operations[reservation.item])


def _of_evidence(reservation: Reservation, spending: Spending, was: str) -> Closed:
    item = reservation.item
    costs = spending.spent.get(item, ())
    silent = item in spending.silent if spending.accounted else was != "queued"
    return Closed(reservation=reservation, closing=close(reservation.drawn_minor, costs, silent=silent))


def uncertain(reservation: Reservation, reason: str) -> Closed:
    return Closed(reservation=reservation, closing=Closing("uncertain", reservation.drawn_minor, 0, reason))


def late(reservation: Reservation, cost_minor: int, by: Mapping[str, object]) -> Closed:
    """A bill for a reservation that has closed: it stays as it closed, and all of the bill is an overage."""
    closing = Closing(reservation.state, reservation.drawn_minor + cost_minor, cost_minor, reservation.reason)
    return Closed(reservation=reservation, closing=closing, cause="late-bill", by=by)


async def lock_running(connection: Connection, tenant: UUID, ids: Sequence[UUID] | None) -> list[Reservation]:
    """Before running decisions are requeued, these or with None those whose lease has run out: what they hold."""
    paid = [row["id"] for row in await connection.fetch(RUNNING_PAID, tenant, ids)]
    return await lock(connection, tenant, decisions=paid)


async def give_up(
    connection: Connection,
    tenant: UUID,
    locked: Sequence[Reservation],
    requeued: Collection[UUID],
    reason: str,
) -> None:
    """The work of whoever held these decisions may still be billed. One whose lease ran out after `lock_running` looked is locked
    out of order: should that be a deadlock, the next sweep finds it."""
    known = {each.decision_id for each in locked}
    others = await lock(connection, tenant, decisions=[id for id in requeued if id not in known])
    given_up = [
        uncertain(each, reason)
        for each in (*locked, *others)
        if each.decision_id in requeued and each.state == "held" and each.operation_id is None
    ]
    await write(connection, tenant, given_up)


async def give_up_expired(connection: Connection, tenant: UUID, *, limit: int) -> int:
    """Nobody can be working under these any more; how many there were."""
    ids = [row["id"] for row in await connection.fetch(EXPIRED, tenant, limit)]
    expired = [each for each in await lock(connection, tenant, ids=ids) if each.is_its_decisions]
    expired = [each for each in expired if each.state == "held"]
    await write(connection, tenant, [uncertain(each, "expired") for each in expired])
    return len(expired)


async def write(connection: Connection, tenant: UUID, closed: Sequence[Closed]) -> None:
    """All of them; each is of a locked reservation, and none is named twice."""
    if not closed:
        return
    rows = [
        (
            each.reservation.id,
            each.reservation.state,
            each.closing.state,
            each.closing.drawn_minor,
            each.closing.reason,
            each.operation_id,
        )
        for each in closed
    ]
    changes = _changes(closed)
    overages = [
        (budget, start, each.reservation.id, each.closing.excess_minor, each.cause)
        for each in closed
        if each.closing.excess_minor
        for budget, start in _periods(each.reservation)
    ]
    receipts = [made for each in closed for made in _receipts(each)]
    done = await connection.fetchrow(
        WRITE,
        tenant,
        *transposed(rows, 6),
        *transposed(changes, 6),
        *transposed(overages, 5),
        *log.columns(receipts),
    )
    if done is None or tuple(done) != (len(rows), len(changes)):
        raise AssertionError("a locked reservation changed under its lock")


def _periods(reservation: Reservation) -> list[tuple[str, datetime]]:
    return list(zip(reservation.budgets, reservation.starts, strict=True))


def _changes(closed: Sequence[Closed]) -> list[tuple[Any, ...]]:
    summed = per_period(
        (
            _periods(each.reservation),
            change(each.reservation.state, each.reservation.drawn_minor, each.closing),
        )
        for each in closed
    )
    return [
        (*period, c.held, c.uncertain, c.settled, c.overage)  # type: ignore[misc]  # a period is a name and a time
        for period, c in summed.items()
        if c != Change()
    ]


def _receipts(each: Closed) -> list[Receipt]:
    """One for the change of state, if there is one, and one for what goes beyond what was reserved."""
    reservation, closing = each.reservation, each.closing
    operation = each.operation_id or reservation.operation_id

    def about(kind: str, **facts: object) -> Receipt:
        told = {"reservation": str(reservation.id), "item": reservation.item, **facts, **each.by}
        return receipt(
            kind,
            decision_id=str(reservation.decision_id),
            operation_id=None if operation is None else str(operation),
            **told,
        )

    made = []
    if closing.state != reservation.state:
        drawn = Money(closing.drawn_minor, reservation.currency)
        made.append(about(f"reservation.{closing.state}", amount=drawn, reason=closing.reason))
    if closing.excess_minor:
        beyond = Money(closing.excess_minor, reservation.currency)
        made.append(
            about("budget.overage", amount=beyond, cause=each.cause, budgets=list(reservation.budgets))
        )
    return made
