"""`queues`: what waits and runs, by class; once, or kept up to date on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.cli.client import Client, client_options
from coordinator.cli.say import cell, json_option
from coordinator.cli.watching import bar, duration, show_list, watch_option


@click.command()
@watch_option
@client_options
@json_option
def queues(client: Client, watch: bool, as_json: bool) -> None:
    """What of yours waits and runs, by class, and when the next one would start."""
    show_list(client, "queues", picture, watch=watch, as_json=as_json)


def picture(items: Sequence[Any]) -> RenderableType:
    """A row per class; the bar is how full the tenant's queue is."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in ("class", "waiting", "", "oldest", "running", "starts/s", "next start", "objective"):
        table.add_column(column, justify="left" if column in ("class", "") else "right", no_wrap=True)
    for item in items:
        late = max(item["estimated_start_ms"], item["oldest_age_ms"]) > item["start_objective_ms"]
        table.add_row(
            cell(item["class"]),
            cell(item["depth"]),
            bar(item["depth"], item["queue_depth"]),
            cell(duration(item["oldest_age_ms"]) if item["depth"] else None),
            cell(item["running"]),
            cell(item["started_per_s"]),
            Text(duration(item["estimated_start_ms"]), "red" if late else ""),
            cell(duration(item["start_objective_ms"])),
        )
    return table
