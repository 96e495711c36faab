"""Admission: one run for each key whoever races (I11), and one receipt for each decision in a log without gaps (I12)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import asyncpg
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.core.receipt import receipt
from coordinator.store import log
from coordinator.store.admit import Admission, Admitted, Known, admit
from coordinator.store.database import Database, open_database
from coordinator.store.records import Locked
from tests.store.given import admission, blocked, changes, commit_all, kinds_of, proposal


async def admit_alone(database: Database, tenant: UUID, *admissions: Admission) -> list[Admitted | Known]:
    return list(await database.run(tenant, lambda connection: admit(connection, tenant, admissions)))


async def test_of_fifty_admissions_of_one_key_over_two_pools_exactly_one_is_stored(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    wishes = [admission("the-key") for _ in range(50)]
    async with (
        open_database(database_url, Settings(pool_size=5)) as left,
        open_database(database_url, Settings(pool_size=5)) as right,
    ):
        answers = await asyncio.gather(
            *(admit_alone((left, right)[n % 2], tenant, wish) for n, wish in enumerate(wishes))
        )
    stored = [
        wish.id for wish, (answer,) in zip(wishes, answers, strict=True) if isinstance(answer, Admitted)
    ]
    assert len(stored) == 1
    assert {answer.id for (answer,) in answers if isinstance(answer, Known)} == {stored[0]}
    assert [row["id"] for row in await root.fetch("SELECT id FROM decisions")] == stored
    assert await kinds_of(root, tenant) == ["decision.running"]


async def test_of_two_with_one_key_in_one_batch_the_first_is_stored_and_the_other_finds_it(
    database: Database, tenant: UUID
) -> None:
    first, second = admission("same"), admission("same")
    stored, known = await admit_alone(database, tenant, first, second)
    assert isinstance(stored, Admitted)
    assert known == Known(first.id, first.fingerprint, None, None)


async def test_batches_that_share_keys_in_opposite_orders_do_not_deadlock(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    keys = [f"k{n}" for n in range(20)]
    rounds = [[admission(key) for key in (keys if n % 2 else reversed(keys))] for n in range(6)]
    await asyncio.gather(*(admit_alone(database, tenant, *batch) for batch in rounds))
    assert await root.fetchval("SELECT count(*) FROM decisions") == 20
    assert (
        await root.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
    )


async def test_a_key_that_stands_for_another_request_comes_back_with_that_fingerprint(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    first = admission("k", fingerprint=b"1" * 32)
    await admit_alone(database, tenant, first)
    (known,) = await admit_alone(database, tenant, admission("k", fingerprint=b"2" * 32))
    assert known == Known(first.id, b"1" * 32, None, None)
    assert await kinds_of(root, tenant) == ["decision.running"]


async def test_a_key_of_one_tenant_means_nothing_to_another(
    database: Database, tenant: UUID, stranger: UUID
) -> None:
    (mine,) = await admit_alone(database, tenant, admission("k"))
    (theirs,) = await admit_alone(database, stranger, admission("k"))
    assert isinstance(mine, Admitted)
    assert isinstance(theirs, Admitted)


async def test_a_resting_decision_is_known_with_its_answer(database: Database, tenant: UUID) -> None:
    first = admission("k")
    await admit_alone(database, tenant, first)
    await commit_all(database, tenant, proposal(first.id))
    (known,) = await admit_alone(database, tenant, admission("k"))
    assert known == Known(first.id, first.fingerprint, f'{{"answer":"{first.id}"}}'.encode(), 201)


async def test_an_admission_says_what_its_record_holds_at_that_moment(
    database: Database, tenant: UUID
) -> None:
    about = {"record_kind": "proposal", "record_id": "p-1"}
    first = admission(**about)
    (before,) = await admit_alone(database, tenant, first)
    await commit_all(database, tenant, proposal(first.id, changes=changes("p-1", 0, value=7)))
    (after,) = await admit_alone(database, tenant, admission(**about))
    assert isinstance(before, Admitted)
    assert before.record == Locked(0, None)
    assert isinstance(after, Admitted)
    assert after.record == Locked(1, b'{"value":7}')


async def test_the_log_has_no_gap_and_no_double_under_eight_writers(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    async def write(database: Database, writer: int) -> None:
        for n in range(15):
            await admit_alone(database, tenant, *(admission(f"{writer}.{n}.{i}") for i in range(3)))

    async with open_database(database_url, Settings(pool_size=8)) as database:
        await asyncio.gather(*(write(database, writer) for writer in range(8)))
    indices = [row["index"] for row in await root.fetch("SELECT index FROM receipts ORDER BY index")]
    assert indices == list(range(8 * 15 * 3))
    assert await root.fetchval("SELECT size FROM logs WHERE tenant_id = $1", tenant) == len(indices)
    per_decision = await root.fetch("SELECT count(*) FROM receipts GROUP BY decision_id")
    assert {row["count"] for row in per_decision} == {1}


async def test_the_order_of_indices_is_the_order_of_commits(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """A second writer waits for the first one's COMMIT before it gets an index."""
    async with database.transaction(tenant) as connection:
        await log.append(connection, tenant, [receipt("first", decision_id=None)])
        second = asyncio.ensure_future(
            database.run(
                tenant, lambda other: log.append(other, tenant, [receipt("second", decision_id=None)])
            )
        )
        await blocked(root)
        assert not second.done()
    await second
    assert await kinds_of(root, tenant) == ["first", "second"]


async def test_indices_of_a_transaction_that_rolls_back_are_given_out_again(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    class Regret(Exception):
        pass

    try:
        async with database.transaction(tenant) as connection:
            await log.append(connection, tenant, [receipt("never", decision_id=str(uuid7()))])
            raise Regret
    except Regret:
        pass
    await admit_alone(database, tenant, admission())
    assert await root.fetchval("SELECT min(index) FROM receipts") == 0
    assert await kinds_of(root, tenant) == ["decision.running"]
