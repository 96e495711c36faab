"""Dispatch: at most one effect per key under the sink's guarantee (I5), none before its COMMIT (I6), and each ends or is parked with
a reason (I7); a lost lease sends nothing (I8)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import asyncpg
import pytest
from uuid_utils.compat import uuid7

from adapters.webhook import WebhookSink
from coordinator.config import Settings
from coordinator.core.canonical import digest
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Guarantee,
    Keyed,
    Lookup,
    LookupResult,
    NotFound,
    NotSent,
    Operation,
    Rejected,
    SendResult,
    Unguarded,
    keyed,
)
from coordinator.demo.launch import Providers
from coordinator.engine.service import Rested
from coordinator.store.database import Database, open_database
from coordinator.store.lease import Claim, claim_operations
from tests.engine.harness import Gate, Sent, running, sending, service_of
from tests.store.given import kinds_of
from tests.support import eventually

FAST = {"poll_ms": 10}
AMBIGUOUS = Ambiguous("timed-out", "no answer")


async def rested(root: asyncpg.Connection, *states: str) -> asyncpg.Record:
    """The only operation, once nobody holds it and it is in one of these states."""

    async def there() -> asyncpg.Record | None:
        return await root.fetchrow(
            "SELECT * FROM operations WHERE lease_owner IS NULL AND state = ANY ($1::text[])", states
        )

    row: asyncpg.Record = await eventually(there, what=f"the operation is {' or '.join(states)}")
    return row


async def first_then_accept(operation: Operation, n: int) -> SendResult:
    return AMBIGUOUS if n == 1 else Accepted("ref-7")


async def always_ambiguous(operation: Operation, n: int) -> SendResult:
    return AMBIGUOUS


async def test_an_effect_is_sent_once_with_the_payload_that_was_committed(
    database_url: str, root: asyncpg.Connection, root_url: str
) -> None:
    async def committed_by_now(operation: Operation, n: int) -> SendResult:
        connection = await asyncpg.connect(root_url)
        row = await connection.fetchrow(
            "SELECT state, payload_hash FROM operations WHERE id = $1", UUID(operation.id)
        )
        await connection.close()
        assert row is not None, "no effect without a committed operation"
        assert (row["state"], row["payload_hash"]) == ("dispatching", digest(operation.payload))
        return Accepted("ref-1")

    sink = Sent(perform=committed_by_now)
    async with running(service_of(policy=sending, effects=[sink]), database_url) as service:
        decision = await service.decided(value=3)
        row = await rested(root, "succeeded")
        shown = await service.shown(decision["id"])
        receipts = await kinds_of(root, service.tenant, operation=row["id"])
    assert (row["reference"], row["sends"], row["key"]) == ("ref-1", 1, f"{decision['id']}.send.0")
    assert [operation.payload for operation in sink.sends] == [b'{"value":3}']
    assert [operation["state"] for operation in shown["operations"]] == ["succeeded"]
    assert receipts == ["operation.dispatching", "operation.succeeded"]


async def test_ambiguous_under_keyed_is_sent_again_with_the_same_key(
    database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent(keyed(hours=24), first_then_accept)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        row = await rested(root, "succeeded")
        receipts = await kinds_of(root, service.tenant, operation=row["id"])
    assert len({operation.key for operation in sink.sends}) == 1
    assert [operation.attempt for operation in sink.sends] == [1, 2]
    assert row["sends"] == 2
    assert receipts == [
        "operation.dispatching",
        "operation.ready",
        "operation.dispatching",
        "operation.succeeded",
    ]


@pytest.mark.parametrize("guarantee", [Unguarded(), Keyed(window_ms=1)])
async def test_ambiguous_without_a_guarantee_is_parked_with_a_reason_and_never_sent_again(
    guarantee: Guarantee, database_url: str, root: asyncpg.Connection
) -> None:
    """No guarantee, or one whose window is over. A later operation that has to be sent twice shows that the loop which sends what
    is due went round meanwhile."""

    async def perform(operation: Operation, n: int) -> SendResult:
        if operation.payload == b'{"value":0}':
            return AMBIGUOUS
        return NotSent("down", "it is down") if operation.attempt == 1 else Accepted("ref")

    sink = Sent(guarantee, perform)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided("parked", 0)
        row = await rested(root, "uncertain")
        await service.decided("later", 1)
        await eventually(lambda: len([op for op in sink.sends if op.attempt == 2]) == 1)
        later = await root.fetchrow("SELECT * FROM operations WHERE id = $1", row["id"])
    assert (row["due_at"], row["in_doubt"]) == (None, True)
    assert "no answer" in row["reason"]
    assert later == row
    assert len([op for op in sink.sends if op.id == str(row["id"])]) == 1


async def test_what_was_not_sent_is_tried_again_and_a_rejection_is_final(
    database_url: str, root: asyncpg.Connection
) -> None:
    async def perform(operation: Operation, n: int) -> SendResult:
        return NotSent("refused", "nobody listens") if n < 3 else Rejected("closed", "the account is closed")

    sink = Sent(perform=perform)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        row = await rested(root, "failed")
    assert (row["sends"], row["reason"], len(sink.sends)) == (3, "closed: the account is closed", 3)


async def test_an_ambiguous_send_is_looked_up_and_found(database_url: str, root: asyncpg.Connection) -> None:
    async def found(operation: Operation, n: int) -> LookupResult:
        return Accepted("ref-9")

    sink = Sent(Lookup(lag_ms=1), always_ambiguous, found, timeout_ms=1)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        row = await rested(root, "succeeded")
    assert (row["reference"], row["sends"], row["lookups"]) == ("ref-9", 1, 1)
    assert len(sink.sends) == 1
    assert {operation.key for operation in sink.lookups} == {row["key"]}


async def test_what_the_provider_proves_not_to_know_is_sent_again_under_the_same_key(
    database_url: str, root: asyncpg.Connection
) -> None:
    sink = Sent(Lookup(lag_ms=1), first_then_accept, timeout_ms=1)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        row = await rested(root, "succeeded")
    assert (row["sends"], row["in_doubt"]) == (2, False)
    assert len({operation.key for operation in sink.sends}) == 1


async def test_a_provider_that_cannot_be_asked_either_leaves_it_uncertain_and_unsent(
    database_url: str, root: asyncpg.Connection
) -> None:
    async def no_answer(operation: Operation, n: int) -> LookupResult:
        return AMBIGUOUS

    sink = Sent(Lookup(lag_ms=1), always_ambiguous, no_answer, timeout_ms=1)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        await eventually(lambda: len(sink.lookups) >= 2)
        row = await rested(root, "uncertain")
    assert (row["sends"], len(sink.sends)) == (1, 1)
    assert row["reason"]


@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_a_sink_that_raises_or_hangs_is_ambiguous_never_failed(
    fault: str, database_url: str, root: asyncpg.Connection
) -> None:
    async def perform(operation: Operation, n: int) -> SendResult:
        if fault == "raises":
            raise RuntimeError("after\x00 sending")
        await asyncio.Event().wait()
        raise AssertionError

    sink = Sent(Unguarded(), perform, timeout_ms=20)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        row = await rested(root, "uncertain")
        provider = service.service._holdings.engine.providers.of("send")
        await eventually(lambda: (provider.busy, provider.waiting) == (0, 0))
    assert row["reason"].startswith("sink-raised" if fault == "raises" else "timed-out")
    assert row["reason"].isprintable()
    assert len(sink.sends) == 1


async def take_over(database: Database, tenant: UUID, root: asyncpg.Connection, op: UUID) -> None:
    """Another process takes the operation, its lease having run out, and keeps it."""
    await root.execute("UPDATE operations SET lease_expires_at = '-infinity' WHERE id = $1", op)
    async with database.transaction(tenant) as connection:
        (claimed,) = await claim_operations(connection, tenant, Claim(uuid7(), 60_000, ["quote"]), limit=1)
    assert claimed.id == op


async def test_an_operation_that_was_taken_over_while_it_waited_is_not_sent_by_its_old_holder(
    database_url: str, root: asyncpg.Connection
) -> None:
    """It waits for the provider's one slot; meanwhile its lease is lost, and a late renewal does not revive it."""
    gate = Gate()

    async def slow(operation: Operation, n: int) -> SendResult:
        await gate()
        return Accepted("ref")

    sink = Sent(Unguarded(), slow, timeout_ms=60_000)
    settings: dict[str, Any] = {"provider_concurrency": 1, "lease_ms": 900}
    async with (
        open_database(database_url, Settings(pool_size=1)) as another,
        running(service_of(policy=sending, effects=[sink]), database_url, **settings) as service,
    ):
        await service.decided("first")
        await gate.arrived.wait()
        second = await service.decided("second")
        provider = service.service._holdings.engine.providers.of("send")
        await eventually(lambda: provider.waiting == 1)
        op = await root.fetchval("SELECT id FROM operations WHERE decision_id = $1", UUID(second["id"]))
        await take_over(another, service.tenant, root, op)
        renewed = "SELECT lease_expires_at FROM operations WHERE id <> $1"
        before = await root.fetchval(renewed, op)

        async def renewal_has_been() -> bool:
            return bool(await root.fetchval(renewed, op) > before)

        await eventually(renewal_has_been)
        gate.open()
        await eventually(lambda: (provider.busy, provider.waiting) == (0, 0))
        await rested(root, "succeeded")
    assert [operation.decision_id for operation in sink.sends] != []
    assert second["id"] not in {operation.decision_id for operation in sink.sends}


async def test_an_operation_of_a_lost_holder_is_treated_as_possibly_sent(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()

    async def hanging(operation: Operation, n: int) -> SendResult:
        if n == 1:
            await gate()
        return Accepted("ref")

    sink = Sent(Unguarded(), hanging, timeout_ms=60_000)
    coordinator = service_of(policy=sending, effects=[sink])
    async with running(coordinator, database_url) as first:
        await first.decided()
        await gate.arrived.wait()
        await root.execute("UPDATE operations SET lease_expires_at = '-infinity'")
        async with running(coordinator, database_url, **FAST):
            parked = await rested(root, "uncertain")
        gate.open()
        late = await rested(root, "succeeded")
    assert parked["reason"].startswith("holder-lost")
    assert (len(sink.sends), late["reference"]) == (1, "ref"), "what the old holder learnt wins in the end"


async def test_an_effect_that_nobody_declares_any_more_is_parked(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()

    async def hanging(operation: Operation, n: int) -> SendResult:
        await gate()
        return NotSent("down", "down")

    with_sink = service_of(policy=sending, effects=[Sent(perform=hanging)])
    async with running(with_sink, database_url, drain_s=0) as service:
        await service.decided()
        await gate.arrived.wait()
    async with running(service_of(), database_url, **FAST):
        row = await rested(root, "uncertain")
    assert "no effect 'send' is declared" in row["reason"]


@pytest.mark.parametrize(
    ("fault", "sends"), [({}, 1), ({"lose_answer": True, "times": 1}, 2), ({"status": 503, "times": 1}, 2)]
)
async def test_a_real_provider_has_each_effect_exactly_once(
    fault: dict[str, Any], sends: int, database_url: str, root: asyncpg.Connection, tmp_path: Path
) -> None:
    with Providers(tmp_path) as providers:
        sink = WebhookSink("send", f"{providers.url}/effects/send", guarantee=keyed(hours=24))
        async with aiohttp.ClientSession(providers.url) as outside:
            if fault:
                await outside.put("/control", json={"/effects/send": fault})
            async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:  # type: ignore[list-item]  # any sink will do
                assert isinstance(await service.post(value=5), Rested)
                row = await rested(root, "succeeded")
            ledger = await (await outside.get("/ledger")).json()
    assert [(item["key"], item["count"], item["payload"]) for item in ledger["items"]] == [
        (row["key"], 1, {"value": 5})
    ]
    assert row["sends"] == sends


async def test_not_found_is_not_believed_before_the_lag_is_over(
    database_url: str, root: asyncpg.Connection
) -> None:
    """Asked at once, although its effect may still become visible: no proof, no second send."""

    async def never(operation: Operation, n: int) -> LookupResult:
        return NotFound()

    sink = Sent(Lookup(lag_ms=600_000), always_ambiguous, never, timeout_ms=1)
    async with running(service_of(policy=sending, effects=[sink]), database_url, **FAST) as service:
        await service.decided()
        await rested(root, "uncertain")
        await root.execute("UPDATE operations SET due_at = '-infinity'")
        await eventually(lambda: len(sink.lookups) == 1)
        row = await rested(root, "uncertain")
    assert (len(sink.sends), row["sends"]) == (1, 1)
    assert row["due_at"] is not None
