"""What the command line shows of budgets and does to them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from coordinator.cli.budgets import said
from tests.api.serving import Client, server, tenant
from tests.support.demo import as_json, coordinator_here
from tests.support.postgres import Databases

Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def client(postgres: Databases) -> Iterator[Client]:
    url = postgres.create()
    with server(url, path="tests.api.priced:coordinator") as (address, _):
        yield Client(address, asyncio.run(tenant(url, "one"))[1])
    postgres.drop(url)


def run(client: Client, *arguments: str) -> Run:
    return coordinator_here(
        "budgets",
        *arguments,
        env={"COORDINATOR_URL": client.address, "COORDINATOR_KEY": client.key or ""},
    )


def words(done: Run) -> str:
    return " ".join(done.stdout.split())


def test_a_budget_from_its_making_to_a_late_bill(client: Client) -> None:
    assert "nothing limits what is spent" in words(run(client))
    made = run(
        client, "set", "all", "--ceiling", "1.00 SGD", "--period", "day", "--timezone", "Asia/Singapore"
    )
    assert made.returncode == 0, made.stderr
    assert "all day 1.00 SGD 0.00 SGD" in words(made)
    assert "00:00 Asia/Singapore" in words(made)
    client.decide({"type": "priced", "input": {"bill": None}})
    (uncertain,) = as_json(run(client, "reservations", "all", "--state", "uncertain", "--json"))["items"]
    listed = run(client, "reservations", "all")
    assert f"{uncertain['id']} {uncertain['decision']} answer uncertain 0.40 SGD" in words(listed)
    assert words(run(client, "reservations", "--decision", uncertain["decision"])) == words(listed)
    assert words(run(client, "reservations")) == words(listed)
    assert run(client, "reservations", "all", "--decision", uncertain["decision"]).returncode == 2
    resolved = run(client, "resolve", uncertain["id"], "--cost", "0.25 SGD", "--note", "seen")
    assert "settled 0.40 SGD 0.25 SGD" in words(resolved)
    again = run(client, "resolve", uncertain["id"], "--cost", "0 SGD")
    assert (again.returncode, "state-conflict" in again.stderr) == (1, True)
    billed = run(client, "bill", uncertain["id"], "--name", "inv-1", "--cost", "0.10 SGD")
    assert "settled 0.40 SGD 0.35 SGD" in words(billed)
    shown = as_json(run(client, "show", "all", "--json"))
    assert shown["overage"]["amount_minor"] == 10
    assert as_json(run(client, "--json"))["items"] == [shown]


def test_what_is_no_amount_is_wrong_usage(client: Client) -> None:
    wrong = run(client, "set", "all", "--ceiling", "1.005 SGD", "--period", "total")
    assert (wrong.returncode, "more digits" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("amount", "currency", "text"),
    [(5, "SGD", "0.05 SGD"), (400, "SGD", "4.00 SGD"), (7, "JPY", "7 JPY"), (1234, "KWD", "1.234 KWD")],
)
def test_money_is_written_with_its_currencys_digits(amount: int, currency: str, text: str) -> None:
    assert said({"amount_minor": amount, "currency": currency}) == text
