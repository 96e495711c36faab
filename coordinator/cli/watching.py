"""A list of the service as a picture: once, or kept up to date on the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from coordinator.cli.client import Client
from coordinator.cli.say import console, print_json

BAR = 20
EVERY_S = 1.0

watch_option = click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")


def show_list(
    client: Client,
    path: str,
    picture: Callable[[Sequence[Any]], RenderableType],
    *,
    watch: bool,
    as_json: bool,
) -> None:
    """The items at ``path``: drawn, or each time as one line of JSON."""
    if as_json:
        print_json({"items": list(client.all(path)), "next_cursor": None})
        while watch:
            time.sleep(EVERY_S)
            print_json({"items": list(client.all(path)), "next_cursor": None})
        return
    if not watch:
        console().print(picture(list(client.all(path))))
        return
    with Live(picture(list(client.all(path))), console=console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(EVERY_S)
                live.update(picture(list(client.all(path))), refresh=True)
        except KeyboardInterrupt:
            return


def bar(value: int, limit: int) -> Text:
    """How full something is."""
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
