"""The receipt log of a tenant: contiguous indices, handed out under the lock of the log's one row.

That row is the last thing a transaction locks; so transactions that append are ordered by it, and the order of indices is the
order of commits. Receipts are never updated or deleted (the app's role has no grant to).
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from coordinator.core.receipt import Receipt
from coordinator.store.database import Connection

RESERVE = """
UPDATE logs SET size = size + $2 WHERE tenant_id = $1 RETURNING size - $2
"""

APPEND = """
INSERT INTO receipts (tenant_id, index, kind, decision_id, operation_id, body)
SELECT $1, $2 + r.n - 1, r.kind, r.decision_id, r.operation_id, r.body
FROM unnest($3::text[], $4::uuid[], $5::uuid[], $6::json[]) WITH ORDINALITY AS r (kind, decision_id, operation_id, body, n)
"""


async def reserve(connection: Connection, tenant: UUID, count: int) -> int:
    """Lock the log and take ``count`` indices; the first of them."""
    first = await connection.fetchval(RESERVE, tenant, count)
    return int(first)


async def append(
    connection: Connection, tenant: UUID, receipts: Sequence[Receipt], first: int | None = None
) -> int:
    """Write receipts at ``first``, reserving the indices here if that has not been done; the index of the first one."""
    if first is None:
        first = await reserve(connection, tenant, len(receipts))
    await connection.execute(
        APPEND,
        tenant,
        first,
        [receipt.kind for receipt in receipts],
        [receipt.decision_id for receipt in receipts],
        [receipt.operation_id for receipt in receipts],
        [receipt.body for receipt in receipts],
    )
    return first
