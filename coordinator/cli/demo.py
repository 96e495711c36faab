"""`demo`: everything at once, on this machine alone, and a tour of what it is for."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import click

from coordinator.cli.place import data_home
from coordinator.cli.say import Fault, console, json_option, print_json
from coordinator.demo.launch import LaunchFailed
from coordinator.demo.run import Demo, running
from coordinator.errors import CoordinatorError

EXPECTED = (CoordinatorError, LaunchFailed, OSError)
"""What the folder, the ports or the processes can do to us; anything else is a fault of ours and keeps its traceback."""


@click.command()
@click.option("--once", is_flag=True, help="End after the tour; exit code 1 if ledger and receipts disagree.")
@click.option("--no-tour", is_flag=True, help="Only serve.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: data_home() / "coordinator-demo",
    show_default="$XDG_DATA_HOME/coordinator-demo",
    help="Folder of the database, the ledger and the keys.",
)
@click.option(
    "--port", default=0, type=click.IntRange(0, 65535), help="Of the server; a free one if left out."
)
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1, 64))
@json_option
def demo(once: bool, no_tour: bool, data: Path, port: int, processes: int, as_json: bool) -> None:
    """An embedded PostgreSQL, providers and a server, and a tour of decisions; then serve until Ctrl-C."""
    if once and no_tour:
        raise click.UsageError("--once ends after the tour, --no-tour leaves it out: choose one")

    async def shown() -> bool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_signal, tasks.cancel_scope)
            if not as_json:
                click.echo(f"Starting PostgreSQL, providers and server; their data is in {data}", err=True)
            async with running(data, port=port, processes=processes) as everything:
                agreed = no_tour or await _tour(everything, as_json)
                if no_tour and as_json:
                    print_json(everything)
                elif not once:
                    _say_where(everything)
                if not once:
                    await anyio.sleep_forever()
            tasks.cancel_scope.cancel()
            return agreed
        return True

    try:
        agreed = anyio.run(shown)
    except (BaseExceptionGroup, *EXPECTED) as failed:
        error = _first(failed)
        if not isinstance(error, EXPECTED):
            raise
        raise Fault(f"{error}{_last_words(data)}") from failed
    if not agreed:
        raise click.exceptions.Exit(1)


async def _until_signal(scope: anyio.CancelScope) -> None:
    """SIGTERM and Ctrl-C end the demo, whatever it is doing."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        await anext(signals)
        scope.cancel()


async def _tour(everything: Demo, as_json: bool) -> bool:
    from coordinator.demo.tour import tour

    result = await tour(everything, console(), quiet=as_json)
    if as_json:
        print_json(result)
    return result.agrees


def _say_where(everything: Demo) -> None:
    out = console()
    out.print(f"\nServing on [bold]{everything.url}[/] · {everything.url}/schema · Ctrl-C stops")
    out.print("To look around from another terminal:", style="dim")
    out.print(f"  export COORDINATOR_URL={everything.url}")
    out.print(f"  export COORDINATOR_KEY={everything.keys['audit']}", soft_wrap=True)
    out.print("  coordinator decisions · coordinator operations · coordinator receipts")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _last_words(data: Path) -> str:
    """What the processes said last, and where the rest is."""
    said = ""
    for log in sorted(data.glob("*.log")):
        if lines := log.read_text(errors="replace").splitlines()[-5:]:
            said += f"\n\nThe end of {log}:\n" + "\n".join(lines)
    return said
