"""Evidence from one row of a PostgreSQL database of yours, read in a read-only transaction.

The query selects the fields of the declared struct, and the column that tells one version of the row from the next: ``xmin`` by
default, which PostgreSQL changes with every update (``SELECT site, available_hours, xmin FROM capacity WHERE site = $1``).
A revision column that isn't a field of the struct is left out of the value. No row is Absent; two rows are a Failed reading,
never a choice between them.

One pool per event loop, DSN and settings, opened on first use. Behind a pooler in transaction mode, set
``statement_cache=False``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import asyncpg
import msgspec

from adapters.declare import declared_at
from adapters.row import JSON_TYPES, JsonText, UnusableRow, as_json
from adapters.template import REQUEST, NoValue, Path
from coordinator.core.canonical import InvalidJson, canonical, digest
from coordinator.core.evidence import (
    Absent,
    Answer,
    Failed,
    Found,
    ReadRequest,
    Unchanged,
    clean_text,
    is_struct,
)
from coordinator.errors import DeclarationError

T = TypeVar("T")

_UNREACHABLE = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
)
_PASSING = (asyncpg.TransactionRollbackError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError)


CANCEL_PATIENCE_S = 0.2


class PoolKey(NamedTuple):
    dsn: str
    size: int
    statement_cache: bool


class _Pools:
    """The pools of one event loop; the lock is held while one of them opens."""

    def __init__(self) -> None:
        self.opening = asyncio.Lock()
        self.by_key: dict[PoolKey, asyncpg.Pool[asyncpg.Record]] = {}


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pools] = WeakKeyDictionary()


class PostgresSource(Generic[T]):
    """``parameters`` are paths into the request, for ``$1`` and on, passed with the types they have.

    ``revision`` names a column, or is None for the digest of the value. ``dsn`` is shown nowhere. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        dsn: str,
        query: str,
        *,
        returns: type[T],
        parameters: Sequence[str] = ("input.site",),
        revision: str | None = "xmin",
        provider: str | None = None,
        pool_size: int = 4,
        statement_cache: bool = True,
    ) -> None:
        where, what = declared_at(), f"source {name!r}"
        if not is_struct(returns):
            raise DeclarationError(f"{what} returns {returns!r}; it must be a msgspec.Struct", where)
        if not 1 <= pool_size <= 1_000:
            raise DeclarationError(f"{what}: pool_size must be within 1..1000", where)
        if revision is not None and revision not in query:
            raise DeclarationError(
                f"{what}: the query does not select its revision column {revision!r}", where
            )
        for number in range(1, len(parameters) + 1):
            if f"${number}" not in query:
                raise DeclarationError(
                    f"{what}: the query has no ${number} for {parameters[number - 1]!r}", where
                )
        self.name = name
        self.provider = provider or urlsplit(dsn).netloc.rpartition("@")[2] or name
        self.returns = returns
        self._key = PoolKey(dsn, pool_size, statement_cache)
        self._query = query
        self._parameters = tuple(Path(text, REQUEST, what, where) for text in parameters)
        self._revision = revision
        self._fields: Sequence[str] = getattr(returns, "__struct_encode_fields__", ())

    @property
    def asks_for(self) -> tuple[str, ...]:
        return tuple(path.text for path in self._parameters)

    def __repr__(self) -> str:
        return f"PostgresSource({self.name!r}, provider={self.provider!r})"

    async def aclose(self) -> None:
        await close_pools()

    async def read(self, request: ReadRequest) -> Answer[T]:
        """One read within ``request.timeout_s``, waiting for a connection included. Cancelling it cancels the query."""
        try:
            values = [path.value(request) for path in self._parameters]
            async with asyncio.timeout(request.timeout_s):
                rows = await self._rows(values)
        except NoValue as error:
            return Failed("no-address", clean_text(str(error)))
        except TimeoutError:
            return Failed("timed-out", f"no answer within {request.timeout_s:.3f} s")
        except _UNREACHABLE as error:
            return Failed("unreachable", _text(error), retryable=True)
        except (asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            if isinstance(error, ValueError):
                return Failed("query-failed", _text(error))
            return Failed("unreachable", _text(error), retryable=True)
        except asyncpg.PostgresError as error:
            return Failed("query-failed", _text(error), retryable=isinstance(error, _PASSING))
        if not rows:
            return Absent()
        if len(rows) > 1:
            return Failed("ambiguous-row", "the query found more than one row")
        return self._answer(rows[0], request.if_revision)

    async def _rows(self, values: Sequence[object]) -> list[asyncpg.Record]:
        """At most two rows, however many there are. Cancelling asks the server to cancel, and asyncpg waits until it has; a server
        that has fallen silent would keep us for ever, so that after a while its connection is closed without a word."""
        pool = await _pool(self._key)
        connection = await pool.acquire()
        fetching = asyncio.create_task(self._fetch(pool, connection, values))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.cancel()
            await asyncio.wait({fetching}, timeout=CANCEL_PATIENCE_S)
            if not fetching.done():
                connection.terminate()
            await asyncio.gather(fetching, return_exceptions=True)
            raise

    async def _fetch(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record],
        values: Sequence[object],
    ) -> list[asyncpg.Record]:
        try:
            async with connection.transaction(readonly=True):
                cursor = await connection.cursor(self._query, *values)
                return await cursor.fetch(2)
        finally:
            await pool.release(connection)

    def _answer(self, row: asyncpg.Record, if_revision: str | None) -> Answer[T]:
        columns = dict(row.items())
        try:
            revision = self._revision_of(columns)
            if revision is not None and revision == if_revision:
                return Unchanged()
            value = msgspec.convert(
                {name: as_json(item, name) for name, item in columns.items()}, self.returns
            )
            return Found(value, revision or digest(canonical(value)))
        except (UnusableRow, InvalidJson, msgspec.ValidationError) as error:
            return Failed("malformed-row", clean_text(str(error)))

    def _revision_of(self, columns: dict[str, object]) -> str | None:
        if self._revision is None:
            return None
        if columns.get(self._revision) is None:
            raise UnusableRow(f"the revision column {self._revision!r} is missing or NULL")
        revision = as_json(columns[self._revision], self._revision)
        if self._revision not in self._fields:
            del columns[self._revision]
        return clean_text(revision if isinstance(revision, str) else canonical(revision).decode())


async def close_pools() -> None:
    """Close the running loop's pools, waiting for the reads under way. The next use opens new ones."""
    mine = _pools.pop(asyncio.get_running_loop(), None)
    for pool in mine.by_key.values() if mine else ():
        await pool.close()


async def _pool(key: PoolKey) -> asyncpg.Pool[asyncpg.Record]:
    loop = asyncio.get_running_loop()
    mine = _pools.get(loop)
    if mine is None:
        mine = _pools[loop] = _Pools()
    if (ready := mine.by_key.get(key)) is not None:
        return ready
    async with mine.opening:
        if key not in mine.by_key:
            mine.by_key[key] = await _open(key)
        return mine.by_key[key]


async def _open(key: PoolKey) -> asyncpg.Pool[asyncpg.Record]:
    """Connections are made when needed: an unreachable database is a failed reading, not a process that won't start."""
    return await asyncpg.create_pool(
        key.dsn,
        min_size=0,
        max_size=key.size,
        statement_cache_size=100 if key.statement_cache else 0,
        init=_keep_json_as_text,
        reset=_nothing_to_reset,
        server_settings={"application_name": "decision-coordinator"},
    )


async def _keep_json_as_text(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for name in JSON_TYPES:
        await connection.set_type_codec(name, schema="pg_catalog", encoder=str, decoder=JsonText)


async def _nothing_to_reset(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Saves asyncpg's own reset, a round trip: a read-only transaction leaves nothing behind."""


def _text(error: BaseException) -> str:
    return clean_text(f"{type(error).__name__}: {error}")
