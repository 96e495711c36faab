"""`locks`: what is locked by name just now, and by which decisions."""

from __future__ import annotations

import click

from coordinator.cli.client import Client, client_options
from coordinator.cli.say import age, json_option, print_json, print_table


@click.command()
@client_options
@json_option
def locks(client: Client, as_json: bool) -> None:
    """Named locks that are held, by name."""
    items = list(client.all("locks"))
    if as_json:
        print_json({"items": items, "next_cursor": None})
        return
    print_table(
        ["lock", "decision", "type", "token", "held for", "expires"],
        (
            (
                item["name"],
                item["decision"],
                item["decision_type"],
                item["fencing_token"],
                age(item["since"]),
                item["expires"],
            )
            for item in items
        ),
        empty="No lock is held.",
    )
