"""An effect as a change in a PostgreSQL database of yours: exactly once, since key and change are one transaction.

    BEGIN
    INSERT INTO effects_done (key, ...) ON CONFLICT (key) DO NOTHING     no row: it happened already, with this reference
    your statement
    UPDATE effects_done SET reference = ...
    COMMIT

Two attempts with one key wait for each other at the INSERT; whichever comes second finds the key, or, when the first rolled back,
its turn. The database needs this table, which the sink never makes and from which rows may be deleted once nobody asks any more:

    CREATE TABLE effects_done (
        key            text PRIMARY KEY,
        payload_sha256 text NOT NULL,
        reference      text NOT NULL DEFAULT '',
        done_at        timestamptz NOT NULL DEFAULT clock_timestamp()
    );

    no connection, or it broke before COMMIT                  NotSent: what did not commit did not happen
    deadlock, serialization failure, lock or time ran out     NotSent
    constraint, syntax, a value that does not fit, no row     Rejected
    an error during COMMIT that does not say "rolled back"    Ambiguous; the lookup tells

A lookup takes the key as an attempt would and gives it back, so it waits for an attempt that is just committing: that it finds
nothing is proof at once. Ask the primary, never a replica.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import asyncpg
import msgspec

from adapters.body import CONTENT, Content
from adapters.declare import declared_at
from adapters.template import NoValue, Path
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Keyed,
    LookupResult,
    NotFound,
    NotSent,
    Operation,
    Rejected,
    SendResult,
)
from coordinator.core.evidence import clean_text
from coordinator.errors import DeclarationError

Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)
CENTURY_MS = 100 * 365 * 24 * 3_600_000
FOR_EVER = Keyed(window_ms=CENTURY_MS, lookup_lag_ms=0)
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?\Z")
_STATEMENT = re.compile(r"\s*(INSERT|UPDATE|DELETE|MERGE|SELECT|WITH|CALL)\b", re.IGNORECASE)
_PASSING_CLASSES = ("08", "25", "28", "3D", "40", "53", "55", "57", "58")
"""SQLSTATE: connection, transaction state (a standby is read-only), login, database, rollback, resources, locks, operator, system."""
_DEFINITE_AT_COMMIT = ("22", "23", "25", "40", "42", "P0")
"""A COMMIT refused with one of these has rolled back: deferred constraints and triggers, serialization."""
_UNKNOWN = "40003"  # statement_completion_unknown

BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL statement_timeout = {timeout_ms};
SET LOCAL idle_in_transaction_session_timeout = {timeout_ms};
"""
"""The limits end an attempt whose client has gone, whose key would stay taken. Read committed: after waiting at the key we must
see what was committed meanwhile."""
TAKE_KEY = (
    "INSERT INTO {table} (key, payload_sha256) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING RETURNING key"
)
KNOWN_KEY = "SELECT reference, payload_sha256 FROM {table} WHERE key = $1"
KEEP_REFERENCE = "UPDATE {table} SET reference = $2 WHERE key = $1"


class _Known(NamedTuple):
    reference: str
    payload_sha256: str


class _Refused(Exception):
    """The statement can't do what it is for; the code is the first argument."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PostgresSink:
    """``parameters`` are paths for ``$1`` and on: ``payload.order.id``, ``key``, ``tenant``, ``effect``, ``decision``. They reach the
    database with their JSON types: write ``$1::text::date`` for a date, ``$1`` of type json or jsonb for an object.

    A statement that changes no row is `Rejected`, unless ``may_change_nothing``. The first column of the first row it returns
    is the effect's reference; without one it is the key. ``keys_table`` is in the same database. ``dsn`` is shown nowhere. Behind a
    pooler in transaction mode, set ``statement_cache=False``. Raises `DeclarationError`.
    """

    guarantee = FOR_EVER

    def __init__(
        self,
        name: str,
        dsn: str,
        statement: str,
        *,
        parameters: Sequence[str] = (),
        keys_table: str = "effects_done",
        may_change_nothing: bool = False,
        timeout_ms: int = 10_000,
        provider: str | None = None,
        pool_size: int = 4,
        statement_cache: bool = True,
    ) -> None:
        where, what = declared_at(), f"sink {name!r}"
        if not _STATEMENT.match(statement):
            raise DeclarationError(
                f"{what}: the statement is none of INSERT, UPDATE, DELETE, MERGE, ...", where
            )
        for number, text in enumerate(parameters, 1):
            if not re.search(rf"\${number}(?!\d)", statement):
                raise DeclarationError(f"{what}: the statement has no ${number} for {text!r}", where)
        if not _TABLE.match(keys_table):
            raise DeclarationError(f"{what}: {keys_table!r} is not a table's plain name", where)
        if not 1 <= timeout_ms <= 600_000:
            raise DeclarationError(f"{what}: timeout_ms must be within 1..600000", where)
        if not 1 <= pool_size <= 1_000:
            raise DeclarationError(f"{what}: pool_size must be within 1..1000", where)
        self.name = name
        self.provider = provider or urlsplit(dsn).netloc.rpartition("@")[2] or name
        self.timeout_ms = timeout_ms
        self._statement = statement
        self._parameters = tuple(Path(text, CONTENT, what, where) for text in parameters)
        self._begin = BEGIN.format(timeout_ms=timeout_ms)
        self._take, self._known, self._keep = (
            sql.format(table=keys_table) for sql in (TAKE_KEY, KNOWN_KEY, KEEP_REFERENCE)
        )
        self._may_change_nothing = may_change_nothing
        self._pools = _Pools(dsn, pool_size, 100 if statement_cache else 0)

    def __repr__(self) -> str:
        return f"PostgresSink({self.name!r}, provider={self.provider!r})"

    async def aclose(self) -> None:
        await self._pools.close()

    async def perform(self, operation: Operation) -> SendResult:
        """One attempt within ``timeout_ms``, waiting for a connection included."""
        attempt = _Attempt()
        try:
            content = Content(operation)
            values = [path.value(content) for path in self._parameters]
            async with asyncio.timeout(self.timeout_ms / 1000), self._pools.connection() as connection:
                return await self._in_transaction(connection, operation, values, attempt)
        except NoValue as error:
            return Rejected("no-value", clean_text(str(error)))
        except _Refused as error:
            return Rejected(error.code, str(error))
        except asyncpg.PostgresError as error:
            return _refusal(error, committing=attempt.committing)
        except (TimeoutError, OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            if attempt.committing:
                return Ambiguous("commit-unknown", _text(error))
            return NotSent("timed-out" if isinstance(error, TimeoutError) else "unreachable", _text(error))

    async def lookup(self, operation: Operation) -> LookupResult:
        """Whether this key was committed; waits for an attempt that is under way."""
        try:
            async with asyncio.timeout(self.timeout_ms / 1000), self._pools.connection() as connection:
                await connection.execute(self._begin)
                known = await self._known_or_taken(connection, operation)
                await connection.execute("ROLLBACK")
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            return Ambiguous("database-not-asked", _text(error))
        except asyncpg.InternalClientError as error:
            return Ambiguous("database-not-asked", _text(error))
        return NotFound() if known is None else Accepted(known.reference or operation.key)

    async def _in_transaction(
        self, connection: Connection, operation: Operation, values: Sequence[object], attempt: _Attempt
    ) -> SendResult:
        await connection.execute(self._begin)
        known = await self._known_or_taken(connection, operation)
        if known is not None:
            await connection.execute("ROLLBACK")
            return _known_result(known, operation)
        reference = await self._change(connection, operation, values)
        attempt.committing = True
        ended = await connection.execute("COMMIT")
        if ended != "COMMIT":
            return Rejected("rolled-back", f"the database answered COMMIT with {clean_text(ended)}")
        return Accepted(reference)

    async def _known_or_taken(self, connection: Connection, operation: Operation) -> _Known | None:
        """None: the key is ours, until this transaction ends."""
        if await connection.fetchrow(self._take, operation.key, _digest(operation)) is not None:
            return None
        row = await connection.fetchrow(self._known, operation.key)
        if row is None:  # deleted between the two statements: as good as a lost lock
            raise asyncpg.SerializationError("the key was deleted meanwhile")
        return _Known(row["reference"], row["payload_sha256"])

    async def _change(self, connection: Connection, operation: Operation, values: Sequence[object]) -> str:
        prepared = await connection.prepare(self._statement)
        if len(prepared.get_parameters()) != len(values):
            raise _Refused(
                "statement-failed", f"the statement takes {len(prepared.get_parameters())} parameters"
            )
        rows = await prepared.fetch(*values)
        count = (prepared.get_statusmsg() or "").rpartition(" ")[2]
        if count == "0" and not self._may_change_nothing:
            raise _Refused("nothing-changed", "the statement changed no row")
        first = rows[0][0] if rows and len(rows[0]) else None
        reference = operation.key if first is None else clean_text(str(first))
        await connection.execute(self._keep, operation.key, reference)
        return reference


class _Attempt:
    """``committing``: COMMIT is on its way, so that from now on an error proves nothing."""

    committing = False


class _Pools:
    """One pool for each event loop, opened on first use. An unreachable database is a failed attempt, no service that won't start."""

    def __init__(self, dsn: str, size: int, statement_cache_size: int) -> None:
        self._dsn, self._size, self._statement_cache_size = dsn, size, statement_cache_size
        self._opening: WeakKeyDictionary[
            asyncio.AbstractEventLoop, asyncio.Task[asyncpg.Pool[asyncpg.Record]]
        ] = WeakKeyDictionary()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection whose transaction has ended when it goes back. After a time-out it is closed without a word: asking the
        server to cancel means waiting for a server that does not answer."""
        loop = asyncio.get_running_loop()
        if loop not in self._opening:
            self._opening[loop] = asyncio.create_task(self._open())
        pool = await asyncio.shield(self._opening[loop])
        connection = await pool.acquire()
        try:
            yield connection
        except asyncio.CancelledError:
            connection.terminate()
            raise
        except BaseException:
            await _roll_back(connection)
            raise
        finally:
            await pool.release(connection)

    async def close(self) -> None:
        """Of the running loop. The next use opens a new one."""
        opening = self._opening.pop(asyncio.get_running_loop(), None)
        if opening is not None:
            await (await opening).close()

    async def _open(self) -> asyncpg.Pool[asyncpg.Record]:
        return await asyncpg.create_pool(
            self._dsn,
            min_size=0,
            max_size=self._size,
            statement_cache_size=self._statement_cache_size,
            init=_encode_json,
            reset=_nothing_to_reset,
            server_settings={"application_name": "decision-coordinator"},
        )


async def _encode_json(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for name in ("json", "jsonb"):
        await connection.set_type_codec(
            name, schema="pg_catalog", encoder=lambda value: msgspec.json.encode(value).decode(), decoder=str
        )


async def _nothing_to_reset(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Saves asyncpg's own reset, a round trip: the transaction has ended, and what was set was local to it."""


async def _roll_back(connection: Connection) -> None:
    """A connection that can't do it is closed, which rolls back as well."""
    try:
        await connection.execute("ROLLBACK")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
        connection.terminate()
    except asyncio.CancelledError:
        connection.terminate()
        raise


def _known_result(known: _Known, operation: Operation) -> SendResult:
    if known.payload_sha256 != _digest(operation):
        return Rejected("key-reused", "this key was used with another payload")
    return Accepted(known.reference or operation.key)


def _refusal(error: asyncpg.PostgresError, *, committing: bool) -> SendResult:
    state = error.sqlstate or "     "
    if committing and (state == _UNKNOWN or state[:2] not in _DEFINITE_AT_COMMIT):
        return Ambiguous("commit-unknown", _text(error))
    if state[:2] in _PASSING_CLASSES:
        return NotSent("database-busy", _text(error))
    return Rejected("statement-failed", _text(error))


def _digest(operation: Operation) -> str:
    return sha256(operation.payload).hexdigest()


def _text(error: BaseException) -> str:
    return clean_text(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
