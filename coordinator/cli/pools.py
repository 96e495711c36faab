"""`pools`: the providers that a service calls, how busy it is with each, and what is left of their rates; once, or kept up to date."""

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
def pools(client: Client, watch: bool, as_json: bool) -> None:
    """Providers and the calls to them: of all processes where the provider has a pool, else of the one that answers."""
    show_list(client, "pools", picture, watch=watch, as_json=as_json)


def picture(items: Sequence[Any]) -> RenderableType:
    """A row per provider; the bar is how many of its slots are in use."""
    if not items:
        return Text("This service calls no provider.", style="dim")
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in (
        "provider",
        "",
        "busy",
        "waiting",
        "oldest",
        "calls left",
        "units left",
        "circuit breaker",
    ):
        left = column in ("provider", "", "circuit breaker")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for item in items:
        table.add_row(
            cell(item["provider"]),
            bar(item["busy"], item["total"]),
            cell(f"{item['busy']} / {item['total']}"),
            cell(item["waiting"]),
            cell(duration(item["oldest_wait_ms"]) if item["waiting"] else None),
            _left(item["rate_left"], item["requests_per_min"]),
            _left(item["units_left"], item["units_per_min"]),
            _breaker(item["breaker"]),
        )
    return table


def _left(left: int | None, limit: int | None) -> Text:
    return cell(None) if left is None else Text(f"{left} / {limit} per min", "" if left else "red")


def _breaker(state: str) -> Text:
    return cell(state) if state == "closed" else Text(state, "red" if state == "open" else "yellow")
