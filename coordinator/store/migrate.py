"""Bringing a database to the current schema: all of schema.sql into a fresh one, the pending migrations into an older one.

`schema_migrations` says what a database has: row 0 is the schema.sql it began with (its checksum is only a note), every other row
a migration with the SHA-256 of the file that was applied. A fresh database gets schema.sql and a row for every known migration in
one transaction: after a crash it is either whole or still fresh. In an older one each pending file and its row are one
transaction: a crash leaves the files before it applied, and the next call goes on from there.

Concurrent calls take turns: a call works only while a second connection of it holds an advisory lock. That connection keeps the
lock by keeping its transaction open, so that it also holds behind a pooler in transaction mode. Calls poll for the lock:
CREATE INDEX CONCURRENTLY would wait for a statement that waits for it. Should the lock's connection be lost midway, the primary
key of `schema_migrations` still lets only one of two calls commit a file.

Nothing here needs a superuser. Rows with versions that this program does not know were written by a newer one and are left alone.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import anyio
import asyncpg
import msgspec
import tenacity

from coordinator.errors import StoreError

Connection: TypeAlias = "asyncpg.Connection | asyncpg.pool.PoolConnectionProxy"

MIGRATIONS: Final = Path(__file__).parent / "migrations"
SCHEMA_PLACES: Final = tuple(Path(__file__).parents[up] / "schema.sql" for up in (1, 2))
"""In an installed package inside it; in the repository beside it."""
BASELINE: Final = 0
NO_TRANSACTION: Final = "-- no-transaction"
THEN: Final = re.compile(r"^-- then[ \t]*$", re.MULTILINE)
LOCK_POLL_S: Final = 0.05


class MigrationError(StoreError):
    """The database could not be brought to the current schema; the message says what to do."""

    code = "migration-failed"


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One NNNN_name.sql."""

    version: int
    name: str
    sql: str
    checksum: str
    """SHA-256 of the file's bytes, hexadecimal."""


class MigrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `migrate` did; if neither, the database was current."""

    created: bool
    """The database was fresh and got schema.sql."""
    applied: tuple[str, ...]
    """Names of the files applied to an older database, in order."""


async def migrate(
    url: str, migrations: Path | None = None, *, schema: Path | None = None, lock_timeout_s: float = 300.0
) -> MigrationReport:
    """Bring the database at ``url`` to the current schema; any number of processes may call this at once, and again.

    Raises `MigrationError` when an applied file was edited, when the database holds somebody else's tables, when a file fails, or
    when another call holds the lock for longer than ``lock_timeout_s``.
    """
    known = load_migrations(migrations or MIGRATIONS)
    async with _connect(url) as connection, _lock(url, lock_timeout_s):
        applied = await _applied(connection)
        if applied is None:
            await _create(connection, _read(schema or _packaged_schema(), BASELINE), known)
            return MigrationReport(created=True, applied=())
        todo = _pending(known, applied)
        for migration in todo:
            await _apply(connection, migration)
        return MigrationReport(created=False, applied=tuple(migration.name for migration in todo))


async def pending(connection: Connection, migrations: Path | None = None) -> tuple[str, ...]:
    """Names of what `migrate` would do now. Two short queries; for readiness checks."""
    applied = await _applied(connection)
    if applied is None:
        return ("schema.sql",)
    return tuple(migration.name for migration in _pending(load_migrations(migrations or MIGRATIONS), applied))


async def schema_current(connection: Connection) -> bool:
    """Whether the database has everything this program knows; it may have more."""
    return not await pending(connection)


def load_migrations(folder: Path) -> Sequence[Migration]:
    """The files in order. Raises `MigrationError` for a name that is not NNNN_name.sql and for a number used twice."""
    found: dict[int, Migration] = {}
    for path in sorted(folder.glob("*.sql")):
        name = re.fullmatch(r"(\d{4})_[a-z0-9_]+\.sql", path.name)
        version = int(name[1]) if name else BASELINE
        if version == BASELINE:
            raise MigrationError(f"{path} is not named NNNN_name.sql, with NNNN from 0001")
        if version in found:
            raise MigrationError(
                f"{path.name} and {found[version].name} have the same number: renumber the later one"
            )
        found[version] = _read(path, version)
    return tuple(found.values())


def _read(path: Path, version: int) -> Migration:
    content = path.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    return Migration(version=version, name=path.name, sql=content.decode(), checksum=checksum)


def _packaged_schema() -> Path:
    for place in SCHEMA_PLACES:
        if place.exists():
            return place
    raise MigrationError(f"schema.sql is missing from this installation: looked in {SCHEMA_PLACES[0].parent}")


def _pending(known: Sequence[Migration], applied: Mapping[int, str]) -> Sequence[Migration]:
    for migration in known:
        checksum = applied.get(migration.version, migration.checksum)
        if checksum != migration.checksum:
            raise MigrationError(
                f"{migration.name} was edited after this database applied it (then {checksum[:12]}, now "
                f"{migration.checksum[:12]}). Restore the file as it was, and write the change as a new migration."
            )
    return tuple(migration for migration in known if migration.version not in applied)


TABLE_EXISTS = "SELECT to_regclass('schema_migrations') IS NOT NULL"
APPLIED = "SELECT version, checksum FROM schema_migrations"


async def _applied(connection: Connection) -> Mapping[int, str] | None:
    """Checksums by version; None for a database that was never migrated."""
    if not await connection.fetchval(TABLE_EXISTS):
        return None
    return {row["version"]: row["checksum"] for row in await connection.fetch(APPLIED)}


TABLES = """
SELECT coalesce(string_agg(relname, ', ' ORDER BY relname), '')
  FROM pg_class
 WHERE relnamespace = to_regnamespace(current_schema()) AND relkind IN ('r', 'p')
"""
CREATE_TABLE = """
CREATE TABLE schema_migrations (
    version     integer PRIMARY KEY,
    name        text NOT NULL,
    checksum    text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""
ROLE_MADE_AT_THE_SAME_TIME = (
    asyncpg.UniqueViolationError,
    asyncpg.DuplicateObjectError,
    asyncpg.InternalServerError,  # "tuple concurrently updated"
)
"""Roles are the server's, not the database's: two fresh databases of one server, created at once, race for them."""


async def _create(connection: asyncpg.Connection, baseline: Migration, known: Sequence[Migration]) -> None:
    """The whole schema, in one transaction."""
    if tables := await connection.fetchval(TABLES):
        raise MigrationError(
            f"the database has tables ({tables}) but no schema_migrations: it is not ours. Name an empty database."
        )
    with _blaming(baseline):
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(ROLE_MADE_AT_THE_SAME_TIME),
            stop=tenacity.stop_after_attempt(5),
            wait=tenacity.wait_random(0.01, 0.1),
            reraise=True,
        ):
            with attempt:
                async with connection.transaction():
                    await connection.execute(CREATE_TABLE)
                    await connection.execute(baseline.sql)
                    for migration in (baseline, *known):
                        await _record(connection, migration)


GIVE_WAY = "SET LOCAL lock_timeout = '5s'"
"""Statements that queue behind a migration waiting for a table wait with it; so it gives way, and tries again."""


async def _apply(connection: asyncpg.Connection, migration: Migration) -> None:
    with _blaming(migration):
        if migration.sql.startswith(NO_TRANSACTION):
            for statement in THEN.split(migration.sql):
                await connection.execute(statement)
            await _record(connection, migration)
            return
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(asyncpg.LockNotAvailableError),
            stop=tenacity.stop_after_attempt(10),
            wait=tenacity.wait_random(0.5, 2),
            reraise=True,
        ):
            with attempt:
                async with connection.transaction():
                    await connection.execute(GIVE_WAY)
                    await connection.execute(migration.sql)
                    await _record(connection, migration)


RECORD = "INSERT INTO schema_migrations (version, name, checksum) VALUES ($1, $2, $3)"


async def _record(connection: asyncpg.Connection, migration: Migration) -> None:
    await connection.execute(RECORD, migration.version, migration.name, migration.checksum)


@contextmanager
def _blaming(migration: Migration) -> Iterator[None]:
    """Says which file a server error came from, and at which line."""
    try:
        yield
    except asyncpg.PostgresError as error:
        place = migration.name
        if position := getattr(error, "position", None):
            place += f", line {1 + migration.sql[: int(position) - 1].count(chr(10))}"
        raise MigrationError(f"{place}: {error}") from error
    except (asyncpg.InterfaceError, OSError) as error:
        raise MigrationError(
            f"{migration.name}: the connection was lost ({error}); run the migration again"
        ) from error


TRY_LOCK = "SELECT pg_try_advisory_xact_lock(hashtext('coordinator schema_migrations'))"
LET_GO_OF_SNAPSHOT = "SET LOCAL idle_in_transaction_session_timeout = 0"
"""CREATE INDEX CONCURRENTLY waits for every transaction that holds a snapshot, to its end. The portal of TRY_LOCK holds one
until the next statement replaces it, so this comes after; and who does not get the lock ends its transaction at once."""


@asynccontextmanager
async def _lock(url: str, timeout_s: float) -> AsyncIterator[None]:
    """The turn of one call. Locks are per database."""
    async with _connect(url) as connection:
        deadline = time.monotonic() + timeout_s
        while True:
            async with connection.transaction():
                if await connection.fetchval(TRY_LOCK):
                    await connection.execute(LET_GO_OF_SNAPSHOT)
                    yield
                    return
            if time.monotonic() > deadline:
                raise MigrationError(
                    f"another migration has been running for {timeout_s:.0f} s; try again when it is done"
                )
            await anyio.sleep(LOCK_POLL_S)


@asynccontextmanager
async def _connect(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(
        url, statement_cache_size=0, server_settings={"application_name": "coordinator migrate"}
    )
    try:
        yield connection
    finally:
        await connection.close()
