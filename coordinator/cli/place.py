"""Where the database is: the one that DATABASE_URL names, else the embedded one in the data folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import click

from coordinator.cli.say import Fault
from coordinator.embedded import EmbeddedPostgresError, embedded_postgres, running_url

UNREACHABLE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError)


def data_home() -> Path:
    """$XDG_DATA_HOME, or what the XDG Base Directory Specification has in its place."""
    given = os.environ.get("XDG_DATA_HOME", "")
    return Path(given) if os.path.isabs(given) else Path.home() / ".local" / "share"


def default_data() -> Path:
    return data_home() / "coordinator"


database_option = click.option(
    "--database-url",
    envvar="DATABASE_URL",
    show_envvar=True,
    metavar="URL",
    help="postgresql://... Without it, the embedded PostgreSQL in the data folder.",
)
data_option = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_data,
    show_default="$XDG_DATA_HOME/coordinator",
    help="Folder of the embedded PostgreSQL.",
)


@contextmanager
def database(url: str | None, data: Path) -> Iterator[str]:
    """The URL to use inside the block. An embedded server that runs is used as it is; one that does not is started meanwhile."""
    running = url or running_url(data)
    if running is not None:
        yield running
        return
    if not (data / "cluster").exists():
        raise Fault(
            f"There is no database: {data} holds none and DATABASE_URL is unset. "
            "Start one with `coordinator serve MODULE:NAME`, or pass --database-url or --data."
        )
    with embedded(data) as started:
        yield started


@contextmanager
def embedded(data: Path) -> Iterator[str]:
    """The embedded server, running for the length of the block."""
    try:
        with embedded_postgres(data) as server:
            yield server.url
    except EmbeddedPostgresError as error:
        raise Fault(str(error)) from error


def unreachable(error: BaseException) -> Fault:
    """Without the URL, which may hold a password."""
    return Fault(
        f"The database cannot be used: {type(error).__name__}: {error}\nCheck DATABASE_URL, and that the server runs."
    )
