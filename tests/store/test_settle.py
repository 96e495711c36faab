"""Settling: a stale token changes no state, yet what its holder learnt is kept and wins (I8); terminal states absorb and each
change has one receipt (I12); `succeeded` iff the provider has it (I7)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from coordinator.store.database import Database
from coordinator.store.lease import Claim, ClaimedOperation, claim_operations
from tests.store.given import expire, kinds_of, only_row, promised, settle_all, settlement


async def take_over(database: Database, tenant: UUID, root: asyncpg.Connection, op: UUID) -> ClaimedOperation:
    """Another process claims it, its lease having run out."""
    await expire(root, op)
    async with database.transaction(tenant) as connection:
        (claimed,) = await claim_operations(connection, tenant, Claim(uuid7(), 30_000, ["quote"]), limit=1)
    assert claimed.id == op
    return claimed


async def row_of(root: asyncpg.Connection, op: UUID) -> dict[str, object]:
    return dict(await only_row(root, "SELECT * FROM operations WHERE id = $1", op))


async def state_of(root: asyncpg.Connection, op: UUID) -> str:
    return str((await row_of(root, op))["state"])


@pytest.mark.parametrize("state", ["succeeded", "failed", "uncertain", "ready"])
async def test_the_holder_settles_its_operation_with_one_receipt(
    state: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    assert await settle_all(database, tenant, settlement(decision, op, state, due_ms=5_000)) == [True]
    row = await row_of(root, op.id)
    assert (row["state"], row["lease_owner"], row["sends"]) == (state, None, 1)
    assert (row["settled_at"] is not None) == (state in ("succeeded", "failed"))
    assert await kinds_of(root, tenant, operation=op.id) == ["operation.dispatching", f"operation.{state}"]


@pytest.mark.parametrize("state", ["failed", "uncertain", "ready"])
async def test_a_stale_token_changes_nothing_but_its_evidence_is_kept(
    state: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    await take_over(database, tenant, root, op.id)
    before = await row_of(root, op.id)
    assert await settle_all(database, tenant, settlement(decision, op, state)) == [False]
    assert await row_of(root, op.id) == before
    receipts = await kinds_of(root, tenant, operation=op.id)
    assert receipts == ["operation.dispatching", "operation.taken-over", "operation.late-evidence"]
    body = await root.fetchval("SELECT body FROM receipts WHERE kind = 'operation.late-evidence'")
    learnt = msgspec.json.decode(body)
    assert (learnt["learnt"], learnt["fencing_token"]) == (state, 1)


async def test_a_late_success_wins_while_another_process_holds_the_operation(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    claimed = await take_over(database, tenant, root, op.id)
    assert await settle_all(database, tenant, settlement(decision, op, "succeeded")) == [True]
    late = settlement(decision, op, "uncertain", token=claimed.token)
    assert await settle_all(database, tenant, late) == [False]
    row = await row_of(root, op.id)
    assert (row["state"], row["reference"]) == ("succeeded", "ref-1")


@pytest.mark.parametrize("meanwhile", ["uncertain", "ready"])
async def test_a_late_success_wins_over_what_its_successor_made_of_it(
    meanwhile: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """Parked, or about to be sent again: what happened, happened."""
    decision, op = await promised(database, tenant)
    claimed = await take_over(database, tenant, root, op.id)
    later = settlement(decision, op, meanwhile, token=claimed.token, due_ms=60_000)
    assert await settle_all(database, tenant, later) == [True]
    assert await settle_all(database, tenant, settlement(decision, op, "succeeded")) == [True]
    row = await row_of(root, op.id)
    assert (row["state"], row["due_at"]) == ("succeeded", None)
    assert (await kinds_of(root, tenant, operation=op.id))[-1] == "operation.succeeded"


@pytest.mark.parametrize("terminal", ["succeeded", "failed"])
@pytest.mark.parametrize("late", ["succeeded", "failed", "uncertain", "ready"])
async def test_a_terminal_state_absorbs_whatever_comes_later(
    terminal: str, late: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    await settle_all(database, tenant, settlement(decision, op, terminal))
    before = await row_of(root, op.id)
    again = settlement(decision, op, late, reference="another" if late == "succeeded" else None)
    assert await settle_all(database, tenant, again) == [False]
    assert await row_of(root, op.id) == before
    assert (await kinds_of(root, tenant, operation=op.id))[-1] == "operation.late-evidence"


@pytest.mark.parametrize("state", ["uncertain", "ready", "succeeded", "failed"])
async def test_a_settlement_that_is_stored_again_changes_nothing_twice(
    state: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """As when the first COMMIT's answer was lost."""
    decision, op = await promised(database, tenant)
    same = settlement(decision, op, state, due_ms=60_000)
    assert await settle_all(database, tenant, same) == [True]
    before = await row_of(root, op.id)
    assert await settle_all(database, tenant, same) == [False]
    assert await row_of(root, op.id) == before
    receipts = await kinds_of(root, tenant, operation=op.id)
    assert receipts == ["operation.dispatching", f"operation.{state}", "operation.late-evidence"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_two_settlements_of_one_operation_in_one_batch_end_as_if_one_came_after_the_other(
    order: tuple[int, int], database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    claimed = await take_over(database, tenant, root, op.id)
    both = [
        settlement(decision, op, "succeeded"),
        settlement(decision, op, "uncertain", token=claimed.token),
    ]
    changed = await settle_all(database, tenant, *(both[n] for n in order))
    assert await state_of(root, op.id) == "succeeded"
    assert list(changed) == ([True, False] if order == (0, 1) else [True, True])
    receipts = (await kinds_of(root, tenant, operation=op.id))[2:]
    expected = ["operation.succeeded", "operation.late-evidence"]
    assert receipts == (expected if order == (0, 1) else ["operation.uncertain", "operation.succeeded"])


async def test_settlements_in_one_batch_do_not_touch_each_other(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    pairs = [await promised(database, tenant) for _ in range(3)]
    await take_over(database, tenant, root, pairs[1][1].id)
    changed = await settle_all(
        database, tenant, *(settlement(decision, op, "failed") for decision, op in pairs)
    )
    assert changed == [True, False, True]
    states = [await state_of(root, op.id) for _, op in pairs]
    assert states == ["failed", "dispatching", "failed"]


async def test_an_operation_of_another_tenant_cannot_be_settled(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    assert await settle_all(database, stranger, settlement(decision, op, "succeeded")) == [False]
    assert await state_of(root, op.id) == "dispatching"


async def test_of_two_holders_that_settle_at_once_exactly_one_changes_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    claimed = await take_over(database, tenant, root, op.id)
    stale, holder = await asyncio.gather(
        settle_all(database, tenant, settlement(decision, op, "failed", token=1)),
        settle_all(database, tenant, settlement(decision, op, "failed", token=claimed.token)),
    )
    assert (list(stale), list(holder)) == ([False], [True])
    receipts = (await kinds_of(root, tenant, operation=op.id))[2:]
    assert sorted(receipts) == ["operation.failed", "operation.late-evidence"]
