"""No tenant sees or changes another's rows (I14), receipts and history cannot be edited (I13), and nothing outlives a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.core.events import Event
from coordinator.store import events
from coordinator.store.bills import bill_late
from coordinator.store.children import adopt
from coordinator.store.database import Database, open_database
from coordinator.store.keys import create_key
from coordinator.store.late import remember
from coordinator.store.lease import tenants_with_work
from coordinator.store.locks import ANCHOR
from coordinator.store.pools import DECLARE as DECLARE_POOL
from coordinator.store.pools import WRITE_IF_UNMOVED as WRITE_SHARE
from coordinator.store.presence import ANNOUNCE
from coordinator.store.queue import lock_depths
from coordinator.store.resolve import REMEMBER_EVENT
from coordinator.store.settle import COUNT_RETRIES
from coordinator.store.tasks import ask
from coordinator.store.workers import register
from tests.store.given import (
    admitted,
    changes,
    commit_all,
    new_operation,
    new_task,
    new_tenant,
    only_row,
    proposal,
    registration,
)
from tests.store.paid import ceiling, holding, sgd, spending
from tests.support.postgres import Databases

TABLES = (
    "tenants",
    "keys",
    "records",
    "record_versions",
    "decisions",
    "queues",
    "processes",
    "operations",
    "locks",
    "provider_events",
    "retry_minutes",
    "pools",
    "pool_shares",
    "workers",
    "tasks",
    "late_answers",
    "decision_events",
    "decision_follows",
    "decision_notes",
    "decision_children",
    "budgets",
    "budget_periods",
    "reservations",
    "draws",
    "overages",
    "bills",
    "logs",
    "receipts",
)
PASSING = {"processes", "pool_shares"}
"""What is there now, not what happened."""
UPDATABLE = {
    "keys": "name = name",
    "records": "version = version",
    "decisions": "status = status",
    "queues": "depth = depth",
    "processes": "state = state",
    "operations": "state = state",
    "locks": "name = name",
    "retry_minutes": "used = used",
    "pools": "rates = rates",
    "pool_shares": "slots = slots",
    "workers": "name = name",
    "tasks": "state = state",
    "late_answers": "token = token",
    "decision_notes": "taken = taken",
    "budgets": "name = name",
    "budget_periods": "name = name",
    "reservations": "state = state",
    "logs": "size = size",
}


@pytest.fixture(scope="module")
def database_url(postgres: Databases) -> Iterator[str]:
    """One for all tests here: they look, and what they try to change stays as it is."""
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest.fixture(scope="module")
async def tenants(database_url: str) -> tuple[UUID, UUID]:
    """Two tenants, with something of both in every table."""
    made = await new_tenant(database_url, "one"), await new_tenant(database_url, "two")
    async with open_database(database_url, Settings(pool_size=1)) as database:
        for owner in made:
            decision = await admitted(database, owner)
            async with database.transaction(owner) as connection:
                await events.follow(connection, owner, decision)
                await events.note_if_followed(
                    connection, owner, uuid7(), events.Note(decision, "e", ["half"])
                )
                await events.append_if_held(connection, owner, [(decision, 1, [Event(2, "running", b"{}")])])
            wish = proposal(decision, changes=changes("p-1", 0), operations=[new_operation(decision)])
            await commit_all(database, owner, wish)
            await ceiling(database, owner, 40)
            paid_for = await holding(database, owner)
            await commit_all(database, owner, proposal(paid_for, spending=spending(60)))
            async with database.transaction(owner) as connection:
                reservation = await connection.fetchval("SELECT id FROM reservations")
                await bill_late(connection, owner, reservation, "bill-1", sgd(1), {})
                await adopt(connection, owner, decision, paid_for)
                await connection.execute(ANCHOR, owner, ["a-lock"])
                await create_key(connection, owner, uuid7(), "a key", ["decide"])
                await connection.execute(COUNT_RETRIES, owner, 1)
                await connection.execute(ANNOUNCE, owner, uuid7(), b"{}", 60)
                await lock_depths(connection, owner, ["bulk"])
                await connection.execute(REMEMBER_EVENT, owner, "send", "event-1")
                await register(connection, owner, registration())
                task = new_task(decision)
                await ask(connection, owner, [task], lease_ms=1_000)
                await remember(connection, owner, task.id, 1, None)
                await connection.execute(DECLARE_POOL, owner, ["planner"], [1], [None], [None])
                await connection.execute(WRITE_SHARE, owner, "planner", 0, uuid7(), 1, 0, 0, 0, 0, 1_000, 0)
    return made


@pytest.fixture
def tenant(tenants: tuple[UUID, UUID]) -> UUID:
    return tenants[0]


@pytest.fixture
def stranger(tenants: tuple[UUID, UUID]) -> UUID:
    return tenants[1]


async def test_every_table_is_among_those_that_are_tested_here(root: asyncpg.Connection) -> None:
    found = await root.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    assert {row["tablename"] for row in found} == {*TABLES, "schema_migrations"}


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("table", TABLES)
async def test_a_tenant_sees_its_own_rows_and_no_others(table: str, database: Database, tenant: UUID) -> None:
    async with database.transaction(tenant) as connection:
        seen = {row["tenant_id"] for row in await connection.fetch(f"SELECT tenant_id FROM {table}")}
    assert seen == {tenant}


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("table", UPDATABLE)
async def test_a_tenant_cannot_change_anothers_rows(
    table: str, database: Database, tenant: UUID, stranger: UUID
) -> None:
    async with database.transaction(tenant) as connection:
        changed = await connection.execute(
            f"UPDATE {table} SET {UPDATABLE[table]} WHERE tenant_id = $1", stranger
        )
    assert changed == "UPDATE 0"


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("table", UPDATABLE)
async def test_a_tenant_cannot_give_its_rows_to_another(
    table: str, database: Database, tenant: UUID, stranger: UUID
) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
        async with database.transaction(tenant) as connection:
            await connection.execute(f"UPDATE {table} SET tenant_id = $1", stranger)


async def test_a_tenant_cannot_insert_for_another(database: Database, tenant: UUID, stranger: UUID) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
        async with database.transaction(tenant) as connection:
            await connection.execute(
                "INSERT INTO receipts (tenant_id, index, kind, body) VALUES ($1, 0, 'forged', '{}')",
                stranger,
            )


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("table", TABLES)
async def test_without_a_tenant_nothing_is_visible(table: str, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        async with connection.transaction():
            await connection.execute("SET LOCAL ROLE coordinator_app")
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0
    finally:
        await connection.close()


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("table", [table for table in TABLES if table not in PASSING])
async def test_nothing_that_happened_is_ever_deleted(table: str, database: Database, tenant: UUID) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
        async with database.transaction(tenant) as connection:
            await connection.execute(f"DELETE FROM {table}")


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize("table", ["receipts", "record_versions", "provider_events", "tenants"])
async def test_what_happened_cannot_be_rewritten(table: str, database: Database, tenant: UUID) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
        async with database.transaction(tenant) as connection:
            await connection.execute(f"UPDATE {table} SET tenant_id = tenant_id")


@pytest.mark.usefixtures("tenants")
async def test_the_dispatch_view_sees_of_all_tenants_who_has_work_and_nothing_else(
    database: Database,
) -> None:
    shown = {
        "decisions": {
            "tenant_id",
            "type",
            "class",
            "status",
            "queued_at",
            "deadline_at",
            "lease_expires_at",
            "review_expires_at",
        },
        "queues": {"tenant_id", "class", "depth"},
        "operations": {"tenant_id", "state", "due_at", "lease_owner", "lease_expires_at"},
        "late_answers": {"tenant_id", "billed_at"},
        "tasks": {"tenant_id", "id", "capability", "pinned", "state", "lease_expires_at", "deadline_at"},
        "reservations": {"tenant_id", "state", "expires_at", "ask_at"},
    }
    for table in TABLES:
        async with database.dispatch_view() as connection:
            columns = await connection.fetch(
                "SELECT attname AS name, has_column_privilege('coordinator_dispatch', attrelid, attnum, 'SELECT') AS readable"
                " FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0",
                table,
            )
        assert {row["name"] for row in columns if row["readable"]} == shown.get(table, set()), table


@pytest.mark.usefixtures("tenants")
async def test_the_dispatch_view_cannot_read_what_a_decision_says(database: Database) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        async with database.dispatch_view() as connection:
            await connection.fetch("SELECT request FROM decisions")


async def test_the_dispatch_view_finds_every_tenant_with_work_that_nobody_holds(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    for owner in (tenant, stranger):
        await admitted(database, owner)
    async with database.dispatch_view() as connection:
        assert await tenants_with_work(connection) == []
    late = "clock_timestamp() - interval '1 s' WHERE lease_owner IS NOT NULL"
    await root.execute(f"UPDATE decisions SET lease_expires_at = {late}")
    async with database.dispatch_view() as connection:
        assert set(await tenants_with_work(connection)) == {tenant, stranger}


async def test_neither_role_nor_tenant_outlives_the_transaction(database_url: str) -> None:
    tenant = await new_tenant(database_url, "five")
    async with open_database(database_url, Settings(pool_size=1)) as database:
        async with database.transaction(tenant) as connection:
            during = await only_row(
                connection, "SELECT pg_backend_pid(), current_user, current_setting('coordinator.tenant')"
            )
        async with database.pool.acquire() as connection:
            after = await only_row(
                connection,
                "SELECT pg_backend_pid(), current_user, current_setting('coordinator.tenant', true)",
            )
    assert tuple(during) == (during[0], "coordinator_app", str(tenant))
    assert tuple(after) == (during[0], "coordinator", "")


async def test_a_failed_transaction_leaves_its_connection_clean_for_another_tenant(database_url: str) -> None:
    one, two = await new_tenant(database_url, "three"), await new_tenant(database_url, "four")
    async with open_database(database_url, Settings(pool_size=1)) as database:
        await admitted(database, one)
        async with database.transaction(one) as connection:
            before = connection.get_server_pid()
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with database.transaction(one) as connection:
                await connection.fetchval("SELECT 1 / 0")
        async with database.transaction(two) as connection:
            assert connection.get_server_pid() == before
            assert await connection.fetchval("SELECT count(*) FROM decisions") == 0


async def test_json_comes_back_byte_for_byte(database: Database, tenant: UUID) -> None:
    spelled = b'{"b": 1.50,   "a": "\xc3\xa9", "a2":[ ]}'
    decision = await admitted(database, tenant, request=spelled)
    async with database.transaction(tenant) as connection:
        assert await connection.fetchval("SELECT request FROM decisions WHERE id = $1", decision) == spelled
        assert msgspec.json.decode(spelled)
