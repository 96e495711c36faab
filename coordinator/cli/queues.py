"""`queues`: what waits and runs, by class; once, or kept up to date on the screen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.cli.client import Client, client_options
from coordinator.cli.say import cell, console, json_option, print_json

BAR = 20
EVERY_S = 1.0


@click.command()
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@client_options
@json_option
def queues(client: Client, watch: bool, as_json: bool) -> None:
    """What of yours waits and runs, by class, and when the next one would start."""
    if as_json:
        print_json({"items": list(client.all("queues")), "next_cursor": None})
        while watch:
            time.sleep(EVERY_S)
            print_json({"items": list(client.all("queues")), "next_cursor": None})
        return
    if not watch:
        console().print(picture(list(client.all("queues"))))
        return
    with Live(picture(list(client.all("queues"))), console=console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(EVERY_S)
                live.update(picture(list(client.all("queues"))), refresh=True)
        except KeyboardInterrupt:
            return


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
            _bar(item["depth"], item["queue_depth"]),
            cell(duration(item["oldest_age_ms"]) if item["depth"] else None),
            cell(item["running"]),
            cell(item["started_per_s"]),
            Text(duration(item["estimated_start_ms"]), "red" if late else ""),
            cell(duration(item["start_objective_ms"])),
        )
    return table


def _bar(value: int, limit: int) -> Text:
    full = min(BAR, -(-BAR * value // max(1, limit)))
    return Text("█" * full, "red" if value >= limit else "yellow" if full > BAR // 2 else "green") + Text(
        "░" * (BAR - full), "dim"
    )


def duration(ms: int) -> str:
    """In one unit."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 120_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms / 60_000:.0f} min"
