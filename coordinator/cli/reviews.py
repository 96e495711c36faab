"""`reviews`: what waits for a person, the most urgent first; one of them in full; and the person's verdict.

A verdict is given on what was shown: `reviews show` prints the command that approves exactly that. If it has moved on since, the
service says so and nothing happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import click

from coordinator.cli.client import Answer, Client, client_options
from coordinator.cli.decisions import AS_IT_SHOULD_BE, limit_option
from coordinator.cli.operations import ListByDefault, note_option
from coordinator.cli.picture import picture, plain
from coordinator.cli.say import age, console, json_option, print_json, print_table, short


@click.group(cls=ListByDefault)
def reviews() -> None:
    """What waits for a person. Without a command: list.

    Needs a key with the scope review, and not the one that asked for the decision.
    """


@reviews.command("list")
@limit_option
@client_options
@json_option
def list_reviews(client: Client, limit: int, as_json: bool) -> None:
    """What waits, the most urgent first."""
    answer = client.get("reviews", limit=limit)
    if as_json:
        print_json(answer.body)
        return
    print_table(
        ["id", "class", "expires", "type", "record", "reason", "would promise", "since"],
        (
            (
                item["id"],
                item["class"],
                left(item["expires_at"]),
                item["type"],
                item["record"] and f"{item['record']['kind']}/{item['record']['id']}",
                short(item["reason"]),
                short(plain(item["terms"])) if item["approvable"] else None,
                age(item["since"]),
            )
            for item in answer.json()["items"]
        ),
        empty="Nothing waits for review.",
    )


@reviews.command()
@click.argument("id", type=click.UUID)
@client_options
@json_option
def show(client: Client, id: UUID, as_json: bool) -> None:
    """The decision ID with everything that a verdict needs, and the command that approves exactly that."""
    answer = client.get("decisions", str(id))
    if as_json:
        print_json(answer.body)
        return
    decision = answer.json()
    console().print(picture(decision))
    if (etag := _etag(answer)) is not None:
        verb = "approve" if decision["review"]["proposal"] else "reject"
        console().print(f"\ncoordinator reviews {verb} {id} --etag {etag}", style="dim", markup=False)


etag_option = click.option(
    "--etag", help="What `reviews show` printed. Without it: whatever is there when the command runs."
)


@reviews.command()
@click.argument("id", type=click.UUID)
@etag_option
@note_option
@client_options
@json_option
def approve(client: Client, id: UUID, etag: str | None, note: str, as_json: bool) -> None:
    """Commit what the decision ID proposes, if everything it rests on still holds."""
    _give(client, id, "approve", etag, note, as_json)


@reviews.command()
@click.argument("id", type=click.UUID)
@etag_option
@note_option
@client_options
@json_option
def reject(client: Client, id: UUID, etag: str | None, note: str, as_json: bool) -> None:
    """Decline the decision ID."""
    _give(client, id, "reject", etag, note, as_json)


def _give(client: Client, id: UUID, verdict: str, etag: str | None, note: str, as_json: bool) -> None:
    seen = etag or _etag(client.get("decisions", str(id))) or "none"
    again = f"Nobody knows yet whether it counted: repeat the command with --etag {seen}"
    body: Mapping[str, Any] = {"verdict": verdict, "note": note}
    headers = {"If-Match": f'"{seen}"'}
    answer = client.post(f"/v1/decisions/{id}/review", body, headers, on_silence=again)
    if as_json:
        print_json(answer.body)
    else:
        console().print(picture(answer.json()))
    if answer.json()["status"] not in AS_IT_SHOULD_BE:
        click.get_current_context().exit(1)


def _etag(answer: Answer) -> str | None:
    """Of a decision that is in review."""
    found = {name.lower(): value for name, value in answer.headers.items()}.get("etag")
    return None if found is None else found.strip('"')


def left(timestamp: str) -> str:
    """How long until then, in one unit."""
    rest = max(datetime.fromisoformat(timestamp) - datetime.now(UTC), timedelta())
    for unit, length in (("d", timedelta(days=1)), ("h", timedelta(hours=1)), ("min", timedelta(minutes=1))):
        if rest >= length:
            return f"in {rest / length:.0f} {unit}"
    return f"in {rest.total_seconds():.0f} s"
