"""``coordinator drill``: the conflict and crash suite, against your own database or a running service.

Without ``--url`` it starts a provider and server processes of its own on DATABASE_URL (or an embedded PostgreSQL), in tenants of
its own, and makes them fail as it goes. With ``--url`` it drills a running service that declares the drill's types, as the demo
does, and leaves out what would need its processes. It prints lost / duplicated / unsettled, and exits with 1 on any fault.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import anyio
import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from coordinator.embedded import embedded_postgres
from coordinator.testing.audit import Verdict
from coordinator.testing.conflicts import CONFLICTS
from coordinator.testing.crashes import cases, sweep
from coordinator.testing.world import World, own_world, running_world

Scenario = Callable[[World], Awaitable[Verdict]]


@click.command()
@click.option(
    "--url", envvar="COORDINATOR_URL", help="A running service; without it the drill starts its own."
)
@click.option("--key", envvar="COORDINATOR_KEY", help="An API key with all scopes, for --url.")
@click.option("--providers-url", help="The demo providers that the running service uses, for --url.")
@click.option(
    "--sweep/--no-sweep",
    "swept",
    default=True,
    help="Whether servers are made to fail at every edge between two stages, in every way; some three minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def drill(url: str | None, key: str | None, providers_url: str | None, swept: bool, as_json: bool) -> None:
    """Run the conflict and crash suite; exit 1 on any fault."""
    if url and not (key and providers_url):
        raise click.UsageError("--url needs --key and --providers-url")
    progress = Console(stderr=True, quiet=as_json)
    with _database(url) as database_url, tempfile.TemporaryDirectory(prefix="drill-log-") as folder:
        log = Path(folder) / "servers.log"
        world = running_world(url, key or "", providers_url or "") if url else own_world(database_url, log)
        verdicts = anyio.run(_run, world, swept, progress)
    if as_json:
        click.echo(msgspec.json.encode([{**msgspec.to_builtins(v), "ok": v.ok} for v in verdicts]))
    else:
        _print(verdicts)
    sys.exit(0 if all(verdict.ok for verdict in verdicts) else 1)


@contextmanager
def _database(url: str | None) -> Iterator[str]:
    if url or os.environ.get("DATABASE_URL"):
        yield os.environ.get("DATABASE_URL", "")
        return
    with (
        tempfile.TemporaryDirectory(prefix="drill-db-") as folder,
        embedded_postgres(Path(folder) / "data") as postgres,
    ):
        yield postgres.url


async def _run(world: AbstractAsyncContextManager[World], swept: bool, progress: Console) -> list[Verdict]:
    verdicts = []
    async with world as entered:
        for scenario in CONFLICTS:
            verdicts.append(await _judged(scenario, entered))
            _show(verdicts[-1:], progress)
        if swept:
            progress.print("the crash sweep; it takes some minutes", style="dim")
            verdicts += await _swept(entered)
            _show(verdicts[len(CONFLICTS) :], progress)
    return verdicts


async def _swept(world: World) -> list[Verdict]:
    if world.database_url:
        return await sweep(world, cases())
    return [Verdict(scenario="crash sweep", invariants="", skipped="needs server processes of its own")]


def _show(verdicts: list[Verdict], progress: Console) -> None:
    for verdict in verdicts:
        progress.print(f"{_mark(verdict)} {verdict.scenario}", highlight=False)


async def _judged(scenario: Scenario, world: World) -> Verdict:
    """A scenario that cannot be carried out is a fault too, and the others still run."""
    try:
        return await scenario(world)
    except AssertionError as error:
        name = getattr(scenario, "__name__", None) or str(scenario)
        return Verdict(scenario=name, invariants="", wrong=[str(error)])


def _mark(verdict: Verdict) -> str:
    return (
        "[yellow]left out[/]"
        if verdict.skipped
        else "[green]held    [/]"
        if verdict.ok
        else "[red]FAULT   [/]"
    )


def _print(verdicts: list[Verdict]) -> None:
    table = Table("scenario", "lost", "duplicated", "unsettled", "verdict", box=box.SIMPLE)
    for verdict in verdicts:
        why = verdict.skipped or "; ".join(verdict.wrong or ([] if verdict.ok else verdict.notes))
        counts = (str(verdict.lost), str(verdict.duplicated), str(verdict.unsettled))
        table.add_row(verdict.scenario, *counts, f"{_mark(verdict).strip()} {why}")
    faults = sum(not verdict.ok for verdict in verdicts)
    Console().print(table)
    Console().print(f"{len(verdicts)} scenarios, {faults} with faults", style="red" if faults else "green")


if __name__ == "__main__":
    drill()
