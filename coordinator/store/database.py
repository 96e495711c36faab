"""The database as the store's functions use it: one pool, and transactions that touch one tenant.

A transaction assumes the role `coordinator_app` and names its tenant with SET LOCAL, so that row-level security holds whoever the
login is, and nothing outlives COMMIT: it works through a pooler in transaction mode. COMMIT is shielded from cancellation. If an
error comes while COMMIT is under way, nobody knows whether it happened: that is `CommitUnknown`, and the caller has to read back
what it wrote, by key, before it does anything else.

A process that falls silent inside a transaction (stopped, or its host is) keeps its locks, and with the log's row those of its whole
tenant. It loses the transaction after two leases: the database ends the connection, and nothing was done.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from uuid import UUID

import anyio
import asyncpg
import tenacity

from coordinator.config import Settings
from coordinator.errors import CommitUnknown, Overloaded, StoreError

T = TypeVar("T")
Connection = asyncpg.pool.PoolConnectionProxy

NIL_TENANT = UUID(int=0)
"""Whose rows are the service's own: every key begins with a tenant, and these belong to none."""
CONFLICTS = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
UNREACHABLE = (
    OSError,
    ssl.SSLError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    TimeoutError,
)


NIL_TENANT = UUID(int=0)
"""Rows of the service itself (processes, shares of pools) belong to this tenant, so that every key begins with a tenant and every
transaction touches one."""

PLANNED_ONCE = "; SET LOCAL plan_cache_mode = force_generic_plan"
"""The statements that write have one good plan whatever their arrays hold; planning them anew costs more than running them."""


class Database:
    """A pool of connections to one database. Use `open_database`."""

    def __init__(self, pool: asyncpg.Pool, settings: Settings) -> None:
        self.pool = pool
        self.settings = settings
        self._let_go = f"SET LOCAL idle_in_transaction_session_timeout = {2 * settings.lease_ms}"

    @asynccontextmanager
    async def transaction(self, tenant: UUID, *, also: str = "") -> AsyncIterator[Connection]:
        """One transaction of one tenant, committed when the block ends; ``also`` is set for it, too. Raises `Overloaded` if the
        database cannot be reached or goes away before COMMIT, so that nothing was done; `CommitUnknown` if the connection failed
        during COMMIT."""
        async with self._begin(
            f"SET LOCAL ROLE coordinator_app; SET LOCAL coordinator.tenant = '{tenant}'{also}"
        ) as connection:
            yield connection

    @asynccontextmanager
    async def dispatch_view(self) -> AsyncIterator[Connection]:
        """A transaction that sees of every tenant only whether it has work that nobody holds."""
        async with self._begin("SET LOCAL ROLE coordinator_dispatch") as connection:
            yield connection

    @asynccontextmanager
    async def _begin(self, local: str) -> AsyncIterator[Connection]:
        connection = await self._acquire()
        clean = False
        try:
            try:
                await connection.execute(f"BEGIN; {self._let_go}; {local}")
                yield connection
            except BaseException as error:
                clean = await _roll_back(connection)
                if isinstance(error, TimeoutError) or (not clean and isinstance(error, UNREACHABLE)):
                    raise Overloaded(
                        f"the database went away; nothing was done: {type(error).__name__}",
                        retry_after_ms=1000,
                    ) from error
                raise
            await completed(_commit(connection))
            clean = True
        finally:
            if not clean:
                _drop(connection)
            await completed(self.pool.release(connection))

    async def _acquire(self) -> Connection:
        try:
            return await self.pool.acquire(timeout=self.settings.command_timeout_s)
        except UNREACHABLE as error:
            raise Overloaded(
                f"the database cannot be reached: {type(error).__name__}", retry_after_ms=1000
            ) from error

    async def run(self, tenant: UUID, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run ``work`` in a transaction of the tenant; a serialization failure or a deadlock repeats the whole of it, four
        times at most."""
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(CONFLICTS),
            stop=tenacity.stop_after_attempt(5),
            wait=tenacity.wait_random_exponential(multiplier=0.005, max=0.1),
            reraise=True,
        ):
            with attempt:
                async with self.transaction(tenant, also=PLANNED_ONCE) as connection:
                    return await work(connection)
        raise AssertionError("tenacity ends with a result or raises")


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    A cancel scope's shield keeps out the cancellations of scopes, the loop those of tasks (``Task.cancel``)."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def _commit(connection: Connection) -> None:
    try:
        if await connection.execute("COMMIT") != "COMMIT":
            raise StoreError(
                "a transaction that had failed was rolled back by its COMMIT: an error inside it was swallowed"
            )
    except CONFLICTS:
        raise
    except (*UNREACHABLE, asyncio.CancelledError) as error:
        raise CommitUnknown(f"the connection failed during COMMIT: {type(error).__name__}") from error


async def _roll_back(connection: Connection) -> bool:
    """Whether the connection is usable afterwards."""
    try:
        if connection.is_closed():
            return False
        await completed(connection.execute("ROLLBACK"))
    except (*UNREACHABLE, asyncpg.PostgresError):
        return False
    return True


def _drop(connection: Connection) -> None:
    """A connection that broke has left its proxy already, which then answers everything with `InterfaceError`."""
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def _nothing_to_reset(_: Any) -> None:
    """No transaction leaves anything behind in its session, so the pool's own reset would be a wasted round trip."""


async def _json_is_bytes(connection: asyncpg.Connection) -> None:
    await connection.set_type_codec(
        "json", schema="pg_catalog", encoder=bytes, decoder=bytes, format="binary"
    )


@asynccontextmanager
async def open_database(url: str, settings: Settings) -> AsyncIterator[Database]:
    """Connect; ``json`` values travel as the bytes they are."""
    async with asyncpg.create_pool(
        url,
        min_size=1,
        max_size=settings.pool_size,
        statement_cache_size=settings.statement_cache_size,
        command_timeout=settings.command_timeout_s,
        init=_json_is_bytes,
        reset=_nothing_to_reset,
        server_settings={"application_name": "coordinator"},
    ) as pool:
        yield Database(pool, settings)


def transposed(rows: Sequence[Sequence[object]], width: int) -> list[list[object]]:
    """Rows as the columns that ``unnest`` takes."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
