"""Budgets themselves: setting a ceiling, showing what is left, listing what draws on it, and which uncertain ones to ask about.

A ceiling may be lowered below what is taken already: nothing that was promised is taken back, and an overage row says by how much
it is exceeded. What a budget counts (currency, period, zone, provider) is fixed once something was drawn on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.budget import Period, ReservationState, lowered
from coordinator.core.money import Money
from coordinator.core.receipt import receipt
from coordinator.errors import StateConflict
from coordinator.store import log
from coordinator.store.database import Connection, transposed


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """With its present period. ``resets_at`` None: never."""

    name: str
    ceiling_minor: int
    currency: str
    period: Period
    timezone: str
    provider: str | None
    held: int
    uncertain: int
    settled: int
    overage: int
    resets_at: datetime | None


class NewBudget(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ceiling: Money
    period: Period
    timezone: str
    provider: str | None


class ReservationRow(msgspec.Struct, frozen=True, kw_only=True):
    """``drawn_minor`` is what it takes of its budgets now."""

    id: UUID
    decision_id: UUID
    operation_id: UUID | None
    kind: str
    item: str
    provider: str
    amount_minor: int
    drawn_minor: int
    currency: str
    state: ReservationState
    reason: str | None
    created_at: datetime
    expires_at: datetime | None
    closed_at: datetime | None
    budgets: list[str]


class Asked(msgspec.Struct, frozen=True):
    """An uncertain reservation whose source may know more: ``item`` is evidence of that decision type."""

    id: UUID
    decision_type: str
    item: str


ZONE = "SELECT EXISTS (SELECT FROM pg_timezone_names WHERE name = $1)"

_BUDGET = """
SELECT b.name, coalesce(p.ceiling_minor, b.ceiling_minor) AS ceiling_minor, b.currency, b.period, b.timezone, b.provider,
       coalesce(p.held, 0) AS held, coalesce(p.uncertain, 0) AS uncertain, coalesce(p.settled, 0) AS settled,
       coalesce(p.overage, 0) AS overage, nullif(now.ends_at, 'infinity') AS resets_at
FROM budgets b
CROSS JOIN LATERAL budget_period(b.period, b.timezone, clock_timestamp()) AS now
LEFT JOIN budget_periods p ON p.tenant_id = b.tenant_id AND p.name = b.name AND p.starts_at = now.starts_at
WHERE b.tenant_id = $1
"""

BUDGET = f"{_BUDGET} AND b.name = $2"

BUDGETS = f"""{_BUDGET} AND b.name > $2 COLLATE "C" ORDER BY b.name COLLATE "C" LIMIT $3"""

# What it counts is only changed while nothing has been drawn on it; then no row is returned.
SET = """
INSERT INTO budgets AS b (tenant_id, name, ceiling_minor, currency, period, timezone, provider) VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (tenant_id, name) DO UPDATE
SET ceiling_minor = excluded.ceiling_minor, currency = excluded.currency, period = excluded.period, timezone = excluded.timezone,
    provider = excluded.provider, updated_at = clock_timestamp()
WHERE (b.currency, b.period, b.timezone, b.provider)
      IS NOT DISTINCT FROM (excluded.currency, excluded.period, excluded.timezone, excluded.provider)
   OR NOT EXISTS (SELECT FROM budget_periods p WHERE p.tenant_id = $1 AND p.name = $2)
RETURNING name
"""

PRESENT = """
SELECT p.starts_at, p.held + p.uncertain + p.settled AS used_minor, p.overage
FROM budgets b
CROSS JOIN LATERAL budget_period(b.period, b.timezone, clock_timestamp()) AS now
JOIN budget_periods p ON p.tenant_id = b.tenant_id AND p.name = b.name AND p.starts_at = now.starts_at
WHERE b.tenant_id = $1 AND b.name = $2
FOR NO KEY UPDATE OF p
"""

CEILING = """
WITH beyond AS (
    INSERT INTO overages (tenant_id, budget, starts_at, amount_minor, cause)
    SELECT $1, $2, $3, $5, 'ceiling-lowered' WHERE $5::bigint > 0
)
UPDATE budget_periods SET ceiling_minor = $4, overage = overage + $5
WHERE tenant_id = $1 AND name = $2 AND starts_at = $3
"""

_RESERVATIONS = """
SELECT r.id, r.decision_id, r.operation_id, r.kind, r.item, r.provider, r.amount_minor, r.drawn_minor, r.currency, r.state, r.reason,
       r.created_at, r.expires_at, r.closed_at,
       ARRAY (SELECT d.budget FROM draws d WHERE d.tenant_id = $1 AND d.reservation_id = r.id ORDER BY d.budget) AS budgets
FROM reservations r
WHERE r.tenant_id = $1 AND {narrowed} AND ($3::text IS NULL OR r.state = $3) AND ($4::uuid IS NULL OR r.id < $4)
ORDER BY r.id DESC LIMIT $5
"""
# Each its own text, so that each has a plan by the index that it can use.
RESERVATIONS = _RESERVATIONS.format(narrowed="$2::text IS NULL")
OF_BUDGET = _RESERVATIONS.format(
    narrowed="r.id IN (SELECT d.reservation_id FROM draws d WHERE d.tenant_id = $1 AND d.budget = $2)"
)
OF_DECISION = _RESERVATIONS.format(narrowed="r.decision_id = $2")
RESERVATION = _RESERVATIONS.format(narrowed="r.id = $2")

TENANTS_TO_RECONCILE = """
SELECT tenant_id FROM reservations WHERE state = 'held' AND expires_at < clock_timestamp()
UNION
SELECT tenant_id FROM reservations WHERE $1 AND state = 'uncertain' AND ask_at < clock_timestamp()
"""

# Whoever claims the question moves its time on, so that others do not ask as well.
ASK = """
WITH due AS (
    SELECT r.id, d.type AS decision_type, r.item
    FROM reservations r JOIN decisions d ON d.tenant_id = $1 AND d.id = r.decision_id
    WHERE r.tenant_id = $1 AND r.state = 'uncertain' AND r.ask_at < clock_timestamp()
      AND (d.type, r.item) IN (SELECT * FROM unnest($4::text[], $5::text[]))
    ORDER BY r.ask_at LIMIT $2
    FOR NO KEY UPDATE OF r SKIP LOCKED
)
UPDATE reservations r SET ask_at = clock_timestamp() + $3 * interval '1 ms'
FROM due WHERE r.tenant_id = $1 AND r.id = due.id
RETURNING r.id, due.decision_type, due.item
"""


async def is_zone(connection: Connection, timezone: str) -> bool:
    """Whether the database knows this IANA zone: days are made by its clock and its rules."""
    known: bool = await connection.fetchval(ZONE, timezone)
    return known


async def set_budget(connection: Connection, tenant: UUID, budget: NewBudget, by: UUID) -> None:
    """Make it, or change its ceiling, from its present period on. Raises `StateConflict` if it counts something else already."""
    ceiling = budget.ceiling
    columns = (ceiling.amount_minor, ceiling.currency, budget.period, budget.timezone, budget.provider)
    if await connection.fetchval(SET, tenant, budget.name, *columns) is None:
        raise StateConflict(
            f"something was drawn on budget {budget.name!r}: its currency, period, timezone and provider stay; make another one"
        )
    receipts = [receipt("budget.set", decision_id=None, budget=budget, set_by=str(by))]
    present = await connection.fetchrow(PRESENT, tenant, budget.name)
    if present is not None:
        beyond = lowered(ceiling.amount_minor, present["used_minor"], present["overage"])
        await connection.execute(
            CEILING, tenant, budget.name, present["starts_at"], ceiling.amount_minor, beyond
        )
        if beyond:
            amount = Money(beyond, ceiling.currency)
            facts = {"amount": amount, "cause": "ceiling-lowered", "budgets": [budget.name]}
            receipts.append(receipt("budget.overage", decision_id=None, operation_id=None, **facts))
    await log.append(connection, tenant, receipts)


async def budget(connection: Connection, tenant: UUID, name: str) -> BudgetRow | None:
    row = await connection.fetchrow(BUDGET, tenant, name)
    return None if row is None else BudgetRow(**row)


async def budgets(connection: Connection, tenant: UUID, *, after: str, limit: int) -> Sequence[BudgetRow]:
    """By name, those behind ``after``."""
    return [BudgetRow(**row) for row in await connection.fetch(BUDGETS, tenant, after, limit)]


async def reservations(
    connection: Connection,
    tenant: UUID,
    *,
    budget: str | None = None,
    state: str | None = None,
    decision: UUID | None = None,
    before: UUID | None = None,
    limit: int,
) -> Sequence[ReservationRow]:
    """Of one budget, of one decision, or all: the newest first, those older than ``before``."""
    query, of = (
        (OF_BUDGET, budget) if budget else (OF_DECISION, decision) if decision else (RESERVATIONS, None)
    )
    rows = await connection.fetch(query, tenant, of, state, before, limit)
    return [ReservationRow(**row) for row in rows]


async def reservation(connection: Connection, tenant: UUID, id: UUID) -> ReservationRow | None:
    row = await connection.fetchrow(RESERVATION, tenant, id, None, None, 1)
    return None if row is None else ReservationRow(**row)


async def tenants_to_reconcile(connection: Connection, *, ask: bool) -> Sequence[UUID]:
    """Tenants with reservations that have expired, or with ``ask`` some that their providers could be asked about. Runs in the
    dispatch view."""
    return [row["tenant_id"] for row in await connection.fetch(TENANTS_TO_RECONCILE, ask)]


async def claim_questions(
    connection: Connection, tenant: UUID, sources: Sequence[tuple[str, str]], *, limit: int, again_ms: int
) -> Sequence[Asked]:
    """Uncertain reservations of evidence that can be asked about, named by decision type and item; due again in ``again_ms``."""
    rows = await connection.fetch(ASK, tenant, limit, again_ms, *transposed(sources, 2))
    return [Asked(**row) for row in rows]
