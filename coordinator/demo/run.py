"""The demo as one thing: an embedded PostgreSQL, the providers and the server, each a process, and the keys to talk to them.

    at once        PostgreSQL starts (a thread of ours owns it) · the providers start, on a port chosen beforehand
    then           the schema and the keys, as soon as PostgreSQL accepts connections · the server
    in the end     server, providers, PostgreSQL: each gets the time to finish before what it depends on goes

Whatever ends this process, its children end too: the kernel tells them. The folder keeps the database, the ledger and the keys, so
that a second start finds everything as it was left; the keys are as secret as the folder.

    DATA/postgres/   see `coordinator.embedded`        DATA/keys.json       scope -> key, mode 0600
    DATA/providers/  the ledger                        DATA/*.log           what the processes say
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import asyncpg
import msgspec
from anyio.to_thread import run_sync
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.demo.launch import LaunchFailed, Process, Providers, package_environment, python_module
from coordinator.embedded import EmbeddedPostgres
from coordinator.embedded.address import free_port
from coordinator.store import keys
from coordinator.store.database import open_database
from coordinator.store.migrate import migrate

DECISIONS = "coordinator.demo.proposal:coordinator"
TENANT = "demo"


class Pids(msgspec.Struct, frozen=True, kw_only=True):
    """``server`` is the supervisor when there are several server processes."""

    server: int
    providers: int
    postgres: int


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is. ``keys`` has one key for each scope."""

    url: str
    providers_url: str
    database_url: str
    keys: dict[str, str]
    pids: Pids


@asynccontextmanager
async def running(data: Path, *, port: int = 0, processes: int = 1) -> AsyncIterator[Demo]:
    """The demo, for as long as the block lasts. Run it in the main thread: children are tied to the thread that starts them.

    Raises `EmbeddedPostgresError` when another process has the folder, `LaunchFailed` when a process did not start.
    """
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    postgres = EmbeddedPostgres(data / "postgres")
    providers = Providers(data / "providers", port=free_port(), log=data / "providers.log")
    children: list[Process] = [providers]
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(providers.start_async)
            await run_sync(postgres.start)
            await migrate(postgres.url)
            server = _server(postgres.url, f"http://127.0.0.1:{providers.port}", data, port, processes)
            children.insert(0, server)
            tasks.start_soon(server.start_async)
            made = await load_or_make_keys(postgres.url, data / "keys.json")
        yield Demo(
            url=str(server.ready["url"]),
            providers_url=providers.url,
            database_url=postgres.url,
            keys=made,
            pids=Pids(server=server.pid, providers=providers.pid, postgres=postgres.pid),
        )
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(children, postgres)


async def _stop(children: Sequence[Process], postgres: EmbeddedPostgres) -> None:
    for child in children:
        with suppress(LaunchFailed):  # it was never started
            await child.stop_async()
    await run_sync(postgres.stop)


def _server(database_url: str, providers_url: str, data: Path, port: int, processes: int) -> Process:
    return Process(
        python_module(
            "coordinator.cli",
            *("serve", DECISIONS, "--json", "--port", str(port), "--processes", str(processes)),
            *("--die-with-parent", str(os.getpid())),
        ),
        env={
            **package_environment(),
            "DATABASE_URL": database_url,
            "COORDINATOR_PROVIDERS_URL": providers_url,
        },
        log=data / "server.log",
    )


async def load_or_make_keys(url: str, path: Path) -> dict[str, str]:
    """One key for each scope, the same at every start. A file that does not belong to this database is replaced."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        kept = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        if set(kept) == set(keys.SCOPES) and await _all_valid(url, kept):
            return kept
    made = await _make_keys(url)
    partial = path.with_suffix(".new")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(made))
    partial.rename(path)
    return made


async def _all_valid(url: str, kept: dict[str, str]) -> bool:
    async with open_database(url, Settings(pool_size=1)) as database:
        for token in kept.values():
            tenant = keys.tenant_of(token)
            if tenant is None:
                return False
            async with database.transaction(tenant) as connection:
                if await keys.find_key(connection, tenant, token) is None:
                    return False
    return True


async def _make_keys(url: str) -> dict[str, str]:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        tenant = await keys.tenant_named(connection, TENANT, uuid7())
    finally:
        await connection.close()
    async with (
        open_database(url, Settings(pool_size=1)) as database,
        database.transaction(tenant) as inside,
    ):
        return {
            scope: await keys.create_key(inside, tenant, uuid7(), f"demo {scope}", [scope])
            for scope in keys.SCOPES
        }
