"""The payments example against the demo's providers: what can be undone is undone, and what can't says so (I5, I7)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from aiohttp import ClientSession

from coordinator.demo.launch import Providers
from coordinator.demo.payments import payments
from coordinator.errors import StateConflict
from tests.engine.harness import Running, running
from tests.support.waiting import eventually

BODY: dict[str, Any] = {
    "type": "take-payment",
    "input": {"customer": "c-1", "amount": {"amount_minor": 12_00, "currency": "SGD"}},
    "record": {"kind": "order", "id": "o-1"},
}
NO = {"status": 422}


@pytest.fixture
async def providers(tmp_path: Path) -> AsyncIterator[Providers]:
    async with Providers(tmp_path) as started:
        yield started


async def pay(
    paying: Running, providers: Providers, settled: dict[str, str], **refused: object
) -> dict[str, Any]:
    """The decision's operations by effect, once they are in these states. ``refused``: what the provider refuses for good."""
    async with ClientSession() as client:
        faults = {f"POST /effects/{name}": fault for name, fault in refused.items()}
        assert (await client.put(f"{providers.url}/control", json=faults)).status < 300
    decision = await paying.decided(**BODY)
    assert decision["status"] == "committed", decision

    async def as_hoped() -> dict[str, Any]:
        operations = {each["effect"]: each for each in (await paying.shown(decision["id"]))["operations"]}
        assert {name: each["state"] for name, each in operations.items()} == settled
        return operations

    return await eventually(as_hoped)


async def ledger(providers: Providers) -> dict[str, int]:
    async with ClientSession() as client, client.get(f"{providers.url}/ledger") as answer:
        return {item["name"]: item["count"] for item in (await answer.json())["items"]}


async def test_a_payment_is_authorised_captured_and_dispatched(
    providers: Providers, database_url: str
) -> None:
    async with running(payments(providers.url), database_url) as paying:
        await pay(paying, providers, dict.fromkeys(("authorise", "capture", "dispatch"), "succeeded"))
        assert await ledger(providers) == {"authorise": 1, "capture": 1, "dispatch": 1}
        again = await paying.decided("another", **BODY)
        assert (again["status"], again["outcome"]["reason"]) == (
            "declined",
            "this order is being paid already",
        )


async def test_a_failing_capture_voids_the_authorisation_and_what_cannot_be_undone_says_so(
    providers: Providers, database_url: str
) -> None:
    settled = {"authorise": "compensated", "capture": "failed", "dispatch": "succeeded", "void": "succeeded"}
    async with running(payments(providers.url), database_url) as paying:
        operations = await pay(paying, providers, settled, capture=NO)
        assert await ledger(providers) == {"authorise": 1, "void": 1, "dispatch": 1}
        dispatched = UUID(operations["dispatch"]["id"])
        with pytest.raises(StateConflict, match="dispatch declares no compensation: it cannot be undone"):
            await paying.service.operations.compensate(paying.caller, dispatched, "the capture failed")


async def test_a_void_that_fails_leaves_the_authorisation_standing_with_the_reason(
    providers: Providers, database_url: str
) -> None:
    settled = {"authorise": "succeeded", "capture": "failed", "dispatch": "succeeded", "void": "failed"}
    async with running(payments(providers.url), database_url) as paying:
        operations = await pay(paying, providers, settled, capture=NO, void=NO)
        assert await ledger(providers) == {"authorise": 1, "dispatch": 1}
        with pytest.raises(StateConflict, match="its compensation void failed"):
            await paying.service.operations.compensate(
                paying.caller, UUID(operations["authorise"]["id"]), "by hand"
            )


async def test_a_failing_authorisation_captures_nothing(providers: Providers, database_url: str) -> None:
    settled = {"authorise": "failed", "capture": "cancelled", "dispatch": "succeeded"}
    async with running(payments(providers.url), database_url) as paying:
        await pay(paying, providers, settled, authorise=NO)
        assert await ledger(providers) == {"dispatch": 1}
