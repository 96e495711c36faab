"""No transaction is open while a provider is called (I6), and a process that falls silent in the middle of one does not keep it."""

from __future__ import annotations

import asyncio

import asyncpg

from coordinator import failpoints
from tests.effects.given import EAGER, PATIENT, Look, Outside, placing
from tests.effects.test_interleavings import DAY, SEND
from tests.engine.harness import running
from tests.support import eventually

SLOW_MS = 1_000
OPEN_MS = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start) * 1000), 0)::int
FROM pg_stat_activity
WHERE application_name = 'coordinator' AND datname = current_database() AND state LIKE 'idle in transaction%'
"""


async def test_no_transaction_is_open_while_providers_are_slow(
    database_url: str, root: asyncpg.Connection, outside: Outside
) -> None:
    """Sixty operations are in flight at a provider that takes a second for each; what is sampled all the while is how old the oldest
    transaction is that waits for us. A transaction around a call would be as old as the call."""
    look = Look(root)
    await outside.faults({"POST /effects/send": {"delay_ms": SLOW_MS}})
    sink = outside.sink("send", DAY, timeout_ms=20_000)
    ages: list[int] = []
    busy: list[int] = []
    async with running(placing(sink), database_url, **{**EAGER, "pool_size": 8}) as service:
        deciding = [asyncio.ensure_future(service.decided(f"k{n}", input=SEND)) for n in range(60)]

        async def all_were_in_flight() -> bool:
            ages.append(await root.fetchval(OPEN_MS))
            busy.append(await outside.calls())
            return max(busy) == len(deciding) and busy[-1] == 0

        await eventually(all_were_in_flight, timeout=30)
        made = await asyncio.gather(*deciding)
        for decision in made:
            await look.until("succeeded", decision=decision["id"])
    assert len([calls for calls in busy if calls]) > 5, "it was looked at while calls were in flight"
    assert max(ages) < SLOW_MS / 2, ages


async def test_no_connection_is_held_while_providers_are_slow(
    database_url: str, root: asyncpg.Connection, outside: Outside
) -> None:
    """With one connection to the database, ten operations are in flight at once, and a decision is still made."""
    await outside.faults({"POST /effects/send": {"hang": True}})
    sink = outside.sink("send", DAY, timeout_ms=20_000)
    async with running(placing(sink), database_url, **{**PATIENT, "pool_size": 1}) as service:
        for n in range(10):
            await service.decided(f"k{n}", input=SEND)

        async def all_are_in_flight() -> bool:
            return await outside.calls() == 10

        await eventually(all_are_in_flight)
        assert (await service.decided("one-more", input={"effects": []}))["status"] == "committed"
        await outside.faults({})
        await eventually(lambda: service.service.idle)


async def test_a_process_that_falls_silent_inside_a_transaction_loses_it_and_others_go_on(
    database_url: str, root: asyncpg.Connection, outside: Outside
) -> None:
    """It hangs while it settles an operation, with its tenant's log locked: nothing of that tenant could be written meanwhile."""
    look = Look(root)
    sink = outside.sink("send", DAY, timeout_ms=5_000)
    silent = {**PATIENT, "lease_ms": 500, "drain_s": 0}
    failpoints.arm("settle.before=hang")
    async with (
        running(placing(sink), database_url, **silent) as first,
        running(placing(sink), database_url, **{**EAGER, "lease_ms": 500}) as second,
    ):
        hanging = await first.decided("hangs", input=SEND)

        async def it_hangs() -> bool:
            return bool(await root.fetchval(OPEN_MS))

        await eventually(it_hangs)
        other = await second.decided("goes-on", input=SEND)
        rows = [await look.until("succeeded", decision=id) for id in (hanging["id"], other["id"])]
    assert [await outside.count(row["key"]) for row in rows] == [1, 1]
