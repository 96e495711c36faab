"""`worker`: a remote worker that runs a program for each task. `workers`: who is registered, and how busy."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click
from rich.text import Text

from coordinator.cli.client import Client, client_options
from coordinator.cli.say import Fault, age, cell, json_option, print_json, print_table
from coordinator.core.task import MAX_TASKS

STATUS_STYLES = {"idle": "green", "busy": "cyan", "offline": "red"}


def state_home() -> Path:
    """$XDG_STATE_HOME, or what the XDG Base Directory Specification has in its place."""
    given = os.environ.get("XDG_STATE_HOME", "")
    return Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"


@click.command()
@click.option(
    "--url",
    envvar="COORDINATOR_URL",
    default="http://127.0.0.1:8080",
    show_default=True,
    show_envvar=True,
    help="Where the service is.",
)
@click.option(
    "--key",
    envvar="COORDINATOR_KEY",
    show_envvar=True,
    required=True,
    help="An API key with the scope work. The program does not see it.",
)
@click.option("--name", help="The worker's name; the same after a restart. A new one if not given.")
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    help="A source that it works for; may be repeated. Every source if not given.",
)
@click.option("--max-tasks", default=1, show_default=True, type=click.IntRange(1, MAX_TASKS))
@click.option("--exec", "command", required=True, metavar="CMD", help="Run by sh, once for each task.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: state_home() / "coordinator" / "tasks",
    show_default="$XDG_STATE_HOME/coordinator/tasks",
    help="One log file for each task, with what it says on stderr.",
)
@click.option(
    "--kill-after",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="From SIGTERM at the deadline to SIGKILL.",
)
@click.option(
    "--drain",
    "drain_s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0, 3600),
    metavar="SECONDS",
    help="How long tasks may go on after SIGTERM.",
)
@click.option(
    "--envelope", is_flag=True, help='stdout is {"result": ..., "cost": ...}, not the result alone.'
)
def worker(
    url: str,
    key: str,
    name: str | None,
    capabilities: tuple[str, ...],
    max_tasks: int,
    command: str,
    log_dir: Path,
    kill_after: float,
    drain_s: float,
    envelope: bool,
) -> None:
    """Claim tasks and run a program for each.

    It gets the request as JSON on stdin and writes the result as JSON to stdout; each line on stderr is progress. Exit status 0:
    found, 3: there is no such thing, 75: failed, ask again; any other: failed. SIGTERM drains: no new task, then it ends.
    """
    import anyio

    from coordinator.worker import client, loop
    from coordinator.worker.program import Program
    from coordinator.worker.worker import default_name

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    program = Program(command, log_dir, kill_after, envelope)
    offer = loop.Offer(name or default_name(), sorted(set(capabilities or ["*"])), max_tasks, drain_s)

    async def serve() -> None:
        async with client.Client(url, key) as service:
            await loop.Loop(service, offer, program.run).run()

    try:
        anyio.run(serve)
    except* client.Refused as refused:
        raise Fault(str(refused.exceptions[0])) from None


@click.command()
@client_options
@json_option
def workers(client: Client, as_json: bool) -> None:
    """Remote workers, and how busy they are."""
    items = list(client.all("workers"))
    if as_json:
        print_json({"items": items, "next_cursor": None})
        return
    print_table(
        ["worker", "status", "tasks", "capabilities", "last heard of"],
        (
            (
                item["name"],
                _status(item["status"], item["draining"]),
                f"{item['capacity']['current']} of {item['capacity']['max']}",
                " ".join(item["capabilities"]),
                age(item["heartbeat_at"]),
            )
            for item in items
        ),
        empty="No worker is registered.",
    )


def _status(status: str, draining: bool) -> Text:
    shown = cell(Text(status, STATUS_STYLES[status]))
    return shown.append(", draining", "yellow") if draining else shown
