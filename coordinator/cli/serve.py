"""`serve`: the service, with a database of its own if none is named.

An embedded database is migrated when the service starts, and at its very first start gets a tenant with one key. A database that
DATABASE_URL names belongs to somebody: nothing is changed in it, and an outdated schema is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import click
import msgspec
from rich.console import Console

from coordinator.cli.module import load
from coordinator.cli.place import UNREACHABLE, data_option, database_option, embedded, unreachable
from coordinator.cli.say import Fault, json_option, print_json
from coordinator.config import settings_from_env
from coordinator.errors import CoordinatorError
from coordinator.store import keys
from coordinator.store import migrate as migrations

FIRST_TENANT = "default"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints once connections are accepted. ``data`` is the embedded database's folder, if it is embedded."""

    url: str
    pid: int
    data: str | None


@click.command()
@click.argument("path", metavar="MODULE:NAME")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one."
)
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1, 64))
@database_option
@data_option
@json_option
@click.option("--die-with-parent", type=int, metavar="PID", hidden=True)
def serve(
    path: str,
    host: str,
    port: int,
    processes: int,
    database_url: str | None,
    data: Path,
    as_json: bool,
    die_with_parent: int | None,
) -> None:
    """Serve the Coordinator at MODULE:NAME until SIGTERM or Ctrl-C, then finish what runs and stop."""
    from coordinator import app  # imports the web framework: a second that `--help` need not wait

    if die_with_parent is not None:
        from coordinator.demo import launch

        launch.die_with_parent(die_with_parent)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def ready(address: str) -> None:
        if as_json:
            print_json(Ready(url=address, pid=os.getpid(), data=None if database_url else str(data)))
        else:
            _say_ready(address)

    with ExitStack() as stack:
        try:
            settings = settings_from_env()
            load(path)
            if database_url is None:
                url = stack.enter_context(embedded(data))
                prepare_embedded(url, data, quiet=as_json)
            else:
                url = database_url
                check_schema(url)
            app.serve(
                path, url=url, settings=settings, host=host, port=port, processes=processes, on_ready=ready
            )
        except CoordinatorError as error:
            raise Fault(str(error)) from error
        except UNREACHABLE as error:
            raise _cannot_serve(error, host, port) from error


def prepare_embedded(url: str, data: Path, *, quiet: bool) -> None:
    """Migrate; at the very first start make a tenant and print the one key that begins everything."""
    report = asyncio.run(migrations.migrate(url))
    if not quiet:
        click.echo(f"Database: embedded PostgreSQL in {data}", err=True)
    if not report.created:
        return
    from coordinator.cli.database import create_key

    made = asyncio.run(create_key(url, FIRST_TENANT, "first", list(keys.SCOPES)))
    click.echo(f"First start: tenant {FIRST_TENANT!r}; its key, shown this once:\n{made.key}", err=True)


def check_schema(url: str) -> None:
    """Raises `Fault` unless the database has all that this program needs."""

    async def pending() -> tuple[str, ...]:
        connection = await asyncpg.connect(url, statement_cache_size=0)
        try:
            return await migrations.pending(connection)
        finally:
            await connection.close()

    if missing := asyncio.run(pending()):
        raise Fault(f"The database lacks {', '.join(missing)}; run: coordinator migrate")


def _cannot_serve(error: BaseException, host: str, port: int) -> Fault:
    if isinstance(error, OSError) and error.errno in (98, 13, 99, 48):
        return Fault(
            f"Cannot listen on {host} port {port}: {error.strerror}. Choose another --port or --host."
        )
    return unreachable(error)


def _say_ready(address: str) -> None:
    out = Console(file=sys.stderr, highlight=False)
    out.print(f"Serving on [bold]{address}[/] · try {address}/schema · Ctrl-C stops")
