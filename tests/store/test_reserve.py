"""Reserving before work: exactly what fits is admitted, whoever races (I9), by days of the budget's own zone."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.core.budget import Short
from coordinator.store.admit import Admitted, Known
from coordinator.store.database import Database, open_database
from coordinator.store.reserve import AdmittedPaid, Exhausted, secure_all
from tests.store.given import admission, kinds_of, only_row
from tests.store.paid import admit_paid, books, ceiling, holding, need, paid, sgd, states, want


async def test_of_a_hundred_concurrent_decisions_exactly_those_that_fit_under_the_last_four_dollars_are_stored(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    async with (
        open_database(database_url, Settings(pool_size=5)) as left,
        open_database(database_url, Settings(pool_size=5)) as right,
    ):
        await ceiling(left, tenant, 400)
        answers = await asyncio.gather(
            *(admit_paid((left, right)[n % 2], tenant, paid(need(30))) for n in range(100))
        )
    stored = [answer for (answer,) in answers if isinstance(answer, AdmittedPaid)]
    refused = [answer.short for (answer,) in answers if isinstance(answer, Exhausted)]
    assert len(stored) == 400 // 30
    assert len(refused) == 100 - len(stored)
    assert {(short.budget, short.needed) for short in refused} == {("all", sgd(30))}
    assert await books(root) == (390, 0, 0, 0)
    assert await root.fetchval("SELECT count(*) FROM decisions") == 13
    kinds = await kinds_of(root, tenant)
    assert (kinds.count("decision.running"), kinds.count("reservation.held")) == (13, 13)


async def test_in_one_batch_the_first_that_fit_are_stored_and_the_others_are_refused(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    batch = [paid(need(60)), paid(need(60)), paid(need(40)), admission(), paid(need(1))]
    answers = await admit_paid(database, tenant, *batch)
    assert [type(answer) for answer in answers] == [
        AdmittedPaid,
        Exhausted,
        AdmittedPaid,
        Admitted,
        Exhausted,
    ]
    assert isinstance(answers[1], Exhausted)
    assert answers[1].short == Short("all", sgd(60), sgd(40), None)
    assert await books(root) == (100, 0, 0, 0)


async def test_a_known_key_is_found_even_when_nothing_is_left_and_reserves_nothing(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    first = await holding(database, tenant, key="the-key")
    again, other = await admit_paid(database, tenant, paid(key="the-key"), paid())
    assert isinstance(again, Known)
    assert again.id == first
    assert isinstance(other, Exhausted)
    assert await books(root) == (40, 0, 0, 0)


async def test_two_of_one_key_in_one_batch_reserve_once(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40)
    first, second = await admit_paid(database, tenant, paid(key="same"), paid(key="same"))
    assert isinstance(first, AdmittedPaid)
    assert isinstance(second, Known)
    assert await books(root) == (40, 0, 0, 0)


async def test_the_key_of_a_refused_decision_is_free_again(database: Database, tenant: UUID) -> None:
    await ceiling(database, tenant, 39)
    (refused,) = await admit_paid(database, tenant, paid(key="mine"))
    assert isinstance(refused, Exhausted)
    await ceiling(database, tenant, 40)
    (stored,) = await admit_paid(database, tenant, paid(key="mine"))
    assert isinstance(stored, AdmittedPaid)


async def test_several_budgets_are_held_together_or_none(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100, name="all")
    await ceiling(database, tenant, 50, name="oracle-only", provider="oracle")
    await ceiling(database, tenant, 1, name="yen", currency="JPY")
    await ceiling(database, tenant, 1, name="others-only", provider="crm")
    await holding(database, tenant, need(40))
    (refused,) = await admit_paid(database, tenant, paid(need(40)))
    assert refused == Exhausted(Short("oracle-only", sgd(40), sgd(10), None))
    assert await books(root, "all") == (40, 0, 0, 0)
    assert await books(root, "oracle-only") == (40, 0, 0, 0)
    (other,) = await admit_paid(database, tenant, paid(need(60, provider="elsewhere")))
    assert isinstance(other, AdmittedPaid)
    assert await root.fetchval("SELECT count(*) FROM draws WHERE budget IN ('yen', 'others-only')") == 0


async def test_what_nothing_is_budgeted_for_is_reserved_all_the_same(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await holding(database, tenant)
    assert await states(root, decision) == [("cost", "held", None)]


async def test_with_reduce_the_optional_ones_that_do_not_fit_are_left_out(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 60)
    needs = [need(40, "must"), need(30, "nice", optional=True), need(20, "small", optional=True)]
    one = paid(*needs, on_exhausted="reduce")
    (answer,) = await admit_paid(database, tenant, one)
    assert isinstance(answer, AdmittedPaid)
    assert answer.held == {("evidence", "must"): one.want.ids[0], ("evidence", "small"): one.want.ids[2]}
    assert [item for item, *_ in await states(root, one.admission.id)] == ["must", "small"]


@pytest.mark.parametrize("instead", ["wait", "review"])
async def test_who_waits_or_goes_to_review_is_stored_without_a_reservation(
    instead: str, database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 39)
    one = paid(on_exhausted=instead)
    (answer,) = await admit_paid(database, tenant, one)
    assert isinstance(answer, AdmittedPaid)
    assert answer.held == Short("all", sgd(40), sgd(39), None)
    assert await states(root, one.admission.id) == []


async def test_what_a_decision_holds_is_not_reserved_twice_and_a_stale_holder_reserves_nothing(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 400)
    one = paid()
    await admit_paid(database, tenant, one)
    empty = paid(on_exhausted="wait")
    await admit_paid(database, tenant, empty.admission)
    wants = [
        want(one.admission.id),
        want(empty.admission.id, token=2),
        want(empty.admission.id),
        want(uuid7()),
    ]
    held, stale, fresh, unknown = await database.run(
        tenant, lambda connection: secure_all(connection, tenant, wants)
    )
    assert held == {("evidence", "cost"): one.want.ids[0]}
    assert fresh == {("evidence", "cost"): wants[2].ids[0]}
    assert stale is unknown is None
    assert await books(root) == (80, 0, 0, 0)


async def test_what_an_earlier_claim_left_held_may_have_been_spent(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 400)
    decision = await holding(database, tenant)
    await root.execute("UPDATE decisions SET fencing_token = 2")
    (held,) = await database.run(
        tenant, lambda connection: secure_all(connection, tenant, [want(decision, token=2)])
    )
    assert held is not None
    assert await states(root, decision) == [("cost", "uncertain", "holder-lost"), ("cost", "held", None)]
    assert await books(root) == (40, 40, 0, 0)


async def test_a_ceiling_under_what_is_taken_leaves_an_overage_and_what_was_promised_stays(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    await holding(database, tenant, need(90))
    await ceiling(database, tenant, 70)
    await ceiling(database, tenant, 50)
    assert await books(root) == (90, 0, 0, 40)
    rows = await root.fetch("SELECT amount_minor, cause FROM overages ORDER BY at")
    assert [tuple(row) for row in rows] == [(20, "ceiling-lowered"), (20, "ceiling-lowered")]
    assert (await kinds_of(root, tenant))[-2:] == ["budget.set", "budget.overage"]
    (refused,) = await admit_paid(database, tenant, paid(need(1)))
    assert refused == Exhausted(Short("all", sgd(1), sgd(0), None))
    await ceiling(database, tenant, 100)
    (stored,) = await admit_paid(database, tenant, paid(need(10)))
    assert isinstance(stored, AdmittedPaid)


async def test_the_database_itself_refuses_a_period_that_takes_more_than_it_may(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 100)
    await holding(database, tenant, need(90))
    with pytest.raises(asyncpg.CheckViolationError):
        await root.execute("UPDATE budget_periods SET held = held + 11")


DAYS = [
    ("Asia/Singapore", "2026-06-01T16:30:00Z", "2026-06-02T00:00:00+08:00", 24),
    ("Europe/Berlin", "2026-03-29T12:00:00Z", "2026-03-29T00:00:00+01:00", 23),
    ("Europe/Berlin", "2026-10-25T22:59:59Z", "2026-10-25T00:00:00+02:00", 25),
    ("America/New_York", "2026-03-08T12:00:00Z", "2026-03-08T00:00:00-05:00", 23),
    ("America/New_York", "2026-11-02T04:59:59Z", "2026-11-01T00:00:00-04:00", 25),
    ("America/Havana", "2026-11-01T04:30:00Z", "2026-11-01T00:00:00-04:00", 25),  # midnight comes twice
    ("America/Sao_Paulo", "2018-11-04T12:00:00Z", "2018-11-04T01:00:00-02:00", 23),  # there is no midnight
]


@pytest.mark.parametrize(("zone", "instant", "starts_at", "hours"), DAYS)
async def test_a_day_is_the_calendars_day_in_the_budgets_zone(
    zone: str, instant: str, starts_at: str, hours: int, root: asyncpg.Connection
) -> None:
    query = "SELECT * FROM budget_period('day', $1, $2)"
    day = await only_row(root, query, zone, datetime.fromisoformat(instant))
    assert day["starts_at"] == datetime.fromisoformat(starts_at)
    assert day["ends_at"] - day["starts_at"] == timedelta(hours=hours)
    following = await only_row(root, query, zone, day["ends_at"])
    assert following["starts_at"] == day["ends_at"]


async def test_every_hour_of_a_year_lies_in_exactly_the_day_that_is_found_for_it(
    root: asyncpg.Connection,
) -> None:
    query = """
    SELECT count(*) FROM unnest($1::text[]) AS zone,
        generate_series('2026-01-01 00:00+00'::timestamptz, '2027-01-01 00:00+00', interval '1 hour') AS hour,
        budget_period('day', zone, hour) AS day
    WHERE NOT (day.starts_at <= hour AND hour < day.ends_at)
    """
    zones = sorted({zone for zone, *_ in DAYS})
    assert await root.fetchval(query, zones) == 0


async def test_a_month_is_the_calendars_month(root: asyncpg.Connection) -> None:
    at = datetime.fromisoformat("2026-03-31T22:30:00Z")
    month = await only_row(root, "SELECT * FROM budget_period('month', 'Europe/Berlin', $1)", at)
    assert month["starts_at"] == datetime.fromisoformat("2026-04-01T00:00:00+02:00")
    assert month["ends_at"] == datetime.fromisoformat("2026-05-01T00:00:00+02:00")


async def test_a_new_day_begins_with_the_whole_ceiling_and_the_old_one_keeps_what_it_took(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    await ceiling(database, tenant, 40, period="day")
    await holding(database, tenant)
    await root.execute(
        "UPDATE draws SET starts_at = starts_at - interval '1 day';"
        "UPDATE budget_periods SET starts_at = starts_at - interval '1 day', ends_at = ends_at - interval '1 day'"
    )
    (stored,) = await admit_paid(database, tenant, paid())
    assert isinstance(stored, AdmittedPaid)
    rows = await root.fetch("SELECT held FROM budget_periods WHERE name = 'all' ORDER BY starts_at")
    assert [row["held"] for row in rows] == [40, 40]


async def test_a_refusal_says_when_the_budget_resets(database: Database, tenant: UUID) -> None:
    await ceiling(database, tenant, 39, period="day")
    (refused,) = await admit_paid(database, tenant, paid())
    assert isinstance(refused, Exhausted)
    resets_at = refused.short.resets_at
    assert resets_at is not None
    assert (resets_at.utcoffset(), resets_at.hour) == (timedelta(0), 16)
