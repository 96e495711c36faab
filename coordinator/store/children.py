"""Children: which decision asked for which, written by whoever asks, before it waits.

Two decisions that would come to wait for each other are found however the edges came to be: each is stored and committed before it is
asked whether it closes a circle, so of two that close one together at least one sees it.
"""

from __future__ import annotations

from uuid import UUID

from coordinator.store.database import Connection

ADOPT = """
INSERT INTO decision_children (tenant_id, parent_id, child_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
"""

WAITS_FOR = """
WITH RECURSIVE below AS (
    SELECT child_id FROM decision_children WHERE tenant_id = $1 AND parent_id = $2
    UNION
    SELECT c.child_id FROM decision_children c JOIN below b ON c.parent_id = b.child_id WHERE c.tenant_id = $1
)
SELECT EXISTS (SELECT FROM below WHERE child_id = $3)
"""


async def adopt(connection: Connection, tenant: UUID, parent: UUID, child: UUID) -> None:
    await connection.execute(ADOPT, tenant, parent, child)


async def waits_for(connection: Connection, tenant: UUID, parent: UUID, other: UUID) -> bool:
    """Whether a decision has asked for another, however indirectly."""
    return bool(await connection.fetchval(WAITS_FOR, tenant, parent, other))
