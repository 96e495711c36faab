"""Budgets over HTTP: setting and showing them, what draws on them, refusals, and what a person knows of a bill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from coordinator.api import examples
from tests.api.serving import Client, Reply, new_key, server, tenant
from tests.support.postgres import Databases

ABSENT = "01900000-0000-7000-8000-000000000000"


@dataclass(frozen=True)
class Priced:
    """A fresh tenant of a server whose one decision type reserves 0.40 SGD."""

    address: str
    url: str
    client: Client

    def put(self, name: str, body: object) -> Reply:
        return self.client.call("PUT", f"/v1/budgets/{name}", body)

    def ceiling(self, amount: int, name: str = "all", **more: object) -> Reply:
        ceiling = {"amount_minor": amount, "currency": "SGD"}
        return self.put(name, {"ceiling": ceiling, "period": "total", **more})

    def ask(self, bill: int | None = 25, *, key: str | None = None) -> Reply:
        return self.client.decide({"type": "priced", "input": {"bill": bill}}, key=key)

    def books(self, name: str = "all") -> tuple[int, ...]:
        shown = self.client.get(f"/v1/budgets/{name}").json
        return tuple(
            shown[part]["amount_minor"] for part in ("held", "uncertain", "settled", "overage", "available")
        )

    def reservation(self, **query: str) -> dict[str, Any]:
        """The only one there is."""
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        (item,) = self.client.get(f"/v1/budgets/all/reservations?{asked}").json["items"]
        assert isinstance(item, dict)
        return item

    def post(self, reservation: str, verb: str, body: object) -> Reply:
        return self.client.call("POST", f"/v1/reservations/{reservation}/{verb}", body)


@pytest.fixture(scope="module")
def served(postgres: Databases) -> Iterator[tuple[str, str]]:
    url = postgres.create()
    with server(url, path="tests.api.priced:coordinator") as (address, _):
        yield address, url
    postgres.drop(url)


@pytest.fixture
def priced(served: tuple[str, str]) -> Priced:
    address, url = served
    return Priced(address, url, client_of(served))


def client_of(served: tuple[str, str], *scopes: str) -> Client:
    address, url = served
    _, key = asyncio.run(tenant(url, new_key(), *scopes))
    return Client(address, key)


def cost(amount: int, currency: str = "SGD") -> dict[str, object]:
    return {"amount_minor": amount, "currency": currency}


def test_a_budget_is_set_shown_and_listed_by_name(priced: Priced) -> None:
    answer = priced.put("tenant-day", examples.BUDGET)
    assert answer.status == 200
    assert answer.json == priced.client.get("/v1/budgets/tenant-day").json
    assert answer.json["ceiling"] == examples.BUDGET["ceiling"] == answer.json["available"]
    assert (answer.json["period"], answer.json["timezone"]) == ("day", "Asia/Singapore")
    assert answer.json["resets_at"].endswith("T16:00:00.000000Z")
    priced.ceiling(1, "b-total", provider="oracle")
    priced.ceiling(1, "a-total")
    first = priced.client.get("/v1/budgets?limit=2").json
    assert [item["name"] for item in first["items"]] == ["a-total", "b-total"]
    assert first["items"][1] | {"provider": "oracle", "resets_at": None} == first["items"][1]
    rest = priced.client.get(f"/v1/budgets?limit=2&cursor={first['next_cursor']}").json
    assert ([item["name"] for item in rest["items"]], rest["next_cursor"]) == (["tenant-day"], None)


def test_a_refusal_says_which_budget_what_is_needed_and_left_and_when_it_resets(priced: Priced) -> None:
    priced.ceiling(39, period="month", timezone="Europe/Berlin")
    refused = priced.ask(key="once")
    assert (refused.status, refused.code) == (409, "budget-exhausted")
    told = refused.json
    assert (told["budget"], told["needed"], told["available"]) == ("all", cost(40), cost(39))
    assert told["resets_at"] == priced.client.get("/v1/budgets/all").json["resets_at"]
    assert told["retry"] == "same-key"
    assert "0.39 SGD left and 0.40 SGD is needed" in told["detail"]
    assert "decision" not in told
    assert priced.client.get("/v1/decisions").json["items"] == []
    priced.ceiling(40, period="month", timezone="Europe/Berlin")
    assert priced.ask(key="once").status == 201


def test_what_is_settled_uncertain_and_over_shows_in_the_budget_and_its_reservations(priced: Priced) -> None:
    priced.ceiling(100)
    priced.ask(25)
    assert priced.books() == (0, 0, 25, 0, 75)
    silent = priced.ask(None).json
    assert priced.books() == (0, 40, 25, 0, 35)
    uncertain = priced.reservation(state="uncertain")
    assert (uncertain["decision"], uncertain["item"], uncertain["reason"]) == (
        silent["id"],
        "answer",
        "cost-unknown",
    )
    assert (uncertain["budgets"], uncertain["amount"], uncertain["drawn"]) == (["all"], cost(40), cost(40))
    assert silent["budget"]["uncertain"] == cost(40)


def test_a_bill_bigger_than_the_reservation_counts_in_full(priced: Priced) -> None:
    priced.ceiling(40)
    assert priced.ask(70).status == 201
    assert priced.books() == (0, 0, 70, 30, 0)
    assert priced.ask().code == "budget-exhausted"


def test_a_person_says_what_an_uncertain_reservation_cost_once(priced: Priced) -> None:
    priced.ceiling(100)
    priced.ask(None)
    id = priced.reservation()["id"]
    answer = priced.post(id, "resolve", examples.REAL_COST)
    assert (answer.status, answer.json["state"], answer.json["drawn"]) == (200, "settled", cost(25))
    assert answer.json == priced.client.get(f"/v1/reservations/{id}").json
    assert priced.books() == (0, 0, 25, 0, 75)
    assert priced.post(id, "resolve", examples.REAL_COST).code == "state-conflict"
    (receipt,) = priced.client.get("/v1/receipts?kind=reservation.settled").json["items"]
    assert receipt["body"]["note"] == examples.REAL_COST["note"]


def test_a_late_bill_becomes_an_overage_once(priced: Priced) -> None:
    priced.ceiling(100)
    priced.ask(25)
    id = priced.reservation()["id"]
    for _ in range(2):
        answer = priced.post(id, "bills", examples.LATE_BILL)
        assert (answer.status, answer.json["state"], answer.json["drawn"]) == (200, "settled", cost(50))
    assert priced.books() == (0, 0, 50, 25, 50)
    (receipt,) = priced.client.get("/v1/receipts?kind=budget.overage").json["items"]
    assert (receipt["body"]["cause"], receipt["body"]["bill"]) == ("late-bill", "2026-11/4711")


def test_what_became_of_a_decisions_money_is_in_its_reservations(priced: Priced) -> None:
    priced.ceiling(100)
    asked, other = priced.ask(25).json, priced.ask(None).json
    (one,) = priced.client.get(f"/v1/reservations?decision={asked['id']}").json["items"]
    assert (one["state"], one["drawn"]) == ("settled", cost(25)) == ("settled", asked["budget"]["settled"])
    priced.post(one["id"], "bills", examples.LATE_BILL)
    (late,) = priced.client.get(f"/v1/reservations?decision={asked['id']}").json["items"]
    assert (late["id"], late["drawn"]) == (one["id"], cost(50))
    everything = priced.client.get("/v1/reservations?limit=1").json
    assert [item["decision"] for item in everything["items"]] == [other["id"]]
    rest = priced.client.get(f"/v1/reservations?cursor={everything['next_cursor']}").json
    assert rest == {"items": [late], "next_cursor": None}
    assert priced.client.get(f"/v1/reservations?decision={asked['id']}&state=held").json["items"] == []
    assert priced.client.get(f"/v1/reservations?decision={ABSENT}").json["items"] == []
    assert priced.client.get("/v1/reservations?decision=none").code == "malformed-request"


def test_a_ceiling_may_be_lowered_below_what_is_taken(priced: Priced) -> None:
    priced.ceiling(100)
    priced.ask(25)
    assert priced.ceiling(10).status == 200
    assert priced.books() == (0, 0, 25, 15, 0)


def test_what_a_budget_counts_is_fixed_once_something_was_drawn(priced: Priced) -> None:
    assert priced.ceiling(100, timezone="Europe/Berlin").status == 200
    assert priced.ceiling(100, timezone="Asia/Singapore").status == 200
    priced.ask(25)
    assert priced.ceiling(100, timezone="Europe/Berlin").code == "state-conflict"
    assert priced.ceiling(100, timezone="Asia/Singapore", provider="oracle").code == "state-conflict"
    assert priced.ceiling(200, timezone="Asia/Singapore").status == 200


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"timezone": "Mars/Olympus"}, "/timezone"),
        ({"timezone": "EST+5"}, "/timezone"),
        ({"timezone": ""}, "/timezone"),
        ({"timezone": "x\u0000y"}, ""),
        ({"period": "week"}, "/period"),
        ({"ceiling": cost(-1)}, "/ceiling/amount_minor"),
        ({"ceiling": cost(1, "XYZ")}, "/ceiling"),
        ({"ceiling": {"amount_minor": 1.5, "currency": "SGD"}}, "/ceiling/amount_minor"),
        ({"surplus": 1}, ""),
    ],
)
def test_what_is_wrong_with_a_budget_is_said_with_a_pointer(
    change: dict[str, object], pointer: str, priced: Priced
) -> None:
    answer = priced.put("all", examples.BUDGET | change)
    assert (answer.status, answer.code) == (400, "malformed-request")
    assert answer.json["errors"][0]["pointer"].startswith(pointer)
    assert priced.client.get("/v1/budgets/all").status == 404


@pytest.mark.parametrize("name", ["decision", "Upper", "-x", "a" * 64, "a%20b", "a%00"])
def test_a_name_that_is_none_is_refused(name: str, priced: Priced) -> None:
    assert priced.put(name, examples.BUDGET).status in (400, 404)


def test_what_is_absent_and_what_is_anothers_look_alike(priced: Priced, served: tuple[str, str]) -> None:
    priced.ceiling(100)
    priced.ask(None)
    id = priced.reservation()["id"]
    stranger = client_of(served)
    for method, path, body in [
        ("GET", "/v1/budgets/all", None),
        ("GET", "/v1/budgets/all/reservations", None),
        ("GET", f"/v1/reservations/{id}", None),
        ("POST", f"/v1/reservations/{id}/resolve", examples.REAL_COST),
        ("POST", f"/v1/reservations/{id}/bills", examples.LATE_BILL),
    ]:
        foreign = stranger.call(method, path, body)
        absent = stranger.call(method, path.replace(id, ABSENT), body)
        assert (foreign.status, foreign.json) == (absent.status, absent.json)
        assert foreign.status == 404
    decision = priced.reservation()["decision"]
    assert stranger.get(f"/v1/reservations?decision={decision}").json["items"] == []
    assert stranger.get("/v1/reservations").json["items"] == []
    assert priced.books() == (0, 40, 0, 0, 60)


def test_each_scope_opens_what_it_is_for(served: tuple[str, str]) -> None:
    reader = client_of(served, "decide")
    assert reader.get("/v1/budgets").status == 200
    assert reader.call("PUT", "/v1/budgets/all", examples.BUDGET).code == "missing-scope"
    path = f"/v1/reservations/{ABSENT}"
    assert reader.call("POST", f"{path}/resolve", examples.REAL_COST).code == "missing-scope"
    assert reader.call("POST", f"{path}/bills", examples.LATE_BILL).code == "missing-scope"
    worker = client_of(served, "work")
    assert worker.get("/v1/budgets").code == "missing-scope"


@pytest.mark.parametrize("verb", ["resolve", "bills"])
def test_a_negative_cost_is_refused(verb: str, priced: Priced) -> None:
    example = {"resolve": examples.REAL_COST, "bills": examples.LATE_BILL}[verb]
    answer = priced.post(ABSENT, verb, example | {"cost": cost(-1)})
    assert (answer.status, answer.code) == (400, "malformed-request")
