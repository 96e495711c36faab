"""`tests.api.orders` served by a process of its own, with the demo providers beside it and a way to make them misbehave."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from coordinator.demo.launch import Providers
from tests.api.serving import Client, Reply, new_key, server, tenant
from tests.support.postgres import data_folder
from tests.support.waiting import eventually_now


@dataclass(frozen=True)
class Ordering:
    """``client`` has every scope of ``tenant``; ``stranger`` has them in another one."""

    address: str
    url: str
    providers: str
    tenant: UUID
    client: Client
    stranger: Client

    def faults(self, **by_effect: dict[str, object]) -> None:
        """Replace all faults of the providers by these."""
        table = {f"/effects/{name}": fault for name, fault in by_effect.items()}
        request = urllib.request.Request(
            f"{self.providers}/control",
            json.dumps(table).encode(),
            {"Content-Type": "application/json"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def happened(self, key: str) -> int:
        """How often an effect with this key really happened."""
        with urllib.request.urlopen(f"{self.providers}/ledger", timeout=10) as answer:
            items = json.load(answer)["items"]
        return sum(item["count"] for item in items if item["key"] == key)

    def order(self, *effects: str, type: str = "order", **options: object) -> str:
        """The id of a committed decision with these effects."""
        record = {"kind": "order", "id": new_key()}
        body = {"type": type, "input": {"effects": effects, **options}, "record": record}
        made = self.client.decide(body)
        assert made.status == 201, made.body
        id: str = made.json["id"]
        return id

    def operations(self, decision: str) -> dict[str, dict[str, Any]]:
        """The operations of a decision, in full, by effect."""
        listed = self.client.get(f"/v1/decisions/{decision}").json["operations"]
        return {op["effect"]: self.client.get(f"/v1/operations/{op['id']}").json for op in listed}

    def once(self, decision: str, **states: str) -> dict[str, dict[str, Any]]:
        """The same, once the named effects (with _ for -) are in these states."""
        wanted = {effect.replace("_", "-"): state for effect, state in states.items()}

        def there() -> dict[str, dict[str, Any]] | None:
            found = self.operations(decision)
            now = {effect: found[effect]["state"] for effect in wanted if effect in found}
            return found if now == wanted else None

        return eventually_now(there, what=str(wanted)) or {}

    def uncertain_charge(self) -> dict[str, Any]:
        """An operation of which nobody knows whether it happened; in truth it did."""
        self.faults(charge={"lose_answer": True, "times": 1})
        return self.once(self.order("charge"), charge="uncertain")["charge"]

    def post(self, operation: str, verb: str, body: object) -> Reply:
        return self.client.call("POST", f"/v1/operations/{operation}/{verb}", body)

    def kinds(self, operation: str) -> list[str]:
        """The kinds of an operation's receipts."""
        items = self.client.get(f"/v1/receipts?operation={operation}").json["items"]
        return [item["kind"] for item in items]

    def last_receipt(self, operation: str) -> Any:
        return self.client.get(f"/v1/receipts?operation={operation}").json["items"][-1]["body"]


@contextmanager
def serving_orders(url: str) -> Iterator[Ordering]:
    (first, key), (_, strange) = (asyncio.run(tenant(url, name)) for name in ("first", "second"))
    with data_folder() as folder, Providers(folder / "providers") as providers:
        path, env = "tests.api.orders:coordinator", {"COORDINATOR_PROVIDERS_URL": providers.url}
        with server(url, path=path, env=env) as (address, _):
            yield Ordering(address, url, providers.url, first, Client(address, key), Client(address, strange))
