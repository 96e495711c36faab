"""`operations` and `receipts`: what was sent to the outside world, and what was written down about it."""

from __future__ import annotations

from typing import get_args

import click

from coordinator.cli.client import Client, client_options
from coordinator.cli.decisions import limit_option
from coordinator.cli.say import age, json_option, print_json, print_table, short
from coordinator.core.effect import OperationState


@click.command()
@click.option("--state", type=click.Choice(get_args(OperationState)))
@limit_option
@client_options
@json_option
def operations(client: Client, state: str | None, limit: int, as_json: bool) -> None:
    """Operations, the newest first."""
    answer = client.get("operations", state=state, limit=limit)
    if as_json:
        print_json(answer.body)
        return
    print_table(
        ["id", "effect", "state", "attempts", "reference", "reason", "created"],
        (
            (
                item["id"],
                item["effect"],
                item["state"],
                item["attempts"],
                item["reference"],
                item["reason"] and short(item["reason"], 40),
                age(item["created_at"]),
            )
            for item in answer.json()["items"]
        ),
        empty="No operations." if state is None else f"No operation is {state}.",
    )


@click.command()
@click.option("--decision", type=click.UUID, help="Only those of this decision.")
@click.option("--operation", type=click.UUID, help="Only those of this operation.")
@click.option("--kind", help="Only those of this kind, such as operation.succeeded.")
@click.option("--since", metavar="TIME", help="At or after this RFC 3339 time.")
@click.option("--until", metavar="TIME", help="Before this RFC 3339 time.")
@limit_option
@client_options
@json_option
def receipts(
    client: Client,
    decision: object,
    operation: object,
    kind: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """Receipts in the order of the log. Needs a key with the scope audit."""
    answer = client.get(
        "receipts",
        decision=decision,
        operation=operation,
        kind=kind,
        since=since,
        until=until,
        limit=limit,
    )
    if as_json:
        print_json(answer.body)
        return
    print_table(
        ["index", "at", "kind", "decision", "body"],
        (
            (item["index"], item["at"], item["kind"], item["decision"], short(item["body"]))
            for item in answer.json()["items"]
        ),
        empty="No receipts.",
    )
