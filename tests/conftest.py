"""Fixtures for every test: a PostgreSQL server for the whole run (one for each xdist worker), a fresh database for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.embedded import EmbeddedPostgres, embedded_postgres
from tests.support.postgres import Databases, data_folder, databases, embedded_databases


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncpg and aiohttp need asyncio; session-wide, so that fixtures of any scope may be coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """The server chosen by TEST_POSTGRES; fast, and not crash-safe when it is our own."""
    with databases() as made:
        yield made


@pytest.fixture
def database_url(postgres: Databases) -> Iterator[str]:
    """A fresh, migrated database that belongs to the role `coordinator`."""
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest.fixture
def empty_database_url(postgres: Databases) -> Iterator[str]:
    """A fresh database without any table."""
    url = postgres.create(empty=True)
    yield url
    postgres.drop(url)


@pytest.fixture(scope="session")
def durable_postgres() -> Iterator[Databases]:
    """A server of our own with fsync on."""
    with embedded_databases(durable=True) as made:
        yield made


@pytest.fixture
def durable_database_url(durable_postgres: Databases) -> Iterator[str]:
    """Like `database_url`, with fsync on: what is acknowledged is on disk."""
    url = durable_postgres.create()
    yield url
    durable_postgres.drop(url)


@pytest.fixture
def crashable_postgres() -> Iterator[EmbeddedPostgres]:
    """A server with fsync on for one test alone, to be killed; its database is empty, so migrate its `url` first."""
    with data_folder() as folder, embedded_postgres(folder, durable=True) as server:
        yield server
