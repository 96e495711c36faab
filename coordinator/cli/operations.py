"""`operations` and what a person does to one of them, and `receipts`: what was sent to the outside world, and what was written
down about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args
from uuid import UUID

import click

from coordinator.cli.client import Answer, Client, client_options
from coordinator.cli.decisions import limit_option
from coordinator.cli.effects import became
from coordinator.cli.reconcile import reconcile
from coordinator.cli.say import age, console, json_option, print_json, print_table, short
from coordinator.core.effect import OperationState

LOOK_FIRST = "It may have been done: look with `coordinator operations` before you repeat it."


class ListByDefault(click.Group):
    """`operations --state failed` is `operations list --state failed`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ListByDefault)
def operations() -> None:
    """What was sent to the outside world, and what became of it. Without a command: list.

    What a person does to an operation needs a key with the scope operate.
    """


@operations.command("list")
@click.option("--state", type=click.Choice(get_args(OperationState)))
@limit_option
@client_options
@json_option
def list_operations(client: Client, state: str | None, limit: int, as_json: bool) -> None:
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


note_option = click.option("--note", default="", help="Why; kept in the receipt.")


@operations.command()
@click.argument("id", type=click.UUID)
@click.option(
    "--verdict",
    type=click.Choice(["happened", "did-not-happen"]),
    required=True,
    help="What the provider's own records say.",
)
@click.option("--reference", default="", help="The provider's name for what happened.")
@note_option
@client_options
@json_option
def resolve(client: Client, id: UUID, verdict: str, reference: str, note: str, as_json: bool) -> None:
    """Say what became of the uncertain operation ID."""
    _act(client, id, "resolve", {"verdict": verdict, "reference": reference, "note": note}, as_json)


@operations.command()
@click.argument("id", type=click.UUID)
@note_option
@client_options
@json_option
def retry(client: Client, id: UUID, note: str, as_json: bool) -> None:
    """Send the failed operation ID again, under its key."""
    _act(client, id, "retry", {"note": note}, as_json)


@operations.command()
@click.argument("id", type=click.UUID)
@note_option
@client_options
@json_option
def compensate(client: Client, id: UUID, note: str, as_json: bool) -> None:
    """Undo the operation ID, which succeeded, by the compensation it declares."""
    _act(client, id, "compensate", {"note": note}, as_json)


operations.add_command(reconcile)


def _act(client: Client, id: UUID, verb: str, body: Mapping[str, Any], as_json: bool) -> None:
    _say(client.post(f"/v1/operations/{id}/{verb}", body, {}, on_silence=LOOK_FIRST), as_json)


def _say(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json(answer.body)
    else:
        console().print(became(answer.json()))


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
