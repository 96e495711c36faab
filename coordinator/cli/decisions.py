"""`decide`, `show`, `decisions`: decisions over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from uuid_utils.compat import uuid7

from coordinator.cli.client import Answer, Client, client_options
from coordinator.cli.follow import follow
from coordinator.cli.picture import picture
from coordinator.cli.say import age, console, json_option, print_json, print_table, short

AS_IT_SHOULD_BE = frozenset({"committed", "declined", "in_review", "queued", "running"})
"""Any other end is exit code 1."""

limit_option = click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 200))


def json_input(ctx: click.Context, param: click.Parameter, text: str) -> Any:
    """JSON as it stands, from a file (``@path``) or from standard input (``@-``)."""
    try:
        if text == "@-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text()
        value = msgspec.json.decode(text)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise click.BadParameter(f'{error}; write JSON such as \'{{"customer": "c-7"}}\' or @file') from error
    if not isinstance(value, dict):
        raise click.BadParameter("must be a JSON object")
    return value


def record_id(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    kind, slash, id = text.partition("/")
    if not slash or not kind or not id:
        raise click.BadParameter("must be KIND/ID, such as proposal/p-1")
    return kind, id


@click.command()
@click.argument("type", metavar="TYPE")
@click.option("--input", "input_", required=True, callback=json_input, help="JSON, @file or @- for stdin.")
@click.option("--record", callback=record_id, metavar="KIND/ID", help="The record it is about.")
@click.option(
    "--expected-version", type=click.IntRange(0), help="Refuse if the record is at another version."
)
@click.option("--key-id", help="Idempotency key; a new one if left out. The same one never decides twice.")
@click.option("--class", "class_", metavar="CLASS", help="Priority class: urgent, interactive, bulk.")
@click.option("--wait", type=click.IntRange(0, 60), default=10, show_default=True, help="Seconds.")
@click.option("--follow", "follows", is_flag=True, help="Do not wait: show its events as they happen.")
@client_options
@json_option
def decide(
    client: Client,
    type: str,
    input_: dict[str, Any],
    record: tuple[str, str] | None,
    expected_version: int | None,
    key_id: str | None,
    class_: str | None,
    wait: int,
    follows: bool,
    as_json: bool,
) -> None:
    """Ask for a decision of TYPE, wait for it, and show it."""
    if expected_version is not None and record is None:
        raise click.UsageError("--expected-version needs --record")
    body: dict[str, Any] = {"type": type, "input": input_}
    if record:
        body["record"] = {"kind": record[0], "id": record[1]}
        if expected_version is not None:
            body["record"]["expected_version"] = expected_version
    if class_:
        body["class"] = class_
    key, wait = key_id or f"cli-{uuid7()}", 0 if follows else wait
    answer = client.post(
        "/v1/decisions",
        body,
        {"Idempotency-Key": key, "Prefer": f"wait={wait}" if wait else "respond-async"},
        wait_s=wait,
        on_silence=f"Nobody knows yet whether it was decided: repeat the command with --key-id {key}",
    )
    if not follows:
        _say(answer, key, as_json)
        return
    click.echo(f"idempotency key {key}", err=True)
    _follow(client, answer.json()["id"], as_json)


def _follow(client: Client, id: str, as_json: bool) -> None:
    """Its events, and then, unless they were JSON, the picture."""
    follow(client, id, as_json=as_json)
    decision = client.get("decisions", id).json()
    if not as_json:
        click.echo()
        _draw(client, decision)
    if decision["status"] not in AS_IT_SHOULD_BE:
        click.get_current_context().exit(1)


def _say(answer: Answer, key: str, as_json: bool) -> None:
    if as_json:
        print_json(answer.body)
    else:
        _picture(answer.json())
        replayed = ", answered before: the same bytes" if "Idempotent-Replayed" in _titled(answer) else ""
        click.echo(f"idempotency key {key}{replayed}", err=True)
    if answer.json()["status"] not in AS_IT_SHOULD_BE:
        click.get_current_context().exit(1)


def _titled(answer: Answer) -> set[str]:
    return {name.title() for name in answer.headers}


def _picture(decision: dict[str, Any], operations: dict[str, Any] | None = None) -> None:
    console().print(picture(decision, operations))


@click.command()
@click.argument("id", type=click.UUID)
@click.option("--follow", "follows", is_flag=True, help="Show its events as they happen, until it rests.")
@client_options
@json_option
def show(client: Client, id: object, follows: bool, as_json: bool) -> None:
    """One decision as a picture: its stages, evidence, fence and operations."""
    if follows:
        _follow(client, str(id), as_json)
        return
    answer = client.get("decisions", str(id))
    if as_json:
        print_json(answer.body)
        return
    _draw(client, answer.json())


def _draw(client: Client, decision: dict[str, Any]) -> None:
    details = {op["id"]: client.get("operations", op["id"]).json() for op in decision["operations"]}
    _picture(decision, details)


@click.command()
@click.option("--status")
@click.option("--type")
@click.option("--record", callback=record_id, metavar="KIND/ID")
@limit_option
@client_options
@json_option
def decisions(
    client: Client,
    status: str | None,
    type: str | None,
    record: tuple[str, str] | None,
    limit: int,
    as_json: bool,
) -> None:
    """Decisions, the newest first."""
    about = "/".join(record) if record else None
    _list(client.get("decisions", status=status, type=type, record=about, limit=limit), as_json)


def _list(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json(answer.body)
        return
    print_table(
        ["id", "type", "record", "status", "outcome", "created"],
        (
            (
                item["id"],
                item["type"],
                _record(item["record"]),
                item["status"],
                short(_outcome(item["outcome"])),
                age(item["created_at"]),
            )
            for item in answer.json()["items"]
        ),
        empty="No decisions.",
    )


def _record(record: dict[str, Any] | None) -> str | None:
    if record is None:
        return None
    made = record["committed_version"]
    return f"{record['kind']}/{record['id']}" + (f" v{made}" if made is not None else "")


def _outcome(outcome: dict[str, Any] | None) -> Any:
    return "" if outcome is None else outcome.get("reason") or outcome.get("terms") or outcome["kind"]
