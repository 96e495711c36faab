"""Bringing databases to the current schema: whole or not at all, once each, in turns, and never over somebody's edits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from coordinator.store.migrate import (
    MigrationError,
    MigrationReport,
    load_migrations,
    migrate,
    pending,
    schema_current,
)
from tests.support.pgbouncer import PROGRAM, pgbouncer
from tests.support.postgres import Databases
from tests.support.waiting import eventually

NOTHING_TO_DO = MigrationReport(created=False, applied=())


class Release:
    """A schema.sql and a folder of migrations, as one version of the program carries them."""

    def __init__(self, folder: Path) -> None:
        self.schema = folder / "schema.sql"
        self.schema.write_text("CREATE TABLE things (id int PRIMARY KEY);")
        self.migrations = folder / "migrations"
        self.migrations.mkdir()

    def add(self, name: str, sql: str) -> None:
        (self.migrations / name).write_text(sql)

    async def migrate(self, url: str, **options: float) -> MigrationReport:
        return await migrate(url, self.migrations, schema=self.schema, **options)


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


@pytest.fixture
async def connection(empty_database_url: str) -> AsyncIterator[asyncpg.Connection]:
    opened = await asyncpg.connect(empty_database_url)
    yield opened
    await opened.close()


async def has(connection: asyncpg.Connection, relation: str) -> bool:
    return await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", relation)


async def test_a_fresh_database_gets_the_whole_schema_and_all_known_migrations_count_as_applied(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    release.add("0001_more.sql", "this is not applied to a fresh database")
    assert await release.migrate(empty_database_url) == MigrationReport(created=True, applied=())
    assert await has(connection, "things")
    rows = await connection.fetch("SELECT version, name FROM schema_migrations ORDER BY version")
    assert rows == [(0, "schema.sql"), (1, "0001_more.sql")]
    assert await release.migrate(empty_database_url) == NOTHING_TO_DO


async def test_an_older_database_gets_what_is_pending_in_order_and_once(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    release.add("0002_index.sql", "CREATE INDEX things_name ON things (name);")
    release.add("0001_column.sql", "ALTER TABLE things ADD name text; ALTER TABLE things ADD size int;")
    assert (await release.migrate(empty_database_url)).applied == ("0001_column.sql", "0002_index.sql")
    assert await has(connection, "things_name")
    assert await release.migrate(empty_database_url) == NOTHING_TO_DO


async def test_readiness_names_what_is_pending_and_accepts_a_newer_database(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    assert await pending(connection, release.migrations) == ("schema.sql",)
    await release.migrate(empty_database_url)
    release.add("0001_a.sql", "CREATE TABLE a ()")
    assert await pending(connection, release.migrations) == ("0001_a.sql",)
    await release.migrate(empty_database_url)
    (release.migrations / "0001_a.sql").unlink()
    assert await pending(connection, release.migrations) == ()


async def test_the_packaged_schema_is_current_once_migrated(
    empty_database_url: str, connection: asyncpg.Connection
) -> None:
    assert not await schema_current(connection)
    assert (await migrate(empty_database_url)).created
    assert await schema_current(connection)


async def test_a_failing_file_changes_nothing_keeps_those_before_it_and_names_the_line(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    release.add("0001_good.sql", "CREATE TABLE good ()")
    release.add("0002_bad.sql", "CREATE TABLE half ();\nCREATE TABEL rest ();")
    with pytest.raises(MigrationError, match=r"0002_bad\.sql, line 2: .*TABEL"):
        await release.migrate(empty_database_url)
    assert await has(connection, "good")
    assert not await has(connection, "half")
    release.add("0002_bad.sql", "CREATE TABLE rest ()")
    assert (await release.migrate(empty_database_url)).applied == ("0002_bad.sql",)


async def test_a_failing_schema_leaves_the_database_fresh(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    release.schema.write_text("CREATE TABLE things ();\n\nSELECT nonsense;")
    with pytest.raises(MigrationError, match=r"schema\.sql, line 3: .*nonsense"):
        await release.migrate(empty_database_url)
    assert await pending(connection, release.migrations) == ("schema.sql",)
    assert not await has(connection, "things")


async def test_a_file_edited_after_it_was_applied_stops_everything(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    release.add("0001_a.sql", "CREATE TABLE a ()")
    await release.migrate(empty_database_url)
    release.add("0001_a.sql", "CREATE TABLE a (edited int)")
    release.add("0002_b.sql", "CREATE TABLE b ()")
    with pytest.raises(MigrationError, match=r"0001_a\.sql was edited .* Restore the file"):
        await release.migrate(empty_database_url)
    assert not await has(connection, "b")


async def test_a_database_with_somebodys_tables_is_left_alone(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await connection.execute("CREATE TABLE payroll ()")
    with pytest.raises(MigrationError, match=r"payroll.*Name an empty database"):
        await release.migrate(empty_database_url)
    assert not await has(connection, "schema_migrations")


async def test_an_index_is_built_concurrently_outside_a_transaction_and_again_after_a_failure(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    await connection.execute("INSERT INTO things VALUES (1), (2)")
    build = "-- no-transaction\nDROP INDEX CONCURRENTLY IF EXISTS by_half;\n-- then\n"
    release.add("0001_index.sql", build + "CREATE UNIQUE INDEX CONCURRENTLY by_half ON things ((id / 3));")
    with pytest.raises(MigrationError, match="could not create unique index"):
        await release.migrate(empty_database_url)
    assert await has(connection, "by_half"), "an invalid index stays behind"
    await connection.execute("DELETE FROM things WHERE id = 2")
    assert (await release.migrate(empty_database_url)).applied == ("0001_index.sql",)
    assert await connection.fetchval("SELECT indisvalid FROM pg_index WHERE indexrelid = 'by_half'::regclass")


async def test_concurrent_calls_take_turns_and_apply_each_file_once(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    async def all_at_once() -> list[MigrationReport]:
        return await asyncio.gather(*(release.migrate(empty_database_url) for _ in range(6)))

    assert sorted(report.created for report in await all_at_once()) == [False] * 5 + [True]
    release.add("0001_row.sql", "INSERT INTO things VALUES (1); SELECT pg_sleep(0.1);")
    release.add("0002_index.sql", "-- no-transaction\nCREATE INDEX CONCURRENTLY again ON things (id);")
    applied = sorted(report.applied for report in await all_at_once())
    assert applied == [()] * 5 + [("0001_row.sql", "0002_index.sql")]
    assert await connection.fetchval("SELECT count(*) FROM things") == 1


async def test_fresh_databases_of_one_server_may_be_migrated_at_once(
    release: Release, postgres: Databases
) -> None:
    role = f"role_{release.schema.parent.name.replace('-', '_')[-20:]}".lower()
    release.schema.write_text(f"""
        DO $$ BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN
                PERFORM pg_sleep(0.05);
                CREATE ROLE {role};
            END IF;
            GRANT {role} TO current_user;
        END $$;
    """)
    urls = await asyncio.to_thread(lambda: [postgres.create(empty=True) for _ in range(4)])
    try:
        reports = await asyncio.gather(*(release.migrate(url) for url in urls))
        assert all(report.created for report in reports)
    finally:
        await asyncio.to_thread(lambda: [postgres.drop(url) for url in urls])
        await asyncio.to_thread(postgres.administer, f"DROP ROLE IF EXISTS {role}")


async def test_a_call_that_dies_midway_is_finished_by_the_next(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    release.add("0001_slow.sql", "CREATE TABLE slow (); SELECT pg_sleep(3600);")
    dying = asyncio.create_task(release.migrate(empty_database_url))
    victim = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    pid = await eventually(lambda: connection.fetchval(victim))
    await connection.execute(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(MigrationError, match=r"0001_slow\.sql"):
        await dying
    assert not await has(connection, "slow")
    release.add("0001_slow.sql", "CREATE TABLE slow ();")
    assert (await release.migrate(empty_database_url)).applied == ("0001_slow.sql",)


async def test_a_call_gives_up_waiting_for_its_turn_within_its_limit(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    release.add("0001_slow.sql", "SELECT pg_sleep(3600);")
    first = asyncio.create_task(release.migrate(empty_database_url))
    asleep = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
    )
    await eventually(lambda: connection.fetchval(asleep))
    with pytest.raises(MigrationError, match="another migration"):
        await release.migrate(empty_database_url, lock_timeout_s=0.1)
    first.cancel()
    await asyncio.wait([first])


async def test_a_migration_that_waits_for_a_table_lets_readers_pass(
    release: Release, empty_database_url: str, connection: asyncpg.Connection
) -> None:
    await release.migrate(empty_database_url)
    release.add("0001_column.sql", "ALTER TABLE things ADD name text")
    reader = await asyncpg.connect(empty_database_url)
    async with connection.transaction():
        await connection.execute("SELECT * FROM things")
        migrating = asyncio.create_task(release.migrate(empty_database_url))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'things'::regclass"
        await eventually(lambda: reader.fetchval(waits))
        await reader.fetch("SELECT * FROM things", timeout=30)
        assert not migrating.done()
    await reader.close()
    assert (await migrating).applied == ("0001_column.sql",)


@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")
async def test_everything_works_through_a_pooler_in_transaction_mode(
    release: Release, empty_database_url: str
) -> None:
    with pgbouncer(empty_database_url) as pooled:
        reports = await asyncio.gather(*(release.migrate(pooled) for _ in range(4)))
        assert sum(report.created for report in reports) == 1
        release.add("0001_index.sql", "-- no-transaction\nCREATE INDEX CONCURRENTLY again ON things (id);")
        reports = await asyncio.gather(*(release.migrate(pooled) for _ in range(4)))
        assert sum(len(report.applied) for report in reports) == 1


@pytest.mark.parametrize("name", ["1_short.sql", "0000_baseline.sql", "0001-dash.sql"])
def test_a_file_with_an_odd_name_is_refused(release: Release, name: str) -> None:
    release.add(name, "SELECT 1")
    with pytest.raises(MigrationError, match=r"NNNN_name\.sql"):
        load_migrations(release.migrations)


def test_a_number_used_twice_is_refused(release: Release) -> None:
    release.add("0001_a.sql", "SELECT 1")
    release.add("0001_b.sql", "SELECT 1")
    with pytest.raises(MigrationError, match="same number"):
        load_migrations(release.migrations)
