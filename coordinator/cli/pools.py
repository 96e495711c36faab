"""`pools`: the providers that a service calls, and how busy one of its processes is with each."""

from __future__ import annotations

import click
from rich.text import Text

from coordinator.cli.client import Client, client_options
from coordinator.cli.say import cell, json_option, print_json, print_table


@click.command()
@client_options
@json_option
def pools(client: Client, as_json: bool) -> None:
    """Providers and the calls to them, of the process that answers."""
    items = list(client.all("pools"))
    if as_json:
        print_json({"items": items, "next_cursor": None})
        return
    print_table(
        ["provider", "busy", "total", "waiting", "circuit breaker"],
        (
            (item["provider"], item["busy"], item["total"], item["waiting"], _breaker(item["breaker"]))
            for item in items
        ),
        empty="This service calls no provider.",
    )


def _breaker(state: str) -> Text:
    return cell(state) if state == "closed" else Text(state, "red" if state == "open" else "yellow")
