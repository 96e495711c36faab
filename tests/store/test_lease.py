"""Leases: one holder each (I15), a token that rises with every claim (I8), and nothing that a lost lease can still do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.store.database import Database, open_database
from coordinator.store.lease import Claim, ClaimedOperation, claim_operations, release, renew
from coordinator.store.queue import Claimed, requeue_expired, requeue_held
from tests.store.given import (
    OWNER,
    admitted,
    claim_queued,
    expire,
    kinds_of,
    promised,
    settle_all,
    settlement,
)

TYPES = ["quote"]


async def claim(
    database: Database, tenant: UUID, *, limit: int = 10, types: Sequence[str] = TYPES
) -> Sequence[Claimed]:
    """Take over what silent processes held: through the queue."""
    await database.run(tenant, lambda conn: requeue_expired(conn, tenant, limit=limit))
    return await claim_queued(database, tenant, *["interactive"] * limit, owner=uuid7(), types=types)


async def claim_ops(
    database: Database, tenant: UUID, *, limit: int = 10, types: Sequence[str] = TYPES
) -> Sequence[ClaimedOperation]:
    wish = Claim(uuid7(), 30_000, types)
    return await database.run(tenant, lambda conn: claim_operations(conn, tenant, wish, limit=limit))


async def test_a_decision_whose_lease_runs_is_left_alone(database: Database, tenant: UUID) -> None:
    await admitted(database, tenant)
    assert await claim(database, tenant) == []


async def test_each_claim_raises_the_token_and_writes_one_receipt(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    for expected in (3, 5, 7):  # it goes up when a lost lease is taken away, too
        await expire(root, decision)
        (claimed,) = await claim(database, tenant)
        assert (claimed.id, claimed.token) == (decision, expected)
    assert await kinds_of(root, tenant) == ["decision.running", *["decision.queued", "decision.running"] * 3]


async def test_a_locked_row_is_skipped_not_waited_for(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    locked, free = await admitted(database, tenant), await admitted(database, tenant)
    await expire(root, locked, free)
    async with root.transaction():
        await root.execute("SELECT FROM decisions WHERE id = $1 FOR UPDATE", locked)
        assert [claimed.id for claimed in await claim(database, tenant)] == [free]
    assert [claimed.id for claimed in await claim(database, tenant)] == [locked]


async def test_two_claimers_never_share_a_row(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    async with open_database(database_url, Settings(pool_size=8)) as database:
        pairs = [await promised(database, tenant) for _ in range(20)]
        ids = {await admitted(database, tenant) for _ in range(20)}
        await expire(root, *ids, *(op.id for _, op in pairs))
        batches = await asyncio.gather(*(claim(database, tenant, limit=4) for _ in range(8)))
        of_operations = await asyncio.gather(*(claim_ops(database, tenant, limit=4) for _ in range(8)))
    taken = [claimed.id for batch in batches for claimed in batch]
    assert len(taken) == len(set(taken))
    assert set(taken) <= ids
    taken_operations = [claimed.id for batch in of_operations for claimed in batch]
    assert len(taken_operations) == len(set(taken_operations))
    tokens = await root.fetch("SELECT fencing_token FROM decisions WHERE id = ANY ($1::uuid[])", taken)
    assert {row["fencing_token"] for row in tokens} <= {3}


async def test_only_declared_types_are_claimed(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant, type="of-another-version")
    _, op = await promised(database, tenant)
    await expire(root, decision, op.id)
    assert await claim(database, tenant) == []
    assert await claim_ops(database, tenant, types=["of-another-version"]) == []
    assert len(await claim(database, tenant, types=["of-another-version"])) == 1


async def test_a_resting_decision_is_never_claimed(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    await settle_all(database, tenant, settlement(decision, op, "succeeded"))
    await expire(root, decision, op.id)
    assert await claim(database, tenant) == []
    assert await claim_ops(database, tenant) == []


async def test_an_operation_is_claimed_when_its_lease_ran_out_or_when_it_is_due(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    (_, lost), (d2, due), (d3, later), (d4, parked), (d5, asked) = [
        await promised(database, tenant) for _ in range(5)
    ]
    await settle_all(
        database,
        tenant,
        settlement(d2, due, "ready", due_ms=-1),
        settlement(d3, later, "ready", due_ms=60_000),
        settlement(d4, parked, "uncertain", due_ms=None),
        settlement(d5, asked, "uncertain", due_ms=-1),
    )
    await expire(root, lost.id)
    claimed = {one.id: (one.was, one.token) for one in await claim_ops(database, tenant)}
    assert claimed == {lost.id: ("dispatching", 2), due.id: ("ready", 2), asked.id: ("uncertain", 2)}
    states = {row["id"]: row["state"] for row in await root.fetch("SELECT id, state FROM operations")}
    assert (states[lost.id], states[due.id], states[asked.id]) == ("dispatching", "dispatching", "uncertain")


async def test_a_lease_is_renewed_for_its_owner(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    _, op = await promised(database, tenant)
    await expire(root, decision, op.id)
    async with database.transaction(tenant) as connection:
        renewed = await renew(
            connection, tenant, owner=OWNER, lease_ms=30_000, decisions=[decision], operations=[op.id]
        )
    assert renewed == {op.id}
    assert await claim(database, tenant) == []
    assert await claim_ops(database, tenant) == []


async def test_a_renewal_after_the_loss_does_nothing_and_says_so(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    settled, done = await promised(database, tenant)
    _, op = await promised(database, tenant)
    await settle_all(database, tenant, settlement(settled, done, "succeeded"))
    await expire(root, decision, op.id)
    await claim(database, tenant)
    await claim_ops(database, tenant)
    query = "SELECT lease_owner, lease_expires_at FROM {} WHERE lease_owner IS NOT NULL"
    before = [await root.fetch(query.format(table)) for table in ("decisions", "operations")]
    async with database.transaction(tenant) as connection:
        renewed = await renew(
            connection,
            tenant,
            owner=OWNER,
            lease_ms=90_000,
            decisions=[decision],
            operations=[op.id, done.id],
        )
    assert renewed == set()
    assert [await root.fetch(query.format(table)) for table in ("decisions", "operations")] == before


async def test_what_is_let_go_can_be_claimed_at_once_but_not_by_a_stranger_to_it(
    database: Database, tenant: UUID
) -> None:
    decision = await admitted(database, tenant)
    _, op = await promised(database, tenant)
    for owner, expected in ((uuid7(), 0), (OWNER, 1)):
        async with database.transaction(tenant) as connection:
            await requeue_held(connection, tenant, owner, [decision], "process-stopped")
            await release(connection, tenant, owner, [op.id])
        assert len(await claim(database, tenant)) == expected
        assert len(await claim_ops(database, tenant)) == expected


async def test_a_foreign_tenants_work_is_not_claimed(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    _, op = await promised(database, tenant)
    await expire(root, decision, op.id)
    assert await claim(database, stranger) == []
    assert await claim_ops(database, stranger) == []
