"""What the scenes of the tour need: the service, the providers, a place to draw, and a list of complaints."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from coordinator.cli.picture import picture
from coordinator.demo.run import Demo

SETTLED = frozenset({"succeeded", "failed", "cancelled", "compensated"})
PATIENCE_S = 20.0
POLL_S = 0.05


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

    async def review(self, decision: Mapping[str, Any], verdict: str, *, scope: str = "review") -> Reply:
        """A verdict on the decision as it was shown, by the key of that scope."""
        headers = {
            "Authorization": f"Bearer {self.demo.keys[scope]}",
            "If-Match": f'"{decision["review"]["etag"]}"',
        }
        url = f"{self.demo.url}/v1/decisions/{decision['id']}/review"
        async with self._http.post(url, json={"verdict": verdict, "note": "tour"}, headers=headers) as answer:
            reply = Reply(answer.status, await answer.read(), replayed=False)
        self.operations += [op["id"] for op in reply.json.get("operations", ())]
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
