"""The receipt log of a tenant: contiguous indices, handed out under the lock of the log's one row.

That row is the last thing a transaction locks; so transactions that append are ordered by it, and the order of indices is the
order of commits. Receipts are never updated or deleted (the app's role has no grant to).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from coordinator.core.receipt import Receipt
from coordinator.store.database import Connection

RESERVE = """
UPDATE logs SET size = size + $2 WHERE tenant_id = $1 RETURNING size - $2 AS first, clock_timestamp() AS now
"""

APPEND = f"""
WITH place AS ({RESERVE})
INSERT INTO receipts (tenant_id, index, kind, decision_id, operation_id, body)
SELECT $1, place.first + r.n - 1, r.kind, r.decision_id, r.operation_id, r.body
FROM place, unnest($3::text[], $4::uuid[], $5::uuid[], $6::json[]) WITH ORDINALITY AS r (kind, decision_id, operation_id, body, n)
"""


async def reserve(connection: Connection, tenant: UUID, count: int) -> tuple[int, datetime]:
    """Lock the log and take ``count`` indices, for receipts that are then written with what they tell of: the first of them, and
    the time."""
    row = await connection.fetchrow(RESERVE, tenant, count)
    if row is None:
        raise AssertionError(f"tenant {tenant} has no log")
    return row["first"], row["now"]


async def append(connection: Connection, tenant: UUID, receipts: Sequence[Receipt]) -> None:
    """Lock the log, take as many indices as there are receipts, and write them."""
    await connection.execute(APPEND, tenant, len(receipts), *columns(receipts))


def columns(receipts: Sequence[Receipt]) -> tuple[list[object], ...]:
    """Receipts as parallel arrays: kinds, decisions, operations, bodies."""
    return (
        [receipt.kind for receipt in receipts],
        [receipt.decision_id for receipt in receipts],
        [receipt.operation_id for receipt in receipts],
        [receipt.body for receipt in receipts],
    )
