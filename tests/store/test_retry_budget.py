"""The retry budget: repeated sends of a tenant, over all processes, beyond so many a minute wait for the next minute. A provider's
outage does not become a storm; other tenants, and what succeeds, are not held back."""

from __future__ import annotations

from uuid import UUID

import asyncpg

from coordinator.store.database import Database
from coordinator.store.settle import settle
from tests.store.given import promised, settlement

DUE_MS = 10


async def repeat(database: Database, tenant: UUID, limit: int, state: str = "ready") -> UUID:
    """An operation that has to be sent again soon, in a transaction of its own."""
    decision, op = await promised(database, tenant)
    asked = settlement(decision, op, state, due_ms=DUE_MS if state == "ready" else None)
    await database.run(
        tenant, lambda connection: settle(connection, tenant, [asked], retries_per_minute=limit)
    )
    return op.id


async def waits_for_the_next_minute(root: asyncpg.Connection, op: UUID) -> bool:
    return bool(
        await root.fetchval(
            "SELECT due_at >= date_trunc('minute', last_sent_at) + interval '1 minute' FROM operations WHERE id = $1",
            op,
        )
    )


async def is_due_soon(root: asyncpg.Connection, op: UUID) -> bool:
    return bool(
        await root.fetchval(
            "SELECT due_at < last_sent_at + interval '1 second' FROM operations WHERE id = $1", op
        )
    )


async def test_repeats_beyond_the_budget_wait_for_the_next_minute(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    beyond = [await repeat(database, tenant, limit=0) for _ in range(2)]
    assert [await waits_for_the_next_minute(root, op) for op in beyond] == [True, True]
    assert await root.fetchval("SELECT sum(used) FROM retry_minutes WHERE tenant_id = $1", tenant) == 2


async def test_repeats_within_the_budget_are_due_when_they_were_planned(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    op = await repeat(database, tenant, limit=100)
    assert await is_due_soon(root, op)


async def test_what_is_no_repeat_costs_nothing_of_the_budget(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await repeat(database, tenant, limit=0, state="succeeded")
    assert await root.fetchval("SELECT count(*) FROM retry_minutes") == 0


async def test_a_tenant_does_not_spend_anothers_budget(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    await repeat(database, stranger, limit=100)
    op = await repeat(database, tenant, limit=1)
    assert await is_due_soon(root, op)
