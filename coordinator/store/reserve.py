"""Reserving: money is held before work begins, in the transaction that lets the work begin.

    1  lock the present periods of the tenant's budgets, by name        -> what is left of each
    2  say for each decision what it reserves (pure): all or nothing
    3  store the decisions; those whose key is known reserve nothing    (`admit_all`)
    4  write: reservations, what they draw on, the periods, receipts    one statement

A batch of decisions costs these few statements together. The period's row is a hot spot like the tenant's log row, and like it is
held for one transaction that carries many decisions; the last statement names the ceiling once more, and so does a CHECK.

    admit_all   decisions at their admission: what is refused leaves nothing behind, and its key stays free
    secure_all  decisions that run without reservations: they wait for a budget, or were taken over from a silent process
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias
from uuid import UUID

import msgspec

from coordinator.core.budget import Left, Need, OnExhausted, Room, Short, left_of, reserve
from coordinator.core.money import Money
from coordinator.core.receipt import Receipt, receipt
from coordinator.store import closing, log
from coordinator.store.admit import Admission, Admitted, Known, NoRoom, admit, known_keys
from coordinator.store.database import Connection, transposed


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision needs before it may work. ``ids`` are those of its reservations, one for each need; ``token`` is the claim
    under which it works; ``expires_ms`` from now nobody can be working under it any more. ``ceiling`` is the decision's own."""

    decision_id: UUID
    token: int
    needs: Sequence[Need]
    ids: Sequence[UUID]
    on_exhausted: OnExhausted
    expires_ms: int
    ceiling: Money | None = None


class Paid(msgspec.Struct, frozen=True):
    """An admission of a decision that reserves."""

    admission: Admission
    want: Want


Secured = dict[tuple[str, str], UUID]
"""The reservations that a decision holds, by kind and item."""


class AdmittedPaid(msgspec.Struct, frozen=True):
    """Stored now, with what it holds; or without, and why (it waits for a budget, or goes to review)."""

    admitted: Admitted
    held: Secured | Short


class Exhausted(msgspec.Struct, frozen=True):
    """Refused; nothing was stored."""

    short: Short


QUEUED = 0
"""The token of what is reserved for a decision that nobody has claimed yet."""

AdmissionResult: TypeAlias = Admitted | AdmittedPaid | Known | NoRoom | Exhausted

# The inner SELECT delivers the budgets by name, and each period is locked as it comes. A period that nobody has drawn on yet has no
# row, and is null.
ROOMS = """
SELECT b.name, b.currency, b.provider, b.starts_at, nullif(b.ends_at, 'infinity') AS resets_at, p.ceiling_minor,
       p.held + p.uncertain + p.settled AS used_minor
FROM (
    SELECT b.name, b.currency, b.provider, now.starts_at, now.ends_at
    FROM budgets b, (SELECT clock_timestamp() AS instant OFFSET 0) AS clock,
         LATERAL budget_period(b.period, b.timezone, clock.instant) AS now
    WHERE b.tenant_id = $1 AND b.currency = ANY ($2::text[])
    ORDER BY b.name COLLATE "C" OFFSET 0
) AS b LEFT JOIN LATERAL (
    SELECT * FROM budget_periods p WHERE p.tenant_id = $1 AND p.name = b.name AND p.starts_at = b.starts_at
    FOR NO KEY UPDATE
) AS p ON true
"""

# FOR SHARE waits for whoever is changing the ceiling, and makes the next one wait.
OPEN = """
WITH present AS (
    SELECT name, period, timezone, ceiling_minor FROM budgets
    WHERE tenant_id = $1 AND currency = ANY ($2::text[])
    ORDER BY name COLLATE "C" FOR SHARE
)
INSERT INTO budget_periods (tenant_id, name, starts_at, ends_at, ceiling_minor)
SELECT $1, b.name, now.starts_at, now.ends_at, b.ceiling_minor
FROM present b, (SELECT clock_timestamp() AS instant OFFSET 0) AS clock, LATERAL budget_period(b.period, b.timezone, clock.instant) AS now
ORDER BY b.name COLLATE "C"
ON CONFLICT (tenant_id, name, starts_at) DO NOTHING
"""

HELD = """
SELECT decision_id, id, kind, item, token FROM reservations
WHERE tenant_id = $1 AND decision_id = ANY ($2::uuid[]) AND state = 'held'
"""

HOLDERS = """
SELECT id, fencing_token FROM decisions
WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner IS NOT NULL
ORDER BY id
FOR NO KEY UPDATE
"""

# The periods are locked already, so the condition holds; that it stands here as well makes the statement safe on its own. Who takes
# nothing of a period always has room there, though a bill may have gone beyond its ceiling.
RESERVE = """
WITH reserved AS (
    INSERT INTO reservations (tenant_id, id, decision_id, token, kind, item, provider, amount_minor, drawn_minor, currency, state,
                              expires_at)
    SELECT $1, r.id, r.decision_id, r.token, r.kind, r.item, r.provider, r.amount, r.amount, r.currency, 'held',
           clock_timestamp() + r.expires_ms * interval '1 ms'
    FROM unnest($2::uuid[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::text[], $10::bigint[])
         AS r (id, decision_id, token, kind, item, provider, amount, currency, expires_ms)
), drawn AS (
    INSERT INTO draws (tenant_id, reservation_id, budget, starts_at)
    SELECT $1, d.reservation_id, d.budget, d.starts_at
    FROM unnest($11::uuid[], $12::text[], $13::timestamptz[]) AS d (reservation_id, budget, starts_at)
), taken AS (
    UPDATE budget_periods p SET held = p.held + t.amount
    FROM unnest($14::text[], $15::timestamptz[], $16::bigint[]) AS t (budget, starts_at, amount)
    WHERE p.tenant_id = $1 AND p.name = t.budget AND p.starts_at = t.starts_at
      AND (t.amount = 0 OR p.held + p.uncertain + p.settled + t.amount <= p.ceiling_minor)
    RETURNING p.name
), place AS (
    UPDATE logs SET size = size + cardinality($17::text[]) WHERE tenant_id = $1
    RETURNING size - cardinality($17::text[]) AS first
), receipt AS (
    INSERT INTO receipts (tenant_id, index, kind, decision_id, operation_id, body)
    SELECT $1, place.first + r.n - 1, r.kind, r.decision_id, r.operation_id, r.body
    FROM place, unnest($17::text[], $18::uuid[], $19::uuid[], $20::json[]) WITH ORDINALITY
         AS r (kind, decision_id, operation_id, body, n)
)
SELECT count(*) FROM taken
"""


Reserved: TypeAlias = tuple[Need, ...]
"""The needs of a decision that have room."""


async def admit_all(
    connection: Connection, tenant: UUID, items: Sequence[Admission | Paid]
) -> Sequence[AdmissionResult]:
    """`admit`, with the reservations of those that reserve. Where nobody does, it is `admit` and nothing else."""
    wants = [item.want for item in items if isinstance(item, Paid)]
    if not wants:
        return await admit(connection, tenant, [_admission(item) for item in items])
    rooms = await lock_rooms(connection, tenant, _currencies(wants))
    placed = _place(rooms, items, known=())
    if any(isinstance(reserved, Short) for reserved in placed):
        # Only now that the periods are locked is it certain which keys are known: those need no room and are not refused.
        known = await known_keys(connection, tenant, [_admission(item).key for item in items])
        placed = _place(rooms, items, known=known)
    going = [item for item, reserved in zip(items, placed, strict=True) if not _is_refused(item, reserved)]
    stored = iter(await admit(connection, tenant, [_admission(item) for item in going]) if going else ())
    results: list[AdmissionResult] = []
    granted: list[tuple[Want, Reserved]] = []
    for item, reserved in zip(items, placed, strict=True):
        if isinstance(reserved, Short) and _is_refused(item, reserved):
            results.append(Exhausted(reserved))
            continue
        result: AdmissionResult = next(stored)
        if isinstance(item, Paid) and isinstance(result, Admitted) and reserved is not None:
            if isinstance(reserved, Short):
                result = AdmittedPaid(result, reserved)
            else:
                granted.append((item.want, reserved))
                result = AdmittedPaid(result, _secured(item.want, reserved))
        results.append(result)
    await grant(connection, tenant, rooms, granted)
    return results


def _admission(item: Admission | Paid) -> Admission:
    return item.admission if isinstance(item, Paid) else item


def _is_refused(item: Admission | Paid, reserved: Reserved | Short | None) -> bool:
    return (
        isinstance(reserved, Short)
        and isinstance(item, Paid)
        and item.want.on_exhausted in ("refuse", "reduce")
    )


def _place(
    rooms: Sequence[Room], items: Sequence[Admission | Paid], known: Collection[str]
) -> list[Reserved | Short | None]:
    """In order, what each reserves, or why it can't; None for those that need nothing and those whose key is taken."""
    left, taken = left_of(rooms), set(known)
    placed: list[Reserved | Short | None] = []
    for item in items:
        key = _admission(item).key
        if not isinstance(item, Paid) or key in taken:
            placed.append(None)
            continue
        reserved = _reserved(rooms, left, item.want)
        placed.append(reserved)
        if not _is_refused(item, reserved):
            taken.add(key)
    return placed


def _reserved(rooms: Sequence[Room], left: Left, want: Want) -> Reserved | Short:
    reduce = want.on_exhausted == "reduce"
    return reserve(rooms, left, want.needs, ceiling=want.ceiling, reduce=reduce)


async def secure_all(
    connection: Connection, tenant: UUID, wants: Sequence[Want]
) -> Sequence[Secured | Short | None]:
    """What each of these decisions holds, made now unless it holds it already; or why it can't; None if the decision is no longer
    held under its token."""
    rooms = await lock_rooms(connection, tenant, _currencies(wants))
    decisions = [want.decision_id for want in wants]
    holders = {row["id"]: row["fencing_token"] for row in await connection.fetch(HOLDERS, tenant, decisions)}
    there = await _held(connection, tenant, holders)
    left = left_of(rooms)
    results: list[Secured | Short | None] = []
    granted: list[tuple[Want, Reserved]] = []
    for want in wants:
        if holders.get(want.decision_id) != want.token:
            results.append(None)
        elif want.decision_id in there:
            results.append(there[want.decision_id])
        elif isinstance(reserved := _reserved(rooms, left, want), Short):
            results.append(reserved)
        else:
            granted.append((want, reserved))
            results.append(_secured(want, reserved))
    await grant(connection, tenant, rooms, granted)
    return results


async def _held(connection: Connection, tenant: UUID, holders: Mapping[UUID, int]) -> dict[UUID, Secured]:
    """What these decisions hold: made under this claim, or while they were queued. What a claim before it left behind may have been
    spent, and is uncertain."""
    there: dict[UUID, Secured] = {}
    left_behind: list[UUID] = []
    for row in await connection.fetch(HELD, tenant, list(holders)):
        if row["token"] in (QUEUED, holders[row["decision_id"]]):
            there.setdefault(row["decision_id"], {})[row["kind"], row["item"]] = row["id"]
        else:
            left_behind.append(row["id"])
    lost = await closing.lock(connection, tenant, ids=left_behind)
    given_up = [closing.uncertain(each, "holder-lost") for each in lost if each.state == "held"]
    await closing.write(connection, tenant, given_up)
    return there


def _secured(want: Want, reserved: Reserved) -> Secured:
    ids = dict(zip(want.needs, want.ids, strict=True))
    return {(need.kind, need.item): ids[need] for need in reserved}


def _currencies(wants: Sequence[Want]) -> list[str]:
    return sorted({need.amount.currency for want in wants for need in want.needs})


_SEEN = [name for name in Room.__struct_fields__ if name != "budget"]


async def lock_rooms(connection: Connection, tenant: UUID, currencies: Sequence[str]) -> list[Room]:
    """The present periods of the tenant's budgets in these currencies, locked. The first to draw on a new period makes its row."""
    while True:
        rows = await connection.fetch(ROOMS, tenant, currencies)
        if all(row["ceiling_minor"] is not None for row in rows):
            return [Room(budget=row["name"], **{name: row[name] for name in _SEEN}) for row in rows]
        await connection.execute(OPEN, tenant, currencies)


async def grant(
    connection: Connection, tenant: UUID, rooms: Sequence[Room], granted: Sequence[tuple[Want, Reserved]]
) -> None:
    """Write these reservations down; ``rooms`` are locked, and have room for them."""
    made = [
        (id, want, need)
        for want, reserved in granted
        for need, id in zip(want.needs, want.ids, strict=True)
        if need in reserved
    ]
    if not made:
        return
    rows = [
        (
            id,
            w.decision_id,
            w.token,
            n.kind,
            n.item,
            n.provider,
            n.amount.amount_minor,
            n.amount.currency,
            w.expires_ms,
        )
        for id, w, n in made
    ]
    draws = [
        (id, room.budget, room.starts_at) for id, _, need in made for room in rooms if room.drawn_by(need)
    ]
    taken = [
        (room.budget, room.starts_at, sum(n.amount.amount_minor for _, _, n in made if room.drawn_by(n)))
        for room in rooms
    ]
    receipts = [_receipt(id, want, need, rooms) for id, want, need in made]
    columns = (*transposed(rows, 9), *transposed(draws, 3), *transposed(taken, 3), *log.columns(receipts))
    if await connection.fetchval(RESERVE, tenant, *columns) != len(taken):
        raise AssertionError("a locked budget changed under its lock")


def _receipt(id: UUID, want: Want, need: Need, rooms: Sequence[Room]) -> Receipt:
    return receipt(
        "reservation.held",
        decision_id=str(want.decision_id),
        reservation=str(id),
        item=need.item,
        amount=need.amount,
        budgets=[room.budget for room in rooms if room.drawn_by(need)],
        fencing_token=want.token,
    )
