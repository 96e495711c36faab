"""The tour: six decisions that go differently, each shown as it really went, and in the end the provider's ledger beside our receipts.

Every scene says beforehand what has to come out and checks it; a complaint is printed and makes the tour disagree. Records and keys
are new in each tour, so it can be taken again on the same data.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from coordinator.cli.picture import money, picture
from coordinator.core.canonical import canonical, digest
from coordinator.demo.run import Demo

SETTLED = frozenset({"succeeded", "failed", "cancelled", "compensated"})
PATIENCE_S = 20.0
POLL_S = 0.05


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``effects`` is what the provider's ledger holds in all, ``matched`` how many of these have their receipt here."""

    agrees: bool
    complaints: list[str]
    effects: int
    matched: int


class Reply(msgspec.Struct, frozen=True):
    """An answer to ``POST /v1/decisions``."""

    status: int
    body: bytes
    replayed: bool

    @property
    def json(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body, type=dict[str, Any])

    @property
    def decision(self) -> dict[str, Any]:
        """Raises `Refused` if there is none."""
        return _unless_refused(self.status, self.body)


class Refused(Exception):
    """The service answered with a problem where the scene expects none."""


def _unless_refused(status: int, body: bytes) -> dict[str, Any]:
    answered = msgspec.json.decode(body, type=dict[str, Any])
    if status >= 400:
        raise Refused(f"the service answered {status} {answered.get('code')}: {answered.get('detail')}")
    return answered


class Tour:
    """What the scenes need: the service, the providers, a place to draw, and a list of complaints."""

    def __init__(self, demo: Demo, http: aiohttp.ClientSession, out: Console) -> None:
        self.demo = demo
        self.out = out
        self.complaints: list[str] = []
        self.operations: list[str] = []
        self.first: tuple[str, dict[str, Any], Reply] | None = None
        self._http = http
        self.run = secrets.token_hex(3)

    # Asking the service -----------------------------------------------------------------------------------------------------

    async def decide(self, name: str, *, version: int | None = None, key: str = "", **input: object) -> Reply:
        """A quote for the record ``name`` of this tour, under the key ``key``, or one made from the name."""
        asked = {"customer": "c-7", "site": "sg-1", "hours": 16, "currency": "SGD"} | input
        record: dict[str, object] = {"kind": "proposal", "id": f"tour-{self.run}-{name}"}
        if version is not None:
            record["expected_version"] = version
        body = {"type": "proposal-quote", "input": asked, "record": record}
        return await self.send(key or f"tour-{self.run}-{name}", body)

    async def send(self, key: str, body: dict[str, Any]) -> Reply:
        headers = {
            "Authorization": f"Bearer {self.demo.keys['decide']}",
            "Idempotency-Key": key,
            "Prefer": "wait=20",
        }
        async with self._http.post(f"{self.demo.url}/v1/decisions", json=body, headers=headers) as answer:
            reply = Reply(answer.status, await answer.read(), "Idempotent-Replayed" in answer.headers)
        if self.first is None:
            self.first = key, body, reply
        self.operations += [op["id"] for op in reply.json.get("operations", ()) if not reply.replayed]
        return reply

    async def get(self, path: str, **query: str) -> Any:
        headers = {"Authorization": f"Bearer {self.demo.keys['audit']}"}
        async with self._http.get(f"{self.demo.url}/v1/{path}", params=query, headers=headers) as answer:
            return _unless_refused(answer.status, await answer.read())

    async def all(self, path: str, **query: str) -> AsyncIterator[Any]:
        """The items of every page."""
        cursor: str | None = ""
        while cursor is not None:
            page = await self.get(path, limit="200", **query, **({"cursor": cursor} if cursor else {}))
            for item in page["items"]:
                yield item
            cursor = page["next_cursor"]

    async def settled(self, decision: Mapping[str, Any]) -> dict[str, Any]:
        """The decision's operations by id, once the provider's answer to each is known."""
        known: dict[str, Any] = {}
        for operation in decision["operations"]:
            known[operation["id"]] = await self.operation_settled(operation["id"])
        return known

    async def operation_settled(self, id: str) -> dict[str, Any]:
        with anyio.move_on_after(PATIENCE_S):
            while True:
                operation: dict[str, Any] = await self.get(f"operations/{id}")
                if operation["state"] in SETTLED:
                    return operation
                await anyio.sleep(POLL_S)
        self.complain(f"operation {id} was not settled within {PATIENCE_S:.0f} s")
        return dict(await self.get(f"operations/{id}"))

    # Asking the providers ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def fault(self, table: Mapping[str, Mapping[str, object]]) -> AsyncIterator[None]:
        """The providers misbehave as the table says, inside the block."""
        await self._control(table)
        try:
            yield
        finally:
            await self._control({})

    async def _control(self, table: Mapping[str, Mapping[str, object]]) -> None:
        async with self._http.put(f"{self.demo.providers_url}/control", json=table) as answer:
            answer.raise_for_status()

    async def ledger(self) -> dict[str, dict[str, Any]]:
        """What really happened, by key."""
        async with self._http.get(f"{self.demo.providers_url}/ledger") as answer:
            return {item["key"]: item for item in msgspec.json.decode(await answer.read())["items"]}

    async def fact(self, path: str) -> Any:
        async with self._http.get(f"{self.demo.providers_url}/{path}") as answer:
            return msgspec.json.decode(await answer.read())

    # Saying -----------------------------------------------------------------------------------------------------------------

    def say(self, text: str, style: str = "") -> None:
        self.out.print(Padding(Text(text, style), (0, 0, 0, 2)))

    def expect(self, holds: bool, text: str) -> None:
        """Say what came out; if it did not, complain."""
        if holds:
            self.say(f"✓ {text}", "green")
        else:
            self.complain(f"expected: {text}")

    def complain(self, text: str) -> None:
        self.complaints.append(text)
        self.say(f"✗ {text}", "bold red")

    async def draw(self, decision: dict[str, Any]) -> dict[str, Any]:
        """The decision as a picture, after its operations have settled; returns these."""
        known = await self.settled(decision)
        states = [{**op, "state": known[op["id"]]["state"]} for op in decision["operations"]]
        self.out.print(Padding(picture({**decision, "operations": states}, known), (0, 0, 1, 2)))
        return known


async def a_quote(tour: Tour) -> None:
    """A quote. Facts are read in parallel, the policy decides, the fence reads the decisive ones again, one transaction commits."""
    decision = (await tour.decide("plain")).decision
    known = await tour.draw(decision)
    tour.expect(decision["status"] == "committed", f"committed: {_price(decision)}")
    tour.expect([op["state"] for op in known.values()] == ["succeeded"], "the quote was sent once")


async def two_writers(tour: Tour) -> None:
    """Two writers at one version. Both have seen version 1 and offer different discounts; one may promise, the other must not send."""
    await tour.settled((await tour.decide("race")).decision)
    before = len(await tour.ledger())
    replies: dict[int, Reply] = {}

    async def write(discount: int) -> None:
        key = f"race-{tour.run}-{discount}"
        replies[discount] = await tour.decide("race", version=1, key=key, discount_percent=discount)

    async with anyio.create_task_group() as tasks:
        for discount in (0, 5):
            tasks.start_soon(write, discount)
    for discount, reply in replies.items():
        said = _price(reply.json) if reply.status == 201 else f"{reply.json['code']}: {reply.json['detail']}"
        tour.say(f"{discount} % more discount → {reply.status} {said}")
        if reply.status == 201:
            await tour.settled(reply.json)
    tour.expect(
        sorted(reply.status for reply in replies.values()) == [201, 409], "one committed, one refused"
    )
    sent = len(await tour.ledger()) - before
    tour.expect(sent == 1, f"the provider's ledger has {sent} new effect")


async def a_slow_optional_reading(tour: Tour) -> None:
    """An optional reading is too slow. Its deadline is 150 ms and the provider takes a second; the decision says so and goes on."""
    async with tour.fault({"/customers/tone-": {"delay_ms": 1000}}):
        decision = (await tour.decide("slow")).decision
    await tour.draw(decision)
    tone = next(item for item in decision["evidence"] if item["name"] == "tone")
    tour.expect(tone["value"] is None and tone["state"] != "found", f"the evidence says tone {tone['state']}")
    terms = (decision["outcome"] or {}).get("terms") or {}
    tour.expect(decision["status"] == "committed", f"committed all the same, in a {terms.get('tone')} tone")


async def a_lost_answer(tour: Tour) -> None:
    """The provider acts, and its answer is lost. We cannot know; it deduplicates by our key, so the same key is sent again."""
    async with tour.fault({"POST /effects": {"lose_answer": True, "times": 1}}):
        decision = (await tour.decide("lost")).decision
        known = await tour.draw(decision)
    ledger = await tour.ledger()
    for operation in known.values():
        attempts, count = operation["attempts"], ledger.get(operation["key"], {"count": 0})["count"]
        tour.expect(attempts > 1, f"{attempts} attempts under one key")
        tour.expect(count == 1, f"the provider's ledger says it happened {count} time")


async def a_moving_cost(tour: Tour) -> None:
    """Evidence moves between reading and commit. The cost rises while the policy thinks; the fence sees it, and the policy runs again."""
    cost = "costs/sg-2-24h"
    before = (await tour.fact(cost))["estimate_minor"]
    async with tour.fault({f"/{cost}": {"bump_revision": True, "times": 2}}):
        decision = (await tour.decide("moving", site="sg-2", hours=24)).decision
    await tour.draw(decision)
    used = next(item["value"] for item in decision["evidence"] if item["name"] == "cost")["estimate_minor"]
    tour.say(
        f"read first {_euro(before + 100)}, found by the fence {_euro(before + 200)}, decided on {_euro(used)}"
    )
    tour.expect(decision["fence"]["rounds"] == 2, f"{decision['fence']['rounds']} rounds of the policy")
    tour.expect(
        used == before + 200, f"the price is made of the cost that held at commit: {_price(decision)}"
    )


async def the_same_key(tour: Tour) -> None:
    """The same key again. A client that lost the answer repeats its request, as often as it likes."""
    assert tour.first is not None
    key, body, first = tour.first
    before = len(await tour.ledger())
    again = await tour.send(key, body)
    tour.expect(
        again.body == first.body and again.replayed, f"the same {len(first.body)} bytes, byte for byte"
    )
    tour.expect(len(await tour.ledger()) == before, "nothing was sent")


Scene = Callable[[Tour], Awaitable[None]]
SCENES: tuple[Scene, ...] = (
    a_quote,
    two_writers,
    a_slow_optional_reading,
    a_lost_answer,
    a_moving_cost,
    the_same_key,
)


async def tour(demo: Demo, out: Console, *, quiet: bool = False) -> Result:
    """Take the tour. ``quiet`` draws nothing."""
    began_quiet, out.quiet = out.quiet, quiet
    try:
        async with aiohttp.ClientSession() as http:
            taken = Tour(demo, http, out)
            for number, scene in enumerate(SCENES, start=1):
                title, _, explanation = (scene.__doc__ or "").partition(".")
                out.print(Rule(f"{number} · {title}", align="left", style="blue"))
                taken.say(explanation.strip(), "italic")
                out.print()
                await _play(scene, taken)
                out.print()
            return await _compare(taken)
    finally:
        out.quiet = began_quiet


async def _play(scene: Scene, tour: Tour) -> None:
    try:
        await scene(tour)
    except Refused as refused:
        tour.complain(str(refused))


async def _compare(tour: Tour) -> Result:
    """The provider's ledger against our receipts, key by key: all of them, of earlier tours too."""
    tour.out.print(Rule("The provider's ledger beside our receipts", align="left", style="blue"))
    ledger = await tour.ledger()
    operations = {op["key"]: op async for op in tour.all("operations")}
    receipts = {r["operation"]: r async for r in tour.all("receipts", kind="operation.succeeded")}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "happened", "payload", "our state", "attempts", "receipt"):
        table.add_column(column, no_wrap=column == "key", overflow="fold")
    matched = 0
    for key in sorted({*ledger, *operations}):
        effect, operation = ledger.get(key), operations.get(key)
        receipt = receipts.get(operation["id"]) if operation else None
        wrong = _disagreement(effect, operation, receipt)
        matched += wrong is None and effect is not None
        if wrong:
            tour.complain(f"{key}: {wrong}")
        if operation is None or operation["id"] in tour.operations:
            table.add_row(*_row(key, effect, operation, receipt, wrong))
    tour.out.print(Padding(table, (0, 0, 1, 2)))
    agrees = not tour.complaints
    earlier = len(ledger) - table.row_count
    also = f", {earlier} of them from before" if earlier > 0 else ""
    tour.say(
        f"{matched} of {len(ledger)} effects have happened once, with their receipt{also}",
        "bold green" if agrees else "bold red",
    )
    return Result(agrees=agrees, complaints=tour.complaints, effects=len(ledger), matched=matched)


def _disagreement(effect: Any, operation: Any, receipt: Any) -> str | None:
    if operation is None:
        return "the provider has an effect that we know nothing of"
    if effect is None:
        return "we say that it succeeded, the provider knows nothing of it" if receipt else None
    if effect["count"] != 1:
        return f"happened {effect['count']} times"
    if operation["state"] != "succeeded" or receipt is None:
        return f"it happened, and we say {operation['state']}"
    if digest(canonical(effect["payload"])) != operation["payload_hash"]:
        return "the provider was sent something else than was committed"
    return None


def _row(key: str, effect: Any, operation: Any, receipt: Any, wrong: str | None) -> list[Text | str]:
    return [
        Text(key, "red" if wrong else ""),
        f"{effect['count']} ×" if effect else "–",
        Text(operation["payload_hash"][7:19] if operation else "–", "dim"),
        operation["state"] if operation else "–",
        str(operation["attempts"]) if operation else "–",
        f"#{receipt['index']}" if receipt else "–",
    ]


def _price(decision: Mapping[str, Any]) -> str:
    outcome = decision.get("outcome") or {}
    if not (price := (outcome.get("terms") or {}).get("price")):
        return str(outcome.get("reason") or decision["status"])
    return money(price["amount_minor"], price["currency"])


def _euro(cents: int) -> str:
    return money(cents, "EUR")
