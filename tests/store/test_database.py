"""Transactions and cancellation: once COMMIT is under way it is waited for, whoever stopped waiting for the result (I1)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import anyio
import asyncpg
import pytest

from coordinator.store.database import Connection, Database
from tests.store.given import blocked

SLOW_COMMIT = """
CREATE FUNCTION wait_for_the_test() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON records DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION wait_for_the_test();
SELECT pg_advisory_lock(42);
"""

WRITE = "INSERT INTO records (tenant_id, kind, id, version, data) VALUES ($1, 'quote', 'q-1', 1, '{}')"


async def write(database: Database, tenant: UUID) -> None:
    async def work(connection: Connection) -> None:
        await connection.execute(WRITE, tenant)

    await database.run(tenant, work)


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_commit_under_way_is_not_undone_by_a_cancellation(
    how: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await root.execute(SLOW_COMMIT)
    scope = anyio.CancelScope()

    async def writing() -> None:
        with scope:
            await write(database, tenant)

    caller = asyncio.ensure_future(writing())
    await blocked(root)
    caller.cancel() if how == "task" else scope.cancel()
    await root.execute("SELECT pg_advisory_unlock(42)")
    await asyncio.wait([caller])
    assert caller.cancelled() == (how == "task")
    assert await root.fetchval("SELECT count(*) FROM records WHERE tenant_id = $1", tenant) == 1
