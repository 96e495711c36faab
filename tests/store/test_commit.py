"""The commit: versions are contiguous with one maker each (I2), nothing that a policy relied on has moved (I3), a stale token
changes nothing (I8), each change has one receipt and a resting decision never changes (I12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from coordinator.core.fence import ReadCheck
from coordinator.core.record import RecordKind
from coordinator.errors import PreconditionFailed
from coordinator.store.commit import Committed, Moved, NewVersion, NotAllowed, OutOfDate, Proposal, Superseded
from coordinator.store.database import Database
from coordinator.store.queue import requeue_expired
from coordinator.store.records import Locked, history, lock_records, put_if_version
from tests.store.given import (
    OWNER,
    admitted,
    blocked,
    changes,
    claim_queued,
    commit_all,
    expire,
    kinds_of,
    new_operation,
    only_row,
    proposal,
)


class Data(msgspec.Struct, frozen=True):
    value: int


def rising(old: Data | None, new: Data) -> str | None:
    return None if old is None or new.value > old.value else f"{new.value} is not more than {old.value}"


KINDS = {"proposal": RecordKind("proposal", Data, transition=rising)}


async def decisions(database: Database, tenant: UUID, count: int) -> list[UUID]:
    return [await admitted(database, tenant) for _ in range(count)]


async def version_of(root: asyncpg.Connection, id: str) -> int:
    return int(await root.fetchval("SELECT coalesce(max(version), 0) FROM records WHERE id = $1", id))


def relying_on(id: str, version: int) -> ReadCheck:
    return ReadCheck(id, "proposal", id, version, None)


async def test_a_commit_writes_version_answer_operation_and_receipts_together(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    op = new_operation(decision)
    (result,) = await commit_all(
        database, tenant, proposal(decision, changes=changes("p-1", 0, 5), operations=[op])
    )
    assert isinstance(result, Committed)
    assert result.operations == [op]
    row = await only_row(root, "SELECT * FROM decisions")
    assert (row["status"], row["answer_status"], row["lease_owner"]) == ("committed", 201, None)
    assert row["answer"].encode() == result.finished.answer
    version = await only_row(root, "SELECT * FROM record_versions")
    assert (version["version"], version["decision_id"], version["data"]) == (1, decision, '{"value":5}')
    stored = await only_row(root, "SELECT * FROM operations")
    assert (stored["state"], stored["lease_owner"], stored["fencing_token"]) == ("dispatching", OWNER, 1)
    assert await kinds_of(root, tenant) == ["decision.running", "decision.committed", "operation.dispatching"]


async def test_the_first_writer_of_a_record_in_a_batch_wins(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    first, second, elsewhere = await decisions(database, tenant, 3)
    results = await commit_all(
        database,
        tenant,
        proposal(first, changes=changes("p-1", 0, 1), operations=[new_operation(first)]),
        proposal(second, changes=changes("p-1", 0, 2), operations=[new_operation(second)]),
        proposal(elsewhere, changes=changes("p-2", 0, 3)),
    )
    assert [type(result) for result in results] == [Committed, Moved, Committed]
    assert isinstance(results[1], Moved)
    assert results[1].locked == {("proposal", "p-1"): Locked(1, b'{"value":1}')}
    assert [row["decision_id"] for row in await root.fetch("SELECT decision_id FROM operations")] == [first]
    assert await root.fetchval("SELECT status FROM decisions WHERE id = $1", second) == "running"


async def test_a_chain_of_versions_of_one_record_is_committed_together(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """Each decides on what its predecessor in the batch proposes; the one that does not fit the chain has moved."""
    ids = await decisions(database, tenant, 4)
    results = await commit_all(
        database,
        tenant,
        *(
            proposal(id, changes=changes("p-1", base, base))
            for id, base in zip(ids, (0, 1, 1, 2), strict=True)
        ),
    )
    assert [type(result) for result in results] == [Committed, Committed, Moved, Committed]
    assert await version_of(root, "p-1") == 3
    rows = await root.fetch("SELECT version, decision_id FROM record_versions ORDER BY version")
    assert [(row["version"], row["decision_id"]) for row in rows] == [(1, ids[0]), (2, ids[1]), (3, ids[3])]
    assert await root.fetchval("SELECT data::text FROM records") == '{"value":2}'


async def test_of_two_writers_at_one_version_in_two_transactions_one_commits(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    ids = await decisions(database, tenant, 8)
    results = await asyncio.gather(
        *(
            commit_all(database, tenant, proposal(id, changes=changes("p-1", 0, n)))
            for n, id in enumerate(ids)
        )
    )
    kinds = [type(result) for (result,) in results]
    assert (kinds.count(Committed), kinds.count(Moved)) == (1, 7)
    assert await version_of(root, "p-1") == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("together", [True, False])
async def test_write_skew_is_refused_in_both_orders(
    order: tuple[int, int], together: bool, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """Each relies on the record that the other one changes; only the first of them may commit."""
    left, right, seed = await decisions(database, tenant, 3)
    await commit_all(database, tenant, proposal(seed, changes=[*changes("left", 0), *changes("right", 0)]))
    both = [relying_on("left", 1), relying_on("right", 1)]
    wishes = [
        proposal(left, changes=changes("left", 1, 9), reads=both),
        proposal(right, changes=changes("right", 1, 9), reads=both),
    ]
    ordered = [wishes[n] for n in order]
    if together:
        first, second = await commit_all(database, tenant, *ordered)
    else:
        (first,), (second,) = [await commit_all(database, tenant, wish) for wish in ordered]
    assert isinstance(first, Committed)
    assert isinstance(second, Moved)
    assert [(check.then, check.now) for check in second.checks if not check.held] == [(1, 2)]
    assert await version_of(root, "left") + await version_of(root, "right") == 3


async def test_write_skew_between_concurrent_transactions_lets_one_through(
    database: Database, tenant: UUID
) -> None:
    left, right = await decisions(database, tenant, 2)
    both = [relying_on("left", 0), relying_on("right", 0)]
    results = await asyncio.gather(
        commit_all(database, tenant, proposal(left, changes=changes("left", 0), reads=both)),
        commit_all(database, tenant, proposal(right, changes=changes("right", 0), reads=both)),
    )
    assert {type(result) for (result,) in results} == {Committed, Moved}


async def test_of_two_that_both_rely_on_a_record_being_absent_one_makes_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """A row at version 0 is what they wait for: without it there would be nothing to lock."""
    one, two = await decisions(database, tenant, 2)
    absent = [relying_on("seat", 0)]
    async with database.transaction(tenant) as connection:
        await lock_records(connection, tenant, {("proposal", "seat")})
        waiting = [
            asyncio.ensure_future(
                commit_all(database, tenant, proposal(id, changes=changes("seat", 0, n), reads=absent))
            )
            for n, id in enumerate((one, two))
        ]
        await blocked(root, 2)
    results = [result for (result,) in await asyncio.gather(*waiting)]
    assert {type(result) for result in results} == {Committed, Moved}
    assert await version_of(root, "seat") == 1


async def test_relying_on_an_absent_record_fails_once_it_is_there(database: Database, tenant: UUID) -> None:
    maker, other = await decisions(database, tenant, 2)
    await commit_all(database, tenant, proposal(maker, changes=changes("seat", 0)))
    (result,) = await commit_all(
        database, tenant, proposal(other, changes=changes("note", 0), reads=[relying_on("seat", 0)])
    )
    assert isinstance(result, Moved)
    assert result.locked[("proposal", "note")] == Locked(0, None)


async def test_only_the_named_fields_of_a_record_are_decisive(database: Database, tenant: UUID) -> None:
    maker, indifferent, strict = await decisions(database, tenant, 3)
    old = {"value": 1, "note": "a"}
    await commit_all(
        database, tenant, proposal(maker, changes=[NewVersion("site", "s", 0, msgspec.json.encode(old))])
    )
    await put(database, tenant, ("site", "s"), 1, b'{"value":1,"note":"b"}')
    by_value = ReadCheck("site", "site", "s", 1, {"value": 1, "note": "a"}, ("value",))
    by_note = ReadCheck("site", "site", "s", 1, {"value": 1, "note": "a"}, ("note",))
    held, moved = await commit_all(
        database, tenant, proposal(indifferent, reads=[by_value]), proposal(strict, reads=[by_note])
    )
    assert isinstance(held, Committed)
    assert isinstance(moved, Moved)


async def put(database: Database, tenant: UUID, key: tuple[str, str], expected: int, data: bytes) -> int:
    async with database.transaction(tenant) as connection:
        await lock_records(connection, tenant, {key})
        return await put_if_version(connection, tenant, key, expected=expected, data=data, key_id=uuid7())


async def test_versions_are_contiguous_and_each_has_one_maker(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    for n in range(6):
        if n % 2:
            await put(database, tenant, ("proposal", "p-1"), n, msgspec.json.encode({"value": n}))
        else:
            id = await admitted(database, tenant)
            await commit_all(database, tenant, proposal(id, changes=changes("p-1", n, n)))
    with pytest.raises(PreconditionFailed):
        await put(database, tenant, ("proposal", "p-1"), 5, b"{}")
    rows = await root.fetch("SELECT * FROM record_versions ORDER BY version")
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all((row["decision_id"] is None) != (row["key_id"] is None) for row in rows)
    async with database.transaction(tenant) as connection:
        page = await history(connection, tenant, ("proposal", "p-1"), below=4, limit=2)
    assert [made.version for made in page] == [3, 2]


async def test_a_stale_token_is_superseded_and_has_changed_nothing(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    await expire(root, decision)
    async with database.transaction(tenant) as connection:
        await requeue_expired(connection, tenant, limit=1)
    (claimed,) = await claim_queued(database, tenant)
    assert claimed.token == 3
    late = proposal(decision, changes=changes("p-1", 0), operations=[new_operation(decision)])
    assert await commit_all(database, tenant, late) == [Superseded()]
    assert await version_of(root, "p-1") == 0
    assert await root.fetchval("SELECT count(*) FROM operations") == 0
    assert await kinds_of(root, tenant) == [
        "decision.running",
        "decision.queued",
        "decision.running",
    ]
    (result,) = await commit_all(database, tenant, proposal(decision, token=3))
    assert isinstance(result, Committed)


async def test_a_resting_decision_never_changes(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    await commit_all(database, tenant, proposal(decision))
    before = await root.fetchrow("SELECT * FROM decisions")
    assert await commit_all(database, tenant, proposal(decision, status="declined")) == [Superseded()]
    assert await root.fetchrow("SELECT * FROM decisions") == before
    assert await kinds_of(root, tenant) == ["decision.running", "decision.committed"]


async def test_of_two_proposals_for_one_decision_in_one_batch_the_first_rests_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """As when two callers cancel it at once; their neighbours are not to suffer either."""
    decision, neighbour = await decisions(database, tenant, 2)
    results = await commit_all(
        database,
        tenant,
        proposal(decision, status="cancelled"),
        proposal(decision, changes=changes("p-1", 0)),
        proposal(neighbour),
    )
    assert [type(result) for result in results] == [Committed, Superseded, Committed]
    assert await version_of(root, "p-1") == 0


async def test_a_decision_of_another_tenant_cannot_be_brought_to_rest(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    assert await commit_all(database, stranger, proposal(decision)) == [Superseded()]
    assert await root.fetchval("SELECT status FROM decisions") == "running"


async def test_a_transition_that_the_record_kind_refuses_is_not_made(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    first, falling, wrong = await decisions(database, tenant, 3)
    await commit_all(database, tenant, proposal(first, changes=changes("p-1", 0, 5)), kinds=KINDS)
    refused, malformed = await commit_all(
        database,
        tenant,
        proposal(falling, changes=changes("p-1", 1, 4)),
        proposal(wrong, changes=[NewVersion("proposal", "p-1", 1, b'{"value":"six"}')]),
        kinds=KINDS,
    )
    assert refused == NotAllowed("4 is not more than 5")
    assert isinstance(malformed, NotAllowed)
    assert await version_of(root, "p-1") == 1


async def test_evidence_that_grew_too_old_in_the_queue_is_out_of_date(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    stale = proposal(decision, changes=changes("p-1", 0), fresh=lambda: False)
    assert await commit_all(database, tenant, stale) == [OutOfDate()]
    assert await version_of(root, "p-1") == 0
    assert await root.fetchval("SELECT status FROM decisions") == "running"


async def test_freshness_is_judged_under_the_lock_not_before(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    asked: list[bool] = []

    def fresh() -> bool:
        asked.append(True)
        return False

    async with database.transaction(tenant) as connection:
        await lock_records(connection, tenant, {("proposal", "p-1")})
        waiting = asyncio.ensure_future(
            commit_all(database, tenant, proposal(decision, changes=changes("p-1", 0), fresh=fresh))
        )
        await blocked(root)
        assert not asked
    assert await waiting == [OutOfDate()]


async def test_writers_that_lock_in_opposite_orders_both_end(database: Database, tenant: UUID) -> None:
    """Records are locked in one global order; what is left (two that make the same rows) is retried as a whole."""
    ids = await decisions(database, tenant, 12)
    wishes: list[Proposal] = []
    for n, id in enumerate(ids):
        names = [f"r{k}" for k in range(6)]
        new = [one for name in (names if n % 2 else names[::-1]) for one in changes(name, 0, n)]
        wishes.append(proposal(id, changes=new))
    results = await asyncio.gather(*(commit_all(database, tenant, wish) for wish in wishes))
    assert [type(result) for (result,) in results].count(Committed) == 1


Rows = Callable[[asyncpg.Connection, UUID], Any]
IMPOSSIBLE = {
    "a running decision that nobody holds": "UPDATE decisions SET lease_owner = NULL, lease_expires_at = NULL",
    "a running decision with an answer": "UPDATE decisions SET answer = '{}', answer_status = 201, finished_at = now()",
    "a resting decision without an answer": (
        "UPDATE decisions SET status = 'declined', lease_owner = NULL, lease_expires_at = NULL"
    ),
    "a decision in an unknown state": "UPDATE decisions SET status = 'maybe'",
    "a lease without its end": "UPDATE decisions SET lease_expires_at = NULL",
    "an empty idempotency key": "UPDATE decisions SET idempotency_key = ''",
    "a short fingerprint": "UPDATE decisions SET fingerprint = 'x'",
    "a version that two made": "UPDATE record_versions SET key_id = decision_id",
    "a version that nobody made": "UPDATE record_versions SET decision_id = NULL",
    "a version 0 in the history": "UPDATE record_versions SET version = 0",
    "a record at version 1 without data": "UPDATE records SET data = NULL",
    "a record at version 0 with data": "UPDATE records SET version = 0",
    "a negative version": "UPDATE records SET version = -1",
    "an operation that is sent by nobody": "UPDATE operations SET lease_owner = NULL, lease_expires_at = NULL",
    "an operation that succeeded without a reference": (
        "UPDATE operations SET state = 'succeeded', settled_at = now(), lease_owner = NULL, lease_expires_at = NULL"
    ),
    "an operation that failed without a reason": (
        "UPDATE operations SET state = 'failed', settled_at = now(), lease_owner = NULL, lease_expires_at = NULL"
    ),
    "an uncertain operation without a reason": (
        "UPDATE operations SET state = 'uncertain', lease_owner = NULL, lease_expires_at = NULL"
    ),
    "a settled operation that is held": (
        "UPDATE operations SET state = 'succeeded', reference = 'r', settled_at = now()"
    ),
    "a ready operation that was settled": (
        "UPDATE operations SET state = 'ready', settled_at = now(), lease_owner = NULL, lease_expires_at = NULL"
    ),
    "an operation sent less than never": "UPDATE operations SET sends = -1",
    "a receipt before the first": "UPDATE receipts SET index = -1",
    "a log of negative size": "UPDATE logs SET size = -1",
}


async def test_the_schema_refuses_every_impossible_row(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    done, running = await decisions(database, tenant, 2)
    wish = proposal(done, changes=changes("p-1", 0), operations=[new_operation(done)])
    await commit_all(database, tenant, wish)
    await root.execute("DELETE FROM receipts WHERE index > 0")
    allowed = []
    for what, statement in IMPOSSIBLE.items():
        where = f" WHERE id = '{running}'" if statement.startswith("UPDATE decisions") else ""
        try:
            await root.execute(statement + where)
            allowed.append(what)
        except asyncpg.CheckViolationError:
            pass
    assert allowed == []


async def test_the_schema_refuses_a_second_effect_under_one_key_or_place(
    database: Database, tenant: UUID
) -> None:
    decision, other = await decisions(database, tenant, 2)
    op = new_operation(decision)
    same_key = msgspec.structs.replace(new_operation(other), key=op.key)
    await commit_all(database, tenant, proposal(decision, operations=[op]))
    with pytest.raises(asyncpg.UniqueViolationError):
        await commit_all(database, tenant, proposal(other, operations=[same_key]))
    third = await admitted(database, tenant)
    same_place = msgspec.structs.replace(new_operation(third), key="another")
    with pytest.raises(asyncpg.UniqueViolationError):
        await commit_all(database, tenant, proposal(third, operations=[new_operation(third), same_place]))
