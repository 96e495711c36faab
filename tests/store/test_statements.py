"""Every SQL statement of the store is one that PostgreSQL accepts against schema.sql, in every supported version."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from coordinator import store
from coordinator.embedded import embedded_postgres
from coordinator.store.migrate import migrate
from tests.support.postgres import Databases, data_folder

OLDEST = Path("/usr/lib/postgresql/15/bin")
VERBS = ("SELECT", "INSERT", "UPDATE", "WITH")
MIGRATING = "coordinator.store.migrate"
"""Its statements are about tables that it makes itself."""


def statements() -> Iterator[tuple[str, str]]:
    for module in pkgutil.iter_modules(store.__path__, "coordinator.store."):
        if module.name == MIGRATING or module.ispkg:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if (
                name.isupper()
                and not name.startswith("_")
                and isinstance(value, str)
                and value.strip().startswith(VERBS)
            ):
                yield f"{module.name.rpartition('.')[2]}.{name}", value


STATEMENTS = dict(statements())


@pytest.fixture(scope="module", params=["default", "15"])
def server_url(request: pytest.FixtureRequest, postgres: Databases) -> Iterator[str]:
    if request.param == "default":
        url = postgres.create()
        yield url
        postgres.drop(url)
        return
    if not OLDEST.exists():
        pytest.skip("PostgreSQL 15 is not installed here")
    with pytest.MonkeyPatch.context() as environment, data_folder() as folder:
        environment.setenv("COORDINATOR_PG_BIN", str(OLDEST))
        with embedded_postgres(folder, durable=False) as server:
            assert server.psql("SHOW server_version").strip().startswith("15.")
            yield server.url


@pytest.fixture(scope="module")
async def connection(server_url: str) -> AsyncIterator[asyncpg.Connection]:
    await migrate(server_url)
    opened = await asyncpg.connect(server_url)
    yield opened
    await opened.close()


def test_the_statements_are_found_by_their_names() -> None:
    assert {
        "admit.ADMIT",
        "commit.WRITE",
        "settle.SETTLE",
        "lease.CLAIM_OPERATIONS",
        "log.APPEND",
    } <= STATEMENTS.keys()


@pytest.mark.parametrize("name", STATEMENTS)
async def test_a_statement_prepares_against_the_schema(name: str, connection: asyncpg.Connection) -> None:
    await connection.prepare(STATEMENTS[name])
