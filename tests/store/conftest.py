"""A database of the test's own with two tenants, as the service opens it and as a superuser sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest

from coordinator.config import Settings
from coordinator.store.database import Database, open_database
from tests.store.given import new_tenant
from tests.support.postgres import Databases, with_database


@pytest.fixture
def root_url(postgres: Databases, database_url: str) -> str:
    """The test's database for a superuser, whom no row-level security holds back."""
    return with_database(postgres.superuser_url, urlsplit(database_url).path[1:])


@pytest.fixture
async def root(root_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(root_url)
    yield connection
    await connection.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url, Settings(pool_size=5)) as opened:
        yield opened


@pytest.fixture
async def tenant(database_url: str) -> UUID:
    return await new_tenant(database_url, "one")


@pytest.fixture
async def stranger(database_url: str) -> UUID:
    """Another tenant of the same database."""
    return await new_tenant(database_url, "two")
