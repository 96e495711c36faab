"""What the interleavings are made of: two services on one database, sinks at a real provider whose calls a test holds back, and
what happened outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal
from uuid import UUID

import aiohttp
import asyncpg
import msgspec

from adapters.webhook import WebhookSink
from coordinator import Commit, Coordinator, Effect, Outcome, Packet, Record, decision_type
from coordinator.core.effect import Guarantee, LookupResult, Operation, SendResult, Sink, lookup_lag_ms
from tests.engine.harness import Gate
from tests.support import eventually

PATIENT: dict[str, Any] = {"lease_ms": 60_000, "poll_ms": 600_000, "retries_per_minute": 0}
"""A service that keeps what it holds, looks for work only when something of its own falls due, and repeats nothing this minute."""
EAGER: dict[str, Any] = {"lease_ms": 60_000, "poll_ms": 10}
"""A service that takes whatever nobody holds at once."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``undo``: the effects that declare `undo` as their compensation."""

    effects: list[str]
    undo: list[str] = []
    on_failure: Literal["keep", "compensate"] = "keep"
    payload: str = ""


def place(order: Order, packet: Packet, record: Record[Any]) -> Outcome:
    effects = [
        Effect(
            name,
            {"text": order.payload},
            compensation=Effect("undo", {"of": name}) if name in order.undo else None,
        )
        for name in order.effects
    ]
    return Commit({"ok": True}, effects=effects, on_failure=order.on_failure)


def placing(*sinks: Sink) -> Coordinator:
    """A coordinator whose decisions ask for the effects that their input names."""
    declared = decision_type(
        "quote", request=Order, policy=place, policy_version="1", evidence=[], effects=sinks
    )
    return Coordinator([declared])


class Held:
    """A sink of which a test holds back the calls ``before`` the provider hears of them, or ``after`` it has answered."""

    def __init__(self, sink: Sink, *, before: Gate | None = None, after: Gate | None = None) -> None:
        self.name = sink.name
        self.provider = sink.provider
        self.guarantee = sink.guarantee
        self.timeout_ms = 60_000
        self._sink = sink
        self._before = before
        self._after = after

    async def perform(self, operation: Operation) -> SendResult:
        if self._before is not None:
            await self._before()
        result = await self._sink.perform(operation)
        if self._after is not None:
            await self._after()
        return result

    async def lookup(self, operation: Operation) -> LookupResult:
        return await self._sink.lookup(operation)


class Outside:
    """The provider's side: its sinks, its faults, and what really happened there since the test began."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str) -> AsyncIterator[Outside]:
        async with aiohttp.ClientSession() as session:
            yield cls(url, session)

    def sink(self, name: str, guarantee: Guarantee, *, timeout_ms: int = 500) -> WebhookSink:
        url = f"{self.url}/effects/{name}"
        lookup = None if lookup_lag_ms(guarantee) is None else url + "/{key}"
        return WebhookSink(
            name, url, guarantee=guarantee, lookup_url=lookup, timeout_ms=timeout_ms, provider=name
        )

    async def faults(self, table: Mapping[str, Mapping[str, Any]]) -> None:
        async with self._session.put(self.url + "/control", json=table) as response:
            assert response.status == 200, await response.text()

    async def count(self, key: str) -> int:
        """How often the effect with this key happened."""
        async with self._session.get(self.url + "/ledger") as response:
            items = (await response.json())["items"]
        return sum(item["count"] for item in items if item["key"] == key)

    async def calls(self) -> int:
        """How many calls for effects the provider is busy with."""
        async with self._session.get(self.url + "/stats") as response:
            return int((await response.json())["effects"]["concurrent"])


class Look:
    """At the operations in the database, past the service."""

    def __init__(self, root: asyncpg.Connection) -> None:
        self.root = root

    async def at(self, effect: str = "send", decision: str | None = None) -> asyncpg.Record:
        """The operation with this effect, of one decision if there are several."""
        (row,) = await self._rows(effect, decision)
        return row

    async def _rows(self, effect: str, decision: str | None) -> list[asyncpg.Record]:
        return await self.root.fetch(
            "SELECT * FROM operations WHERE effect = $1 AND ($2::uuid IS NULL OR decision_id = $2)",
            effect,
            decision and UUID(decision),
        )

    async def until(self, *states: str, effect: str = "send", decision: str | None = None) -> asyncpg.Record:
        """The operation, once it is in one of these states and nobody holds it."""

        async def there() -> list[asyncpg.Record]:
            rows = await self._rows(effect, decision)
            return [row for row in rows if row["state"] in states and row["lease_owner"] is None]

        (found,) = await eventually(there, what=f"{effect} is {' or '.join(states)}")
        return found

    async def receipts(self, op: UUID) -> list[dict[str, Any]]:
        """Of one operation, in the order of the log."""
        rows = await self.root.fetch(
            "SELECT kind, body FROM receipts WHERE operation_id = $1 ORDER BY index", op
        )
        return [{**msgspec.json.decode(row["body"]), "kind": row["kind"]} for row in rows]

    async def until_receipt(self, op: UUID, kind: str) -> dict[str, Any]:
        """The first receipt of this kind, once it is there."""

        async def there() -> list[dict[str, Any]]:
            return [receipt for receipt in await self.receipts(op) if receipt["kind"] == kind]

        found: list[dict[str, Any]] = await eventually(there, what=f"a receipt {kind}")
        return found[0]

    async def expire(self, op: UUID) -> None:
        """Its holder is silent for longer than its lease, as far as the database knows."""
        await self.root.execute("UPDATE operations SET lease_expires_at = '-infinity' WHERE id = $1", op)

    async def age(self, op: UUID, by: str = "2 days") -> None:
        """It was committed that long ago, and what was planned for it is due."""
        await self.root.execute(
            "UPDATE operations SET created_at = created_at - $2::text::interval, due_at = clock_timestamp() - interval '1 ms'"
            " WHERE id = $1",
            op,
            by,
        )

    async def make_due(self) -> None:
        """What was planned for any operation is due now."""
        await self.root.execute(
            "UPDATE operations SET due_at = clock_timestamp() - interval '1 ms' WHERE due_at IS NOT NULL"
        )


def kinds(receipts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [receipt["kind"].removeprefix("operation.") for receipt in receipts]
