"""What follows from a settled operation for its siblings, in the same transaction: `core.saga` decides, this applies.

The siblings' decision is locked first, so that two of them that settle at once follow one another. Every consequence is a state
change with a receipt of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec

from coordinator.core.receipt import Receipt, receipt
from coordinator.core.saga import (
    COMPENSATION_ORDINALS,
    Cancel,
    Compensate,
    Compensated,
    Consequence,
    Link,
    Release,
    Uncompensated,
    consequences,
)
from coordinator.store.commit import NewOperation
from coordinator.store.database import Connection

LOCK = "SELECT id FROM decisions WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) ORDER BY id FOR NO KEY UPDATE"

SIBLINGS = """
SELECT id, ordinal, effect, state, after, cancel_requested, on_failure, reason, compensation, compensates,
       state = 'ready' AND due_at IS NULL AND lease_owner IS NULL AS waiting
FROM operations WHERE tenant_id = $1 AND decision_id = $2 ORDER BY ordinal
"""

RELEASE = """
UPDATE operations SET due_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2 AND state = 'ready' AND due_at IS NULL AND lease_owner IS NULL
"""

CANCEL = """
UPDATE operations SET state = 'cancelled', reason = $3, due_at = NULL, settled_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2 AND state = 'ready' AND lease_owner IS NULL
"""

COMPENSATE = """
WITH undone AS (
    UPDATE operations SET state = 'compensating', settled_at = NULL
    WHERE tenant_id = $1 AND id = $2 AND state = 'succeeded' AND compensation IS NOT NULL
    RETURNING tenant_id, decision_id, decision_type, ordinal, traceparent
)
INSERT INTO operations (tenant_id, id, decision_id, decision_type, effect, ordinal, key, payload, payload_hash, guarantee, linked,
                        after, on_failure, compensates, state, traceparent, due_at)
SELECT u.tenant_id, $3, u.decision_id, u.decision_type, $4, $5, $6, $7, $8, $9, true, '{}', 'keep', u.ordinal, 'ready',
       u.traceparent, clock_timestamp()
FROM undone u
"""

COMPENSATED = """
UPDATE operations SET state = 'compensated', settled_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2 AND state = 'compensating'
"""

UNCOMPENSATED = """
UPDATE operations SET state = 'succeeded', reason = $3, settled_at = clock_timestamp()
WHERE tenant_id = $1 AND id = $2 AND state = 'compensating'
"""


class Sibling(msgspec.Struct, frozen=True):
    id: UUID
    link: Link
    compensation: bytes | None


async def lock_decisions(connection: Connection, tenant: UUID, decisions: Iterable[UUID]) -> None:
    """Before any of their operations is touched, where what follows may touch others."""
    await connection.execute(LOCK, tenant, sorted(set(decisions)))


async def follow(connection: Connection, tenant: UUID, decisions: Iterable[UUID]) -> list[Receipt]:
    """Apply everything that follows for these decisions, which are locked; the receipts to append."""
    receipts: list[Receipt] = []
    for decision in sorted(set(decisions)):
        found = await siblings(connection, tenant, decision)
        by_ordinal = {sibling.link.ordinal: sibling for sibling in found}
        for step in consequences(sibling.link for sibling in found):
            receipts += await apply(connection, tenant, decision, by_ordinal[step.ordinal], step)
    return receipts


async def siblings(connection: Connection, tenant: UUID, decision: UUID) -> Sequence[Sibling]:
    rows = await connection.fetch(SIBLINGS, tenant, decision)
    return [
        Sibling(
            row["id"],
            Link(
                ordinal=row["ordinal"],
                effect=row["effect"],
                state=row["state"],
                after=row["after"],
                waiting=row["waiting"],
                has_compensation=row["compensation"] is not None,
                compensates=row["compensates"],
                on_failure=row["on_failure"],
                cancel_requested=row["cancel_requested"],
                reason=row["reason"],
            ),
            row["compensation"],
        )
        for row in rows
    ]


async def apply(
    connection: Connection, tenant: UUID, decision: UUID, sibling: Sibling, step: Consequence
) -> list[Receipt]:
    """One consequence; its receipts."""
    id = sibling.id
    match step:
        case Release():
            await connection.execute(RELEASE, tenant, id)
            return []  # it stays `ready`; sending it is the next change
        case Cancel(_, reason):
            await connection.execute(CANCEL, tenant, id, reason)
            return [_receipt("operation.cancelled", decision, id, reason=reason)]
        case Compensate(_, reason):
            return await _compensate(connection, tenant, decision, sibling, reason)
        case Compensated():
            await connection.execute(COMPENSATED, tenant, id)
            return [_receipt("operation.compensated", decision, id)]
        case Uncompensated(_, reason):
            await connection.execute(UNCOMPENSATED, tenant, id, reason)
            return [_receipt("operation.succeeded", decision, id, reason=reason)]


async def _compensate(
    connection: Connection, tenant: UUID, decision: UUID, sibling: Sibling, reason: str
) -> list[Receipt]:
    undo = msgspec.json.decode(sibling.compensation or b"null", type=NewOperation)
    ordinal = sibling.link.ordinal + COMPENSATION_ORDINALS
    columns = (undo.id, undo.effect, ordinal, undo.key, undo.payload, undo.payload_hash, undo.guarantee)
    await connection.execute(COMPENSATE, tenant, sibling.id, *columns)
    return [
        _receipt("operation.compensating", decision, sibling.id, reason=reason),
        _receipt(
            "operation.ready",
            decision,
            undo.id,
            effect=undo.effect,
            key=undo.key,
            payload_hash=undo.payload_hash,
            compensates=str(sibling.id),
        ),
    ]


def _receipt(kind: str, decision: UUID, operation: UUID, **facts: object) -> Receipt:
    return receipt(kind, decision_id=str(decision), operation_id=str(operation), **facts)
