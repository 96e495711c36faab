"""`replay`: fetch a decision and all that it depended on, run its policy again, and say whether that gives the same bytes."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from coordinator.cli.client import Client, client_options
from coordinator.cli.module import load
from coordinator.cli.say import Fault, console, json_option, print_json, short
from coordinator.core.canonical import JsonValue
from coordinator.core.decision import RESTING
from coordinator.core.view import DecisionView, decode_view
from coordinator.engine.replay import Difference, Replay, Stored
from coordinator.engine.replay import replay as replayed


@click.command()
@click.argument("id", type=click.UUID)
@click.option(
    "--module",
    required=True,
    envvar="COORDINATOR_MODULE",
    show_envvar=True,
    metavar="MODULE:NAME",
    help="Where the decision type is declared.",
)
@client_options
@json_option
def replay(client: Client, id: object, module: str, as_json: bool) -> None:
    """Run the policy of a stored decision again, several times: exit code 1 if anything differs from what was stored.

    With a key of scope audit the digest in the decision's receipt is compared as well.
    """
    types = load(module).types
    stored = fetch(client, str(id))
    declared = types.get(stored.view.type)
    if declared is None:
        raise Fault(
            f"{module} declares no {stored.view.type!r}; it declares {', '.join(types)}. Pass the right --module."
        )
    result = replayed(declared, stored)
    if as_json:
        print_json({"agrees": result.agrees, **msgspec.structs.asdict(result)})
    else:
        _say(result, stored)
    if not result.agrees:
        click.get_current_context().exit(1)


def fetch(client: Client, id: str) -> Stored:
    """The decision, its record at the version it was based on, and the digest in its receipt if the key may read it."""
    view = decode_view(client.get("decisions", id).body)
    if view.status not in RESTING:
        raise Fault(f"Decision {id} is {view.status}; it can be replayed once it rests.")
    return Stored(
        view=view, record_data=_record_at(client, view), outcome_digest=_outcome_digest(client, view)
    )


def _record_at(client: Client, view: DecisionView) -> JsonValue:
    record = view.record
    if record is None or not record.base_version:
        return None
    for version in client.all("records", record.kind, record.id, "history"):
        if version["version"] == record.base_version:
            data: JsonValue = version["data"]
            return data
    raise Fault(f"Version {record.base_version} of {record.kind}/{record.id} is not in the record's history.")


def _outcome_digest(client: Client, view: DecisionView) -> str | None:
    try:
        kept: list[dict[str, Any]] = list(client.all("receipts", decision=view.id))
    except Fault as fault:
        if fault.message.startswith("missing-scope"):
            return None
        raise
    if not any(receipt["kind"] == f"decision.{view.status}" for receipt in kept):
        raise Fault(f"Decision {view.id} is {view.status}, but has no receipt of that.")
    digests = (receipt["body"].get("outcome_digest") for receipt in reversed(kept))
    return next((str(digest) for digest in digests if digest is not None), None)


def _say(result: Replay, stored: Stored) -> None:
    out = console()
    if not result.compared:
        out.print(f"Nothing to replay: {result.status} before any evidence was there.")
        return
    verdict = "[green]agrees[/]" if result.agrees else "[bold red]differs[/]"
    out.print(f"{verdict}  {result.decision} ({result.status})")
    out.print(f"  compared: {', '.join(result.compared)}", style="dim")
    if stored.view.policy_version != result.policy_version:
        out.print(
            f"  decided by policy version {stored.view.policy_version}, replayed with {result.policy_version}",
            style="yellow",
        )
    if stored.outcome_digest is None and stored.view.status in ("committed", "declined", "in_review"):
        out.print("  the receipt was not compared: that needs a key with the scope audit", style="yellow")
    for difference in result.differences:
        _say_difference(difference)


def _say_difference(difference: Difference) -> None:
    out = console()
    out.print(f"  {difference.what}", style="red")
    out.print(f"    stored  {short(difference.stored, 140)}", markup=False)
    out.print(f"    now     {short(difference.now, 140)}", markup=False)
