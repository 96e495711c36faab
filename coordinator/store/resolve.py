"""What people and providers say of an operation, outside of our own attempts at it.

    resolve      a person knows what became of an uncertain operation
    retry        a person sends a failed one again, under the same key
    compensate   a person has one undone that happened, by the compensation it declares
    cancel       what was not sent yet will not be; what is under way is undone if it happens after all
    notice       the provider says of itself what became of a key; each of its events counts once
    ask_now      uncertain operations that can be asked about are due at once

Each raises the fencing token, so that whoever holds the operation meanwhile changes nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from coordinator.core.effect import OperationState
from coordinator.core.receipt import Receipt, receipt
from coordinator.core.saga import Compensate
from coordinator.errors import NotFound, StateConflict
from coordinator.store import bills, log
from coordinator.store.bills import Bill, Locked, OperationBill
from coordinator.store.database import Connection
from coordinator.store.follow import Sibling, apply, follow, lock_decisions, siblings

FIND = "SELECT decision_id, state, key FROM operations WHERE tenant_id = $1 AND id = $2"

FIND_BY_KEY = (
    "SELECT id, decision_id, state, key FROM operations WHERE tenant_id = $1 AND key = $2 AND effect = $3"
)

SETTLE = """
UPDATE operations
SET state = $3, reference = coalesce($4, reference), reason = $5, in_doubt = false, due_at = NULL,
    fencing_token = fencing_token + 1, lease_owner = NULL, lease_expires_at = NULL, settled_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2 AND state = ANY ($6::text[])
RETURNING id
"""

RETRY = """
UPDATE operations
SET state = 'ready', due_at = clock_timestamp(), settled_at = NULL, sends = 0, lookups = 0, fencing_token = fencing_token + 1
WHERE tenant_id = $1 AND id = $2 AND state = 'failed'
RETURNING id
"""

CANCEL_UNSENT = """
UPDATE operations
SET state = 'cancelled', reason = 'cancelled on request before it was sent', due_at = NULL, fencing_token = fencing_token + 1,
    settled_at = clock_timestamp()
WHERE tenant_id = $1 AND decision_id = $2 AND state = 'ready' AND lease_owner IS NULL AND NOT in_doubt AND compensates IS NULL
RETURNING id
"""

REQUEST_CANCEL = """
UPDATE operations SET cancel_requested = true
WHERE tenant_id = $1 AND decision_id = $2 AND compensates IS NULL AND NOT cancel_requested
  AND state IN ('ready', 'dispatching', 'uncertain', 'succeeded')
RETURNING id
"""

REMEMBER_EVENT = """
INSERT INTO provider_events (tenant_id, effect, event_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING event_id
"""

ASK_NOW = """
UPDATE operations SET due_at = clock_timestamp()
WHERE tenant_id = $1 AND state = 'uncertain' AND lease_owner IS NULL
  AND (guarantee ->> 'kind' = 'lookup' OR guarantee ->> 'lookup_lag_ms' IS NOT NULL)
RETURNING id
"""


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """``state`` is ``succeeded`` or ``failed``; ``by`` who says so, for the receipt."""

    state: str
    reference: str | None
    reason: str | None
    by: dict[str, str]
    bill: Bill | None = None
    """What it cost, if they say it: its reservation is settled with that."""


async def resolve(connection: Connection, tenant: UUID, id: UUID, resolution: Resolution) -> OperationState:
    """An uncertain operation ends. Raises `NotFound`, `StateConflict`."""
    decision, locked = await _locked(connection, tenant, id, resolution.bill)
    if not await _settle(connection, tenant, id, resolution, ("uncertain",)):
        raise StateConflict(
            f"the operation is {await _state(connection, tenant, id)}; only an uncertain one can be resolved"
        )
    told = [_told(decision, id, "resolved", resolution)]
    await _append(connection, tenant, decision, [_receipt(decision, id, resolution)], locked, told)
    return await _state(connection, tenant, id)


async def retry(connection: Connection, tenant: UUID, id: UUID, by: dict[str, str]) -> OperationState:
    """A failed operation is due again under its key: its failure meant that the provider did not act. Raises `NotFound`,
    `StateConflict`."""
    decision, _ = await _locked(connection, tenant, id)
    if await connection.fetchval(RETRY, tenant, id) is None:
        raise StateConflict(
            f"the operation is {await _state(connection, tenant, id)}; only a failed one can be retried"
        )
    again = receipt(
        "operation.ready", decision_id=str(decision), operation_id=str(id), reason="retried by hand", **by
    )
    await log.append(connection, tenant, [again])
    return "ready"


async def compensate(connection: Connection, tenant: UUID, id: UUID, reason: str) -> OperationState:
    """A succeeded operation is undone by its compensation, an operation of its own. Raises `NotFound`, `StateConflict`."""
    decision, _ = await _locked(connection, tenant, id)
    sibling = _own(await siblings(connection, tenant, decision), id)
    if sibling.link.state != "succeeded":
        raise StateConflict(
            f"the operation is {sibling.link.state}; only one that succeeded can be compensated"
        )
    if not sibling.link.has_compensation:
        raise StateConflict(
            f"effect {sibling.link.effect} declares no compensation: it cannot be undone from here"
        )
    if sibling.link.reason is not None:
        raise StateConflict(f"it was tried before: {sibling.link.reason}")
    step = Compensate(sibling.link.ordinal, reason)
    await log.append(connection, tenant, await apply(connection, tenant, decision, sibling, step))
    return "compensating"


async def cancel(connection: Connection, tenant: UUID, decision: UUID) -> None:
    """After the commit: what was not sent is cancelled, the rest is undone where it happens and can be."""
    locked = await bills.lock_for_operations(connection, tenant, [decision], [])
    await lock_decisions(connection, tenant, [decision])
    cancelled = await connection.fetch(CANCEL_UNSENT, tenant, decision)
    asked = await connection.fetch(REQUEST_CANCEL, tenant, decision)
    receipts = [_of("operation.cancelled", decision, row["id"], reason="on request") for row in cancelled]
    receipts += [_of("operation.cancel-requested", decision, row["id"]) for row in asked]
    await _append(connection, tenant, decision, receipts, locked)


async def notice(
    connection: Connection, tenant: UUID, *, effect: str, event_id: str, key: str, resolution: Resolution
) -> OperationState:
    """What the provider says of a key. An event that was seen before changes nothing; one that comes after the operation has
    ended is kept as a receipt. Raises `NotFound` for a key we never used with this effect."""
    row = await connection.fetchrow(FIND_BY_KEY, tenant, key, effect)
    if row is None:
        raise NotFound("no operation of this effect has that key")
    id, decision = row["id"], row["decision_id"]
    told = [_told(decision, id, event_id, resolution)]
    locked = await bills.lock_for_operations(connection, tenant, [decision], told)
    await lock_decisions(connection, tenant, [decision])
    if await connection.fetchval(REMEMBER_EVENT, tenant, effect, event_id) is None:
        return await _state(connection, tenant, id)
    if await _settle(connection, tenant, id, resolution, ("ready", "dispatching", "uncertain")):
        await _append(connection, tenant, decision, [_receipt(decision, id, resolution)], locked, told)
    else:
        late = _of("operation.late-evidence", decision, id, learnt=resolution.state, **resolution.by)
        await log.append(connection, tenant, [late])
    return await _state(connection, tenant, id)


async def ask_now(connection: Connection, tenant: UUID) -> int:
    """How many uncertain operations will be asked about at once."""
    return len(await connection.fetch(ASK_NOW, tenant))


def _told(decision: UUID, id: UUID, name: str, resolution: Resolution) -> OperationBill:
    return OperationBill(id, decision, name, resolution.bill)


async def _locked(
    connection: Connection, tenant: UUID, id: UUID, bill: Bill | None = None
) -> tuple[UUID, Locked]:
    """The operation's decision, locked, and before it what its operations have reserved."""
    row = await connection.fetchrow(FIND, tenant, id)
    if row is None:
        raise NotFound("there is no such operation")
    decision: UUID = row["decision_id"]
    told = [OperationBill(id, decision, "", bill)]
    locked = await bills.lock_for_operations(connection, tenant, [decision], told)
    await lock_decisions(connection, tenant, [decision])
    return decision, locked


async def _settle(
    connection: Connection, tenant: UUID, id: UUID, resolution: Resolution, allowed: Sequence[str]
) -> bool:
    columns = (resolution.state, resolution.reference, resolution.reason, allowed)
    return await connection.fetchval(SETTLE, tenant, id, *columns) is not None


async def _state(connection: Connection, tenant: UUID, id: UUID) -> OperationState:
    row = await connection.fetchrow(FIND, tenant, id)
    if row is None:
        raise NotFound("there is no such operation")
    state: OperationState = row["state"]
    return state


async def _append(
    connection: Connection,
    tenant: UUID,
    decision: UUID,
    receipts: list[Receipt],
    locked: Locked,
    told: Sequence[OperationBill] = (),
) -> None:
    receipts += await follow(connection, tenant, [decision])
    if receipts:
        await log.append(connection, tenant, receipts)
    await bills.close_operations(connection, tenant, locked, told)


def _own(found: Sequence[Sibling], id: UUID) -> Sibling:
    return next(sibling for sibling in found if sibling.id == id)


def _receipt(decision: UUID, id: UUID, resolution: Resolution) -> Receipt:
    facts = {"reference": resolution.reference, "reason": resolution.reason, **resolution.by}
    return _of(f"operation.{resolution.state}", decision, id, **facts)


def _of(kind: str, decision: UUID, id: UUID, **facts: object) -> Receipt:
    return receipt(kind, decision_id=str(decision), operation_id=str(id), **facts)
