"""The queue in the database: who waits is held by nobody, is claimed once, in order, and is bounded exactly (I15, I16)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.store.admit import Admission, Admitted, Known, NoRoom, admit
from coordinator.store.commit import Committed, Superseded
from coordinator.store.database import Database, open_database
from coordinator.store.lease import Claim, tenants_with_work
from coordinator.store.queue import (
    claim_overdue,
    position,
    requeue_expired,
    requeue_held,
    running_of,
    waiting,
    waiting_of,
)
from tests.store.given import (
    OWNER,
    admission,
    admitted,
    claim_queued,
    commit_all,
    expire,
    kinds_of,
    proposal,
    queued,
)


async def admit_all(database: Database, tenant: UUID, *admissions: Admission) -> Sequence[object]:
    async with database.transaction(tenant) as connection:
        return await admit(connection, tenant, admissions)


async def depth_holds(root: asyncpg.Connection) -> bool:
    """Whether the counted depths are the numbers of queued rows."""
    wrong = await root.fetch(
        "SELECT FROM queues q FULL JOIN (SELECT tenant_id, class, count(*) AS n FROM decisions WHERE status = 'queued' GROUP BY 1, 2) d"
        " USING (tenant_id, class) WHERE coalesce(q.depth, 0) <> coalesce(d.n, 0)"
    )
    return not wrong


async def test_a_queued_decision_is_held_by_nobody_and_claimed_once_with_a_token(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    one = queued()
    await admit_all(database, tenant, one)
    row = await root.fetchrow("SELECT status, lease_owner, fencing_token FROM decisions")
    assert tuple(row) == ("queued", None, 0)
    (claimed,) = await claim_queued(database, tenant)
    assert (claimed.id, claimed.token, claimed.estimated_ms) == (one.id, 1, 100)
    assert await claim_queued(database, tenant) == []
    row = await root.fetchrow("SELECT status, lease_owner, fencing_token FROM decisions")
    assert tuple(row) == ("running", OWNER, 1)
    assert await kinds_of(root, tenant) == ["decision.queued", "decision.running"]
    assert await depth_holds(root)


async def test_the_oldest_of_a_class_is_claimed_first_and_other_classes_are_left_alone(
    database: Database, tenant: UUID
) -> None:
    bulk = queued(class_="bulk")
    waiting = [queued() for _ in range(5)]
    await admit_all(database, tenant, bulk)
    for one in waiting:
        await admit_all(database, tenant, one)
    first = await claim_queued(database, tenant, *["interactive"] * 3)
    second = await claim_queued(database, tenant, *["interactive"] * 3)
    assert [each.id for each in (*first, *second)] == [one.id for one in waiting]
    assert [each.id for each in await claim_queued(database, tenant, "bulk", "bulk")] == [bulk.id]


async def test_processes_that_claim_at_once_never_share_a_decision(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    async with open_database(database_url, Settings(pool_size=8)) as database:
        await admit_all(database, tenant, *(queued() for _ in range(60)))
        batches = await asyncio.gather(
            *(
                claim_queued(database, tenant, *["interactive"] * 7, owner=owner)
                for owner in [uuid7() for _ in range(8)]
            )
        )
    taken = [each.id for batch in batches for each in batch]
    assert len(taken) == len(set(taken)) == 56
    assert await depth_holds(root)


async def test_no_more_are_queued_than_may_be_however_many_ask_at_once(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    async with open_database(database_url, Settings(pool_size=8)) as database:
        results = await asyncio.gather(
            *(admit_all(database, tenant, *(queued(queue_depth=10) for _ in range(4))) for _ in range(8))
        )
    results = [each for batch in results for each in batch]
    assert sum(isinstance(each, Admitted) for each in results) == 10
    assert sum(isinstance(each, NoRoom) for each in results) == 22
    assert await root.fetchval("SELECT count(*) FROM decisions") == 10
    assert await root.fetchval("SELECT count(*) FROM receipts") == 10
    assert await depth_holds(root)


async def test_a_known_key_finds_its_decision_though_the_queue_is_full(
    database: Database, tenant: UUID
) -> None:
    (first,) = await admit_all(database, tenant, queued("k", queue_depth=1))
    assert isinstance(first, Admitted)
    again, other = await admit_all(database, tenant, queued("k", queue_depth=1), queued(queue_depth=1))
    assert isinstance(again, Known)
    assert isinstance(other, NoRoom)


async def test_one_key_twice_in_a_batch_counts_once(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    stored, known = await admit_all(database, tenant, queued("k"), queued("k"))
    assert isinstance(stored, Admitted)
    assert isinstance(known, Known)
    assert await depth_holds(root)


async def test_a_full_queue_does_not_stop_what_has_a_slot(database: Database, tenant: UUID) -> None:
    full, running = await admit_all(database, tenant, queued(queue_depth=0), admission(queue_depth=0))
    assert isinstance(full, NoRoom)
    assert isinstance(running, Admitted)


async def test_a_silent_process_loses_its_decision_to_the_queue_and_cannot_commit_it_any_more(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    await expire(root, decision)
    async with database.transaction(tenant) as connection:
        assert await requeue_expired(connection, tenant, limit=9) == ["interactive"]
    assert await commit_all(database, tenant, proposal(decision)) == [Superseded()]
    assert await depth_holds(root)
    (claimed,) = await claim_queued(database, tenant)
    assert (claimed.id, claimed.token, claimed.requeues) == (decision, 3, 1)
    (result,) = await commit_all(database, tenant, proposal(decision, token=3))
    assert isinstance(result, Committed)
    assert await depth_holds(root)


async def test_what_is_queued_again_keeps_its_place(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    early = await admitted(database, tenant)
    await admit_all(database, tenant, late := queued())
    async with database.transaction(tenant) as connection:
        assert await requeue_held(connection, tenant, uuid7(), [early], "ran-too-long") == [], "not its owner"
        assert await requeue_held(connection, tenant, OWNER, [early], "ran-too-long") == ["interactive"]
    claimed = await claim_queued(database, tenant, "interactive", "interactive")
    assert [each.id for each in claimed] == [early, late.id]


async def test_a_queued_decision_that_comes_to_rest_leaves_the_queue(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    one = queued()
    await admit_all(database, tenant, one)
    (result,) = await commit_all(database, tenant, proposal(one.id, token=0, status="cancelled"))
    assert isinstance(result, Committed)
    assert await claim_queued(database, tenant) == []
    assert await depth_holds(root)


async def test_what_waits_past_its_time_limit_is_found_and_claimed_without_a_slot(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    soon, late = queued(time_limit_ms=1), queued()
    await admit_all(database, tenant, soon, late)
    await root.execute(
        "UPDATE decisions SET deadline_at = clock_timestamp() - interval '1 s' WHERE id = $1", soon.id
    )
    async with database.dispatch_view() as connection:
        assert await tenants_with_work(connection) == [tenant]
    async with database.transaction(tenant) as connection:
        found = await claim_overdue(connection, tenant, Claim(OWNER, 30_000, ["quote"]), limit=9)
    assert [each.id for each in found] == [soon.id]
    assert found[0].remaining_ms < 0
    assert await depth_holds(root)


async def test_what_waits_is_seen_by_class_and_tenant_with_its_oldest(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    await admit_all(database, tenant, queued(), queued(), queued(class_="bulk"))
    await admit_all(database, stranger, queued())
    await admit_all(database, tenant, admission())
    await root.execute(
        "UPDATE decisions SET queued_at = clock_timestamp() - interval '1 minute' WHERE class = 'bulk'"
    )
    async with database.dispatch_view() as connection:
        seen = await waiting(connection)
    assert {(row.tenant, row.class_, row.depth) for row in seen} == {
        (tenant, "interactive", 2),
        (tenant, "bulk", 1),
        (stranger, "interactive", 1),
    }
    (bulk,) = [row for row in seen if row.class_ == "bulk"]
    assert 60_000 <= bulk.oldest_ms < 120_000
    async with database.transaction(stranger) as connection:
        assert [(row.tenant, row.depth) for row in await waiting_of(connection, stranger)] == [(stranger, 1)]
        assert await running_of(connection, stranger) == {}
    async with database.transaction(tenant) as connection:
        assert await running_of(connection, tenant) == {"interactive": 1}


async def test_a_position_counts_those_before_it_of_its_class(database: Database, tenant: UUID) -> None:
    places = [queued() for _ in range(3)]
    for one in places:
        await admit_all(database, tenant, one)
    running = await admitted(database, tenant)
    async with database.transaction(tenant) as connection:
        assert [await position(connection, tenant, one.id) for one in places] == [1, 2, 3]
        assert await position(connection, tenant, running) == 0
