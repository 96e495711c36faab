"""What a process does for all of its tasks together: one task's or one tenant's trouble stays its own."""

from __future__ import annotations

import asyncio
from uuid import UUID

import anyio
import asyncpg
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.engine.watch import Remote
from coordinator.store import late
from coordinator.store.database import Database, open_database
from coordinator.store.tasks import Ended, ask
from tests.store.given import admitted, new_task, new_tenant
from tests.support import eventually

TROUBLE = """
CREATE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'trouble'; END $$;
CREATE TRIGGER trouble BEFORE UPDATE ON late_answers FOR EACH ROW WHEN (OLD.tenant_id = '{tenant}') EXECUTE FUNCTION trouble()
"""


def remote(database: Database, group: anyio.abc.TaskGroup) -> Remote:
    return Remote(database, group, {}, progress=lambda *_: None)


async def test_a_run_that_ends_late_takes_nothing_from_a_later_one_that_adopted_its_task(
    database_url: str,
) -> None:
    tenant, task = uuid7(), uuid7()
    async with (
        open_database(database_url, Settings(pool_size=1)) as database,
        anyio.create_task_group() as group,
    ):
        tasks = remote(database, group).tasks
        first = asyncio.ensure_future(tasks._end_of(tenant, task))
        await eventually(lambda: task in tasks.awaited)
        earlier = tasks.awaited[task]
        second = asyncio.ensure_future(tasks._end_of(tenant, task))
        await eventually(lambda: tasks.awaited[task] is not earlier)
        first.cancel()
        await asyncio.wait([first])
        end = Ended(id=task, state="completed", answer=None, token=1)
        tasks.deliver([end])
        with anyio.fail_after(5):
            assert await second == end
        assert tasks.awaited == {}


async def test_a_tenant_whose_late_answers_cannot_be_billed_holds_up_no_other(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with (
        open_database(database_url, Settings(pool_size=2)) as database,
        anyio.create_task_group() as group,
    ):
        troubled, other = [
            await unbilled(database, root, database_url, name) for name in ("troubled", "other")
        ]
        await root.execute(TROUBLE.format(tenant=troubled))
        looking = remote(database, group)
        looking._bill_at = 0.0
        await looking._look()
    rows = await root.fetch("SELECT tenant_id, billed_at IS NOT NULL AS billed FROM late_answers")
    assert {row["tenant_id"]: row["billed"] for row in rows} == {troubled: False, other: True}


async def unbilled(database: Database, root: asyncpg.Connection, url: str, name: str) -> UUID:
    """A tenant with one late answer of a decision that rests."""
    tenant = await new_tenant(url, name)
    decision = await admitted(database, tenant)
    task = new_task(decision)
    async with database.transaction(tenant) as connection:
        await ask(connection, tenant, [task], lease_ms=1_000)
        await late.remember(connection, tenant, task.id, 1, {"amount_minor": 5, "currency": "SGD"})
    await root.execute(
        "UPDATE decisions SET status = 'failed', answer = '{}', answer_status = 201, finished_at = clock_timestamp(),"
        " lease_owner = NULL, lease_expires_at = NULL WHERE id = $1",
        decision,
    )
    return tenant
