"""The processes of a run: PostgreSQL, the demo providers, a server when asked for. Durable: fsync is on.

The providers' ledger is not synced: they stand for a service outside, whose disk is not ours to measure.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.demo.launch import Process, Providers, package_environment, python_module
from coordinator.embedded import EmbeddedPostgres, embedded_postgres
from coordinator.store.database import open_database
from coordinator.store.keys import create_key, tenant_named
from coordinator.store.migrate import migrate
from loadtests import serve


@dataclass(frozen=True)
class World:
    """What every case needs. ``database`` is the name of the service's database."""

    postgres: EmbeddedPostgres
    providers: Providers
    folder: Path
    tenant: str
    key: str
    database: str = "coordinator"

    def sql(self, query: str) -> str:
        """As the superuser, whom row-level security does not bind; rows unaligned."""
        return self.postgres.psql(query, database=self.database)

    def number(self, query: str) -> int:
        return int(self.sql(query))

    @contextmanager
    def server(self, processes: int) -> Iterator[Process]:
        env = {serve.DATABASE: self.postgres.url, serve.PROVIDERS: self.providers.url}
        with Process(
            python_module("loadtests.serve", str(processes)),
            env={**package_environment(), **env},
            log=self.folder / "server.log",
        ) as server:
            yield server

    def control(self, faults: dict[str, Any]) -> None:
        """Set the providers' faults; ``{}`` clears them."""
        request = urllib.request.Request(
            f"{self.providers.url}/control", data=msgspec.json.encode(faults), method="PUT"
        )
        with urllib.request.urlopen(request, timeout=10):
            pass


@contextmanager
def world(folder: Path) -> Iterator[World]:
    with (
        embedded_postgres(folder / "postgres") as postgres,
        Providers(folder / "providers", log=folder / "providers.log") as providers,
    ):
        tenant, key = asyncio.run(_prepare(postgres.url))
        yield World(postgres, providers, folder, tenant, key)


async def _prepare(url: str) -> tuple[str, str]:
    """The schema, a tenant and a key that may decide."""
    await migrate(url)
    connection = await asyncpg.connect(url)
    tenant = await tenant_named(connection, "load", uuid7())
    await connection.close()
    async with open_database(url, Settings()) as database, database.transaction(tenant) as inside:
        key = await create_key(inside, tenant, uuid7(), "load", ["decide", "audit", "operate"])
    return str(tenant), key


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        body: bytes = response.read()
        return body
