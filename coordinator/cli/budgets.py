"""`budgets`: ceilings, what is left of them, what draws on them, and what a person knows of a bill."""

from __future__ import annotations

from datetime import datetime
from typing import Any, get_args
from uuid import UUID
from zoneinfo import ZoneInfo

import click

from coordinator.cli.client import Answer, Client, client_options
from coordinator.cli.decisions import limit_option
from coordinator.cli.operations import ListByDefault, note_option
from coordinator.cli.say import age, json_option, print_json, print_table
from coordinator.core.budget import Period, ReservationState
from coordinator.core.money import Money, money

LOOK_FIRST = "It may have been done: look with `coordinator budgets` before you repeat it."


class Amount(click.ParamType[Money]):
    """Such as "4.00 SGD"."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Money:
        try:
            return value if isinstance(value, Money) else money(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


AMOUNT = Amount()


@click.group(cls=ListByDefault)
def budgets() -> None:
    """What may be spent, and what is left of it. Without a command: list.

    Setting one needs a key with the scope admin; saying what something cost, one with operate.
    """


@budgets.command("list")
@client_options
@json_option
def list_budgets(client: Client, as_json: bool) -> None:
    """Budgets, each in its present period."""
    items = list(client.all("budgets"))
    if as_json:
        print_json({"items": items, "next_cursor": None})
    else:
        _table(items)


@budgets.command()
@click.argument("name")
@client_options
@json_option
def show(client: Client, name: str, as_json: bool) -> None:
    """The budget NAME."""
    _say(client.get("budgets", name), as_json)


@budgets.command("set")
@click.argument("name")
@click.option("--ceiling", type=AMOUNT, required=True, help='Such as "400.00 SGD".')
@click.option("--period", type=click.Choice(get_args(Period)), required=True)
@click.option("--timezone", default="Etc/UTC", show_default=True, help="IANA zone whose days it counts.")
@click.option("--provider", help="Count only what this provider is paid.")
@client_options
@json_option
def set_budget(
    client: Client,
    name: str,
    ceiling: Money,
    period: str,
    timezone: str,
    provider: str | None,
    as_json: bool,
) -> None:
    """Make the budget NAME, or change its ceiling."""
    body = {"ceiling": ceiling, "period": period, "timezone": timezone, "provider": provider}
    _say(client.put(body, "budgets", name), as_json)


@budgets.command()
@click.argument("name", required=False)
@click.option("--decision", type=click.UUID, help="Only those of this decision, of every budget.")
@click.option("--state", type=click.Choice(get_args(ReservationState)))
@limit_option
@client_options
@json_option
def reservations(
    client: Client, name: str | None, decision: UUID | None, state: str | None, limit: int, as_json: bool
) -> None:
    """What draws on the budget NAME, or on any, the newest first."""
    if name is not None and decision is not None:
        raise click.UsageError("give the NAME of a budget or a --decision, not both")
    if name is not None:
        answer = client.get("budgets", name, "reservations", state=state, limit=limit)
    else:
        answer = client.get("reservations", decision=decision and str(decision), state=state, limit=limit)
    if as_json:
        print_json(answer.body)
        return
    _reservations(answer.json()["items"])


@budgets.command()
@click.argument("id", type=click.UUID)
@click.option("--cost", type=AMOUNT, required=True, help='What it really cost, such as "0.25 SGD"; may be 0.')
@note_option
@client_options
@json_option
def resolve(client: Client, id: UUID, cost: Money, note: str, as_json: bool) -> None:
    """Say what the uncertain reservation ID cost."""
    _act(client, id, "resolve", {"cost": cost, "note": note}, as_json)


@budgets.command()
@click.argument("id", type=click.UUID)
@click.option("--name", "bill", required=True, help="The provider's name for the bill; each counts once.")
@click.option("--cost", type=AMOUNT, required=True, help='Such as "0.25 SGD".')
@note_option
@client_options
@json_option
def bill(client: Client, id: UUID, bill: str, cost: Money, note: str, as_json: bool) -> None:
    """Enter a bill that came after the reservation ID had closed."""
    _act(client, id, "bills", {"bill": bill, "cost": cost, "note": note}, as_json)


def _act(client: Client, id: UUID, verb: str, body: object, as_json: bool) -> None:
    answer = client.post(f"/v1/reservations/{id}/{verb}", body, {}, on_silence=LOOK_FIRST)
    if as_json:
        print_json(answer.body)
    else:
        _reservations([answer.json()])


def _say(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json(answer.body)
    else:
        _table([answer.json()])


def _table(items: list[Any]) -> None:
    print_table(
        ["budget", "period", "ceiling", "held", "uncertain", "settled", "overage", "available", "resets"],
        (
            (
                item["name"] + (f" ({item['provider']})" if item["provider"] else ""),
                item["period"],
                *(said(item[part]) for part in ("ceiling", "held", "uncertain", "settled", "overage")),
                said(item["available"]),
                _resets(item),
            )
            for item in items
        ),
        empty="No budgets: nothing limits what is spent. Set one with `coordinator budgets set`.",
    )


def _reservations(items: list[Any]) -> None:
    print_table(
        ["id", "decision", "item", "state", "amount", "drawn", "reason", "created"],
        (
            (
                item["id"],
                item["decision"],
                item["item"],
                item["state"],
                said(item["amount"]),
                said(item["drawn"]),
                item["reason"],
                age(item["created_at"]),
            )
            for item in items
        ),
        empty="No reservations.",
    )


def _resets(item: Any) -> str:
    """In the budget's own zone, where a new day begins at midnight."""
    if item["resets_at"] is None:
        return ""
    at = datetime.fromisoformat(item["resets_at"]).astimezone(ZoneInfo(item["timezone"]))
    return f"{at:%Y-%m-%d %H:%M} {item['timezone']}"


def said(amount: Any) -> str:
    """Money as people write it."""
    return str(Money(**amount))
