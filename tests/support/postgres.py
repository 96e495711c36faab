"""The PostgreSQL server that tests run on, and a fresh database of it for each test.

TEST_POSTGRES chooses the server: `embedded` (the default: one cluster of our own for each xdist worker, fsync off),
`container` (testcontainers, image TEST_POSTGRES_IMAGE) or `url` (TEST_DATABASE_URL, whose user must be a superuser). Every
database belongs to the role `coordinator`, which is no superuser, and is a copy of a template that was migrated once.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from coordinator.embedded import embedded_postgres
from coordinator.store.migrate import migrate

TEST_PASSWORD = "coordinator-test"
CREATE_ROLE = f"""
SELECT pg_advisory_lock(hashtext('coordinator tests'));
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'coordinator') THEN CREATE ROLE coordinator; END IF;
END $$;
ALTER ROLE coordinator LOGIN NOSUPERUSER CREATEROLE PASSWORD '{TEST_PASSWORD}';
"""
"""Under a lock, because several workers may share one server."""


class Databases:
    """Makes and drops databases of one server. Each is a migrated copy unless `empty`."""

    def __init__(self, superuser_url: str, owner_url: str) -> None:
        self.superuser_url = superuser_url
        self._owner_url = owner_url
        self._template = ""

    def create(self, *, empty: bool = False) -> str:
        """Returns the URL of a fresh database, for the role `coordinator`."""
        name = f"test_{secrets.token_hex(6)}"
        if empty:
            self.administer(f"CREATE DATABASE {name} OWNER coordinator")
        else:
            self._template = self._template or self._make_template()
            self.administer(f"CREATE DATABASE {name} OWNER coordinator TEMPLATE {self._template}")
        return with_database(self._owner_url, name)

    def drop(self, url: str) -> None:
        """Ends what is connected, too."""
        self.administer(f"DROP DATABASE IF EXISTS {urlsplit(url).path[1:]} WITH (FORCE)")

    def close(self) -> None:
        if self._template:
            self.administer(f"DROP DATABASE IF EXISTS {self._template} WITH (FORCE)")

    def _make_template(self) -> str:
        url = self.create(empty=True)
        asyncio.run(migrate(url))
        return urlsplit(url).path[1:]

    def administer(self, sql: str) -> None:
        asyncio.run(execute(self.superuser_url, sql))


async def execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@contextmanager
def databases() -> Iterator[Databases]:
    """The server that TEST_POSTGRES chooses."""
    choice = os.environ.get("TEST_POSTGRES", "embedded")
    servers = {"embedded": embedded_databases, "container": _container_databases, "url": _given_databases}
    if choice not in servers:
        raise ValueError(f"TEST_POSTGRES is {choice!r}; it may be {', '.join(servers)}")
    with servers[choice]() as made:
        yield made
        made.close()


@contextmanager
def embedded_databases(*, durable: bool = False) -> Iterator[Databases]:
    """A cluster of our own, in a folder right below the temporary folder: it may belong to another user than ours."""
    with data_folder() as folder, embedded_postgres(folder, durable=durable) as server:
        yield Databases(server.superuser_url, server.url)


@contextmanager
def data_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="coordinator-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _container_databases() -> Iterator[Databases]:
    from testcontainers.community.postgres import PostgresContainer

    image = os.environ.get("TEST_POSTGRES_IMAGE", "postgres:18-local")
    with PostgresContainer(
        image, username="postgres", password=TEST_PASSWORD, dbname="postgres", driver=None
    ) as server:
        yield _on_server(server.get_connection_url())


@contextmanager
def _given_databases() -> Iterator[Databases]:
    yield _on_server(os.environ["TEST_DATABASE_URL"])


def _on_server(superuser_url: str) -> Databases:
    asyncio.run(execute(superuser_url, CREATE_ROLE))
    place = urlsplit(superuser_url)
    address = f"coordinator:{TEST_PASSWORD}@{place.hostname}:{place.port or 5432}"
    return Databases(superuser_url, urlunsplit(place._replace(netloc=address)))
