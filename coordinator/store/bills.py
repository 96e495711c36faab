"""Bills: what operations, providers and people say that something cost, and who never reserved for it.

An operation's reservation is settled in the transaction that ends the operation. What was not reserved for is written down as a
reservation of nothing that is settled with the bill: money that was spent counts, whoever forgot to declare it. What is billed
after a reservation has closed is an overage, counted once under the bill's own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec

from coordinator.core.budget import Closing, Kind, Need, Room, close
from coordinator.core.money import Money
from coordinator.errors import NotFound, StateConflict
from coordinator.store import closing
from coordinator.store.closing import Closed, Reservation
from coordinator.store.database import Connection
from coordinator.store.reserve import Want, grant, lock_rooms


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What something cost. ``id`` is that of the reservation that is made for it where nothing was reserved."""

    id: UUID
    kind: Kind
    item: str
    provider: str
    cost: Money


class OperationBill(msgspec.Struct, frozen=True):
    """What became of an operation, and what its provider says it cost; ``name`` tells this bill from others of it."""

    operation_id: UUID
    decision_id: UUID
    name: str
    bill: Bill | None


class Locked(msgspec.Struct, frozen=True):
    """What has to be locked before the decisions: the reservations of their operations, and room for what was not reserved."""

    reservations: Sequence[Reservation]
    rooms: Sequence[Room]


STATES = "SELECT id, state FROM operations WHERE tenant_id = $1 AND id = ANY ($2::uuid[])"

REMEMBER = """
INSERT INTO bills (tenant_id, reservation_id, bill, amount_minor) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING bill
"""

REMEMBERED = "SELECT amount_minor FROM bills WHERE tenant_id = $1 AND reservation_id = $2 AND bill = $3"


async def lock_for_operations(
    connection: Connection, tenant: UUID, decisions: Sequence[UUID], bills: Sequence[OperationBill]
) -> Locked:
    """The reservations of all operations of these decisions."""
    reservations = await closing.lock(connection, tenant, decisions=decisions)
    of_operations = [each for each in reservations if each.operation_id is not None]
    paid = {each.operation_id for each in of_operations}
    unreserved = [each.bill for each in bills if each.bill and each.operation_id not in paid]
    return Locked(of_operations, await rooms_for(connection, tenant, unreserved))


async def rooms_for(connection: Connection, tenant: UUID, bills: Sequence[Bill]) -> list[Room]:
    """Locked, for `unreserved`; nothing is looked for if nothing is billed."""
    currencies = sorted({bill.cost.currency for bill in bills})
    return await lock_rooms(connection, tenant, currencies) if currencies else []


async def close_operations(
    connection: Connection, tenant: UUID, locked: Locked, bills: Sequence[OperationBill]
) -> None:
    """Once the operations have changed: their reservations follow the states that they are in now."""
    billed = {each.operation_id: each for each in bills if each.bill is not None}
    ids = [each.operation_id for each in locked.reservations]
    states = {row["id"]: row["state"] for row in await connection.fetch(STATES, tenant, ids)} if ids else {}
    closed: list[Closed] = []
    for each in locked.reservations:
        told = billed.pop(each.operation_id, None) if each.operation_id else None
        if each.is_open:
            follows = _follows(each, states[each.operation_id], told)
            closed += [] if follows is None else [follows]
        elif told and told.bill and told.bill.cost.currency == each.currency:
            closed += await _late(connection, tenant, each, told.name, told.bill.cost, {})
    await closing.write(connection, tenant, closed)
    for rest in billed.values():
        if rest.bill is not None:
            await unreserved(
                connection, tenant, locked.rooms, rest.decision_id, [rest.bill], rest.operation_id
            )


def _follows(reservation: Reservation, state: str, told: OperationBill | None) -> Closed | None:
    """An operation that is still on its way keeps its reservation as it is; one that ended without a bill may have been billed
    for if it happened, and was not if it did not."""
    if state in ("ready", "dispatching"):
        return None
    if state == "uncertain":
        return (
            None
            if reservation.state == "uncertain"
            else closing.uncertain(reservation, "operation-uncertain")
        )
    bill = told.bill if told else None
    costs = [bill.cost.amount_minor] if bill and bill.cost.currency == reservation.currency else []
    happened = state in ("succeeded", "compensating", "compensated")
    closed = close(reservation.drawn_minor, costs, silent=happened and not costs)
    if closed.state == reservation.state == "uncertain":
        return None
    return Closed(reservation=reservation, closing=closed)


async def unreserved(
    connection: Connection,
    tenant: UUID,
    rooms: Sequence[Room],
    decision: UUID,
    bills: Sequence[Bill],
    operation: UUID | None = None,
) -> None:
    """Bills that nothing was reserved for, where a budget would have had to be: all of each is an overage."""
    nothing = [Need(bill.kind, bill.item, bill.provider, Money(0, bill.cost.currency)) for bill in bills]
    known = [n for n, need in enumerate(nothing) if any(room.drawn_by(need) for room in rooms)]
    if not known:
        return
    want = Want(
        decision_id=decision,
        token=0,
        needs=[nothing[n] for n in known],
        ids=[bills[n].id for n in known],
        on_exhausted="refuse",
        expires_ms=0,
    )
    await grant(connection, tenant, rooms, [(want, tuple(want.needs))])
    costs = {bills[n].id: bills[n].cost.amount_minor for n in known}
    made = await closing.lock(connection, tenant, ids=want.ids)
    await closing.write(
        connection,
        tenant,
        [
            Closed(
                reservation=each,
                closing=Closing("settled", costs[each.id], costs[each.id]),
                operation_id=operation,
                cause="unreserved-bill",
            )
            for each in made
        ],
    )


async def resolve(
    connection: Connection, tenant: UUID, id: UUID, cost: Money, by: Mapping[str, object]
) -> None:
    """An uncertain reservation is settled with what it really cost, which may be nothing. Raises `NotFound`, `StateConflict`."""
    reservation = await _locked(connection, tenant, id)
    if reservation.state != "uncertain":
        raise StateConflict(f"the reservation is {reservation.state}; only an uncertain one can be resolved")
    _check_currency(reservation, cost)
    closed = close(reservation.drawn_minor, [cost.amount_minor], silent=False)
    await closing.write(connection, tenant, [Closed(reservation=reservation, closing=closed, by=by)])


async def bill_late(
    connection: Connection, tenant: UUID, id: UUID, name: str, cost: Money, by: Mapping[str, object]
) -> bool:
    """A bill that came after the reservation had closed; False if it was counted before. Raises `NotFound`, or `StateConflict`, also
    if the name stands for another amount."""
    reservation = await _locked(connection, tenant, id)
    if reservation.is_open:
        raise StateConflict(
            f"the reservation is {reservation.state}: it can still be settled with what it cost"
        )
    _check_currency(reservation, cost)
    closed = await _late(connection, tenant, reservation, name, cost, {"bill": name, **by})
    known = None if closed else await connection.fetchval(REMEMBERED, tenant, id, name)
    if known is not None and known != cost.amount_minor:
        raise StateConflict(
            f"bill {name!r} was counted with another amount; a correction needs a name of its own"
        )
    await closing.write(connection, tenant, closed)
    return bool(closed)


async def _late(
    connection: Connection,
    tenant: UUID,
    reservation: Reservation,
    name: str,
    cost: Money,
    by: Mapping[str, object],
) -> list[Closed]:
    columns = (reservation.id, name, cost.amount_minor)
    if not cost.amount_minor or await connection.fetchval(REMEMBER, tenant, *columns) is None:
        return []
    return [closing.late(reservation, cost.amount_minor, by)]


async def _locked(connection: Connection, tenant: UUID, id: UUID) -> Reservation:
    found = await closing.lock(connection, tenant, ids=[id])
    if not found:
        raise NotFound("there is no such reservation")
    return found[0]


def _check_currency(reservation: Reservation, cost: Money) -> None:
    if cost.currency != reservation.currency:
        raise StateConflict(f"the reservation is in {reservation.currency}, the bill in {cost.currency}")
