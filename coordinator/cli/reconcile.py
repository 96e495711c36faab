"""`operations reconcile`: have the providers asked about everything uncertain, and wait for what they say.

What no provider can be asked about stays uncertain until a person resolves it, and is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from coordinator.cli.client import Client, client_options
from coordinator.cli.effects import UNKNOWN, truth
from coordinator.cli.say import console, json_option, print_json, print_table

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

Json = Mapping[str, Any]


@click.command()
@click.option(
    "--wait", type=click.IntRange(0, 3600), default=30, show_default=True, help="Seconds, for all together."
)
@client_options
@json_option
def reconcile(client: Client, wait: int, as_json: bool) -> None:
    """Ask the providers about every uncertain operation, and say what became of each.

    Exit code 1 if one remains uncertain: it needs a person, or more time.
    """
    until = time.monotonic() + wait
    before = {item["id"]: item for item in client.all("operations", state="uncertain")}
    asked = client.post("/v1/operations/reconcile", {}, {}).json()["asked"] if before else 0
    if not as_json and before:
        console().print(f"{len(before)} uncertain; providers are asked about {asked}.")
    after = _wait(client, before, until)
    found = [_found(after[id]) for id in before]
    uncertain = sum(item["outcome"] == "still-uncertain" for item in found)
    if as_json:
        print_json({"asked": asked, "uncertain": uncertain, "items": found})
    else:
        _say(found)
    if uncertain:
        click.get_current_context().exit(1)


def _wait(client: Client, before: Mapping[str, Json], until: float) -> Mapping[str, Json]:
    """Each as it was when nothing more was to be expected of it, or when the time ran out."""
    after = dict(before)
    open_ones = {id for id, item in before.items() if _can_be_asked(item)}
    pause = FIRST_PAUSE_S
    while open_ones and (left := until - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)
        listed = {item["id"]: item for item in client.all("operations", state="uncertain")}
        for id in sorted(open_ones):
            after[id] = listed.get(id) or client.get("operations", id).json()
            if not _may_move(before[id], after[id]):
                open_ones.discard(id)
    return after


def _can_be_asked(operation: Json) -> bool:
    guarantee = operation["guarantee"]
    return guarantee["kind"] == "lookup" or guarantee.get("lookup_lag_ms") is not None


def _may_move(before: Json, now: Json) -> bool:
    """An uncertain one that was asked about and for which nothing further is planned is parked."""
    if now["state"] == "uncertain":
        return now["due_at"] is not None or now["lookups"] == before["lookups"]
    return now["state"] in ("ready", "dispatching")


def _found(operation: Json) -> dict[str, Any]:
    unknown = truth(operation["state"], operation["in_doubt"]) is UNKNOWN
    open_still = operation["state"] in ("ready", "dispatching")
    return {
        "outcome": "still-uncertain" if unknown else "sent-again" if open_still else "resolved",
        "operation": operation["id"],
        "decision": operation["decision"],
        "effect": operation["effect"],
        "state": operation["state"],
        "reference": operation["reference"],
        "reason": operation["reason"],
    }


def _say(found: list[dict[str, Any]]) -> None:
    print_table(
        ["id", "effect", "became", "state", "reference", "reason"],
        (
            (
                item["operation"],
                item["effect"],
                item["outcome"].replace("-", " "),
                item["state"],
                item["reference"],
                item["reason"],
            )
            for item in found
        ),
        empty="Nothing is uncertain.",
    )
    if any(item["outcome"] == "still-uncertain" for item in found):
        click.echo(
            "Look into the provider's own records, then: coordinator operations resolve ID --verdict "
            "happened|did-not-happen",
            err=True,
        )
