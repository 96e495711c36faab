"""What becomes of reservations: each closes once, and none is released while its work may still be billed (I10)."""

from __future__ import annotations

import asyncio
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from coordinator.errors import NotFound, StateConflict
from coordinator.store import bills, closing, resolve
from coordinator.store.commit import Committed, NewOperation, Superseded
from coordinator.store.database import Database
from coordinator.store.queue import requeue_expired, requeue_held
from coordinator.store.reserve import AdmittedPaid, secure_all
from coordinator.store.resolve import Resolution
from tests.store.given import (
    OWNER,
    claim_queued,
    commit_all,
    expire,
    kinds_of,
    new_operation,
    proposal,
    settle_all,
    settlement,
)
from tests.store.paid import (
    admit_paid,
    bill,
    books,
    ceiling,
    holding,
    need,
    paid,
    sgd,
    spending,
    states,
    want,
)

EFFECT = need(40, "send", kind="effect")


async def rest(database: Database, tenant: UUID, decision: UUID, **more: object) -> Committed:
    (result,) = await commit_all(database, tenant, proposal(decision, **more))
    assert isinstance(result, Committed)
    return result


async def take_over(database: Database, tenant: UUID) -> list[str]:
    return list(await database.run(tenant, lambda connection: requeue_expired(connection, tenant, limit=10)))


@pytest.mark.parametrize(
    ("spent", "state", "reason", "expected"),
    [
        (spending(25), "settled", None, (0, 0, 25, 0)),
        (spending(25, 20), "settled", None, (0, 0, 45, 5)),
        (spending(0), "settled", None, (0, 0, 0, 0)),
        (spending(), "released", None, (0, 0, 0, 0)),
        (spending(silent=["cost"]), "uncertain", "cost-unknown", (0, 40, 0, 0)),
        (spending(25, silent=["cost"]), "uncertain", "cost-unknown", (0, 40, 0, 0)),
        (spending(55, silent=["cost"]), "uncertain", "cost-unknown", (0, 55, 0, 15)),
        (spending(accounted=False), "uncertain", "cost-unknown", (0, 40, 0, 0)),
    ],
)
async def test_at_rest_a_reservation_closes_by_what_the_work_reported(
    spent: closing.Spending,
    state: str,
    reason: str | None,
    expected: tuple[int, ...],
    database: Database,
    tenant: UUID,
    root: asyncpg.Connection,
) -> None:
    await ceiling(database, tenant, 1_000)
    decision = await holding(database, tenant)
    await rest(database, tenant, decision, spending=spent)
    assert await states(root, decision) == [("cost", state, reason)]
    assert await books(root) == expected
    beyond = ["budget.overage"] if expected[3] else []
    assert await kinds_of(root, tenant, decision=decision) == [
        "decision.running",
        "reservation.held",
        "decision.committed",
        f"reservation.{state}",
        *beyond,
    ]


async def test_a_bigger_bill_counts_in_full_though_the_ceiling_is_reached(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    decision = await holding(database, tenant)
    await rest(database, tenant, decision, spending=spending(90))
    assert await books(root) == (0, 0, 90, 50)
    (row,) = await root.fetch("SELECT amount_minor, cause FROM overages")
    assert tuple(row) == (50, "bigger-bill")


async def test_a_queued_decision_that_somebody_else_cancels_had_begun_nothing(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    decision = await holding(database, tenant, lease_owner=None, queue_depth=10)
    await rest(database, tenant, decision, spending=spending(accounted=False), status="cancelled", token=0)
    assert await states(root, decision) == [("cost", "released", None)]


async def test_a_stale_holder_settles_nothing(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 400)
    decision = await holding(database, tenant)
    (result,) = await commit_all(database, tenant, proposal(decision, token=7, spending=spending(25)))
    assert isinstance(result, Superseded)
    assert await books(root) == (40, 0, 0, 0)


async def test_what_nothing_was_reserved_for_is_an_overage(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    decision = await holding(database, tenant)
    surprise = bill(70, kind="evidence", item="other")
    await rest(database, tenant, decision, spending=spending(25), unreserved=[surprise])
    assert await states(root, decision) == [("cost", "settled", None), ("other", "settled", None)]
    assert await books(root) == (0, 0, 95, 70)


# A vanished worker -----------------------------------------------------------------------------------------------------------


async def claimed(database: Database, tenant: UUID) -> int:
    """The token of the next one in the queue, once another process has claimed it."""
    (one,) = await claim_queued(database, tenant, owner=uuid7())
    return one.token


async def test_what_a_silent_process_had_reserved_is_uncertain_and_its_successor_reserves_anew(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    decision = await holding(database, tenant)
    await expire(root, decision)
    assert await take_over(database, tenant) == ["interactive"]
    assert await books(root) == (0, 40, 0, 0)
    token = await claimed(database, tenant)
    (held,) = await database.run(
        tenant, lambda connection: secure_all(connection, tenant, [want(decision, token=token)])
    )
    assert held is not None
    assert await states(root, decision) == [("cost", "uncertain", "lease-expired"), ("cost", "held", None)]
    await rest(database, tenant, decision, token=token, spending=spending(25))
    assert await books(root) == (0, 40, 25, 0)


async def test_a_run_that_is_broken_off_and_queued_again_may_have_been_billed(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    decision = await holding(database, tenant)
    await database.run(
        tenant, lambda connection: requeue_held(connection, tenant, OWNER, [decision], "ran-too-long")
    )
    assert await states(root, decision) == [("cost", "uncertain", "ran-too-long")]


async def test_a_queued_decision_keeps_what_it_reserved_for_whoever_claims_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    one = paid(lease_owner=None, queue_depth=10)
    await admit_paid(database, tenant, one)
    token = await claimed(database, tenant)
    (held,) = await database.run(
        tenant, lambda connection: secure_all(connection, tenant, [want(one.admission.id, token=token)])
    )
    assert held == {("evidence", "cost"): one.want.ids[0]}
    assert await books(root) == (40, 0, 0, 0)


async def test_taking_over_and_committing_at_once_leaves_each_reservation_closed_once(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 10_000)
    decisions = [await holding(database, tenant) for _ in range(10)]
    await expire(root, *decisions)
    wishes = [proposal(decision, spending=spending(25)) for decision in decisions]
    _, *results = await asyncio.gather(
        take_over(database, tenant), *(commit_all(database, tenant, wish) for wish in wishes)
    )
    won = sum(isinstance(result, Committed) for (result,) in results)
    assert await books(root) == (0, 40 * (10 - won), 25 * won, 0)


async def test_what_has_expired_is_uncertain_and_its_decision_can_still_settle_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    decision = await holding(database, tenant)
    await root.execute("UPDATE reservations SET expires_at = clock_timestamp()")
    for expected in (1, 0):
        given_up = await database.run(
            tenant, lambda connection: closing.give_up_expired(connection, tenant, limit=10)
        )
        assert given_up == expected
    assert await states(root, decision) == [("cost", "uncertain", "expired")]
    await rest(database, tenant, decision, spending=spending(25))
    assert await books(root) == (0, 0, 25, 0)


# What is said later ----------------------------------------------------------------------------------------------------------


async def uncertain(database: Database, tenant: UUID, root: asyncpg.Connection) -> UUID:
    decision = await holding(database, tenant)
    await rest(database, tenant, decision, spending=spending(silent=["cost"]))
    id: UUID = await root.fetchval("SELECT id FROM reservations WHERE decision_id = $1", decision)
    return id


@pytest.mark.parametrize(("cost", "expected"), [(0, (0, 0, 0, 0)), (25, (0, 0, 25, 0)), (90, (0, 0, 90, 50))])
async def test_an_uncertain_reservation_is_settled_once_with_what_is_known_at_last(
    cost: int, expected: tuple[int, ...], database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    id = await uncertain(database, tenant, root)
    await database.run(tenant, lambda c: bills.resolve(c, tenant, id, sgd(cost), {"resolved_by": "me"}))
    assert await books(root) == expected
    with pytest.raises(StateConflict, match="settled"):
        await database.run(tenant, lambda c: bills.resolve(c, tenant, id, sgd(1), {}))
    assert await books(root) == expected


async def test_a_late_bill_is_an_overage_and_counts_once(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    decision = await holding(database, tenant)
    await rest(database, tenant, decision, spending=spending())
    id = await root.fetchval("SELECT id FROM reservations")
    for name, counted in (("inv-1", True), ("inv-1", False), ("inv-2", True)):
        done = await database.run(
            tenant, lambda c, name=name: bills.bill_late(c, tenant, id, name, sgd(30), {})
        )
        assert done is counted
    assert await states(root, decision) == [("cost", "released", None)]
    assert await books(root) == (0, 0, 60, 60)
    assert (await kinds_of(root, tenant)).count("budget.overage") == 2


async def test_what_is_absent_or_held_or_billed_in_another_currency_is_refused(
    database: Database, tenant: UUID, stranger: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 400)
    await holding(database, tenant)
    held = await root.fetchval("SELECT id FROM reservations")
    doubtful = await uncertain(database, tenant, root)
    with pytest.raises(StateConflict, match="held"):
        await database.run(tenant, lambda c: bills.resolve(c, tenant, held, sgd(1), {}))
    with pytest.raises(StateConflict, match="still be settled"):
        await database.run(tenant, lambda c: bills.bill_late(c, tenant, doubtful, "b", sgd(1), {}))
    yen = msgspec.structs.replace(sgd(1), currency="JPY")
    with pytest.raises(StateConflict, match="JPY"):
        await database.run(tenant, lambda c: bills.resolve(c, tenant, doubtful, yen, {}))
    with pytest.raises(NotFound):
        await database.run(stranger, lambda c: bills.resolve(c, stranger, doubtful, sgd(1), {}))


# Effects ---------------------------------------------------------------------------------------------------------------------


async def promised(database: Database, tenant: UUID, ceiling_minor: int = 400) -> tuple[UUID, NewOperation]:
    """A committed decision whose operation has taken over the reservation of its effect."""
    await ceiling(database, tenant, ceiling_minor)
    decision = await holding(database, tenant, EFFECT)
    op = msgspec.structs.replace(new_operation(decision), paid=True)
    await rest(database, tenant, decision, operations=[op], spending=spending(operations={"send": op.id}))
    return decision, op


@pytest.mark.parametrize(
    ("state", "cost", "became", "expected"),
    [
        ("succeeded", 25, "settled", (0, 0, 25, 0)),
        ("succeeded", 90, "settled", (0, 0, 90, 50)),
        ("succeeded", None, "uncertain", (0, 40, 0, 0)),
        ("failed", None, "released", (0, 0, 0, 0)),
        ("failed", 5, "settled", (0, 0, 5, 0)),
        ("uncertain", None, "uncertain", (0, 40, 0, 0)),
        ("ready", None, "held", (40, 0, 0, 0)),
    ],
)
async def test_an_effects_reservation_closes_with_its_operation(
    state: str,
    cost: int | None,
    became: str,
    expected: tuple[int, ...],
    database: Database,
    tenant: UUID,
    root: asyncpg.Connection,
) -> None:
    decision, op = await promised(database, tenant)
    assert await books(root) == (40, 0, 0, 0)
    told = None if cost is None else bill(cost)
    await settle_all(database, tenant, settlement(decision, op, state, paid=True, bill=told))
    assert [state for _, state, _ in await states(root, decision)] == [became]
    assert await books(root) == expected


async def test_an_effect_that_is_not_used_gives_its_reservation_back(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    decision = await holding(database, tenant, EFFECT)
    await rest(database, tenant, decision, spending=spending(), status="declined")
    assert await states(root, decision) == [("send", "released", None)]


async def test_telling_twice_what_an_operation_cost_counts_once(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    told = settlement(decision, op, "succeeded", paid=True, bill=bill(25))
    assert await settle_all(database, tenant, told) == [True]
    assert await settle_all(database, tenant, told) == [False]
    assert await books(root) == (0, 0, 25, 0)


async def test_a_person_who_says_what_became_of_an_operation_closes_its_reservation(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    await settle_all(database, tenant, settlement(decision, op, "uncertain", paid=True))
    said = Resolution(state="succeeded", reference="r", reason=None, by={}, bill=bill(30))
    await database.run(tenant, lambda c: resolve.resolve(c, tenant, op.id, said))
    assert [state for _, state, _ in await states(root, decision)] == ["settled"]
    assert await books(root) == (0, 0, 30, 0)


async def test_an_operation_that_is_cancelled_unsent_gives_its_reservation_back(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, op = await promised(database, tenant)
    await settle_all(database, tenant, settlement(decision, op, "ready", paid=True, due_ms=60_000))
    await database.run(tenant, lambda c: resolve.cancel(c, tenant, decision))
    assert [state for _, state, _ in await states(root, decision)] == ["released"]


async def test_an_effect_that_nothing_was_reserved_for_is_an_overage(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    (plain,) = await admit_paid(database, tenant, one := paid())
    assert isinstance(plain, AdmittedPaid)
    decision = one.admission.id
    op = new_operation(decision)
    await rest(database, tenant, decision, operations=[op], spending=spending())
    await settle_all(database, tenant, settlement(decision, op, "succeeded", bill=bill(30)))
    assert await books(root) == (0, 0, 30, 30)
    assert (await states(root, decision))[-1] == ("send", "settled", None)
