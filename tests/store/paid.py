"""What the tests of budgets begin with: a ceiling, decisions that reserve under it, and a look at the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
from uuid_utils.compat import uuid7

from coordinator.core.budget import Need, Period
from coordinator.core.money import Money
from coordinator.store.admit import Admission, Admitted
from coordinator.store.bills import Bill
from coordinator.store.budgets import NewBudget, set_budget
from coordinator.store.closing import Spending
from coordinator.store.database import Database
from coordinator.store.reserve import QUEUED, AdmissionResult, AdmittedPaid, Paid, Want, admit_all
from tests.store.given import admission, only_row


def sgd(amount_minor: int) -> Money:
    return Money(amount_minor, "SGD")


async def ceiling(
    database: Database,
    tenant: UUID,
    amount_minor: int,
    *,
    name: str = "all",
    currency: str = "SGD",
    period: Period = "total",
    timezone: str = "Asia/Singapore",
    provider: str | None = None,
) -> None:
    budget = NewBudget(
        name=name,
        ceiling=Money(amount_minor, currency),
        period=period,
        timezone=timezone,
        provider=provider,
    )
    await database.run(tenant, lambda connection: set_budget(connection, tenant, budget, uuid7()))


def need(amount_minor: int = 40, item: str = "cost", **more: Any) -> Need:
    made = Need("evidence", item, "oracle", sgd(amount_minor))
    return msgspec.structs.replace(made, **more)


def paid(*needs: Need, key: str | None = None, on_exhausted: Any = "refuse", **changes: Any) -> Paid:
    one = admission(key, **changes)
    token = QUEUED if one.lease_owner is None else 1
    return Paid(one, want(one.id, *needs, token=token, on_exhausted=on_exhausted))


def want(decision: UUID, *needs: Need, token: int = 1, **more: Any) -> Want:
    made = Want(
        decision_id=decision,
        token=token,
        needs=needs or (need(),),
        ids=[uuid7() for _ in needs or (None,)],
        on_exhausted="refuse",
        expires_ms=60_000,
    )
    return msgspec.structs.replace(made, **more)


async def admit_paid(database: Database, tenant: UUID, *items: Admission | Paid) -> Sequence[AdmissionResult]:
    """All of them in one transaction."""
    return await database.run(tenant, lambda connection: admit_all(connection, tenant, items))


async def holding(database: Database, tenant: UUID, *needs: Need, **changes: Any) -> UUID:
    """The id of a decision that was stored with these reservations."""
    one = paid(*needs, **changes)
    (result,) = await admit_paid(database, tenant, one)
    assert isinstance(result, AdmittedPaid)
    assert isinstance(result.admitted, Admitted)
    return one.admission.id


def spending(*costs: int, silent: Sequence[str] = (), item: str = "cost", **more: Any) -> Spending:
    made = Spending(spent={item: costs} if costs else {}, silent=silent, accounted=True, operations={})
    return msgspec.structs.replace(made, **more)


def bill(amount_minor: int, **more: Any) -> Bill:
    made = Bill(id=uuid7(), kind="effect", item="send", provider="oracle", cost=sgd(amount_minor))
    return msgspec.structs.replace(made, **more)


async def books(root: asyncpg.Connection, name: str = "all") -> tuple[int, int, int, int]:
    """held, uncertain, settled and overage of the one period of a budget. What its reservations and its overages say has to
    be the same."""
    row = await only_row(root, "SELECT * FROM budget_periods WHERE name = $1", name)
    entries = await root.fetch(
        "SELECT r.state, sum(r.drawn_minor)::bigint AS drawn FROM reservations r"
        " JOIN draws d ON d.reservation_id = r.id WHERE d.budget = $1 GROUP BY r.state",
        name,
    )
    drawn = {entry["state"]: entry["drawn"] for entry in entries}
    beyond = await root.fetchval(
        "SELECT coalesce(sum(amount_minor), 0) FROM overages WHERE budget = $1", name
    )
    told = (
        drawn.get("held", 0),
        drawn.get("uncertain", 0),
        drawn.get("settled", 0) + drawn.get("released", 0),
        beyond,
    )
    assert told == (row["held"], row["uncertain"], row["settled"], row["overage"])
    assert row["held"] + row["uncertain"] + row["settled"] <= row["ceiling_minor"] + row["overage"]
    return told


async def states(root: asyncpg.Connection, decision: UUID) -> list[tuple[str, str, str | None]]:
    """Item, state and reason of a decision's reservations, in the order in which they were made."""
    rows = await root.fetch(
        "SELECT item, state, reason FROM reservations WHERE decision_id = $1 ORDER BY id", decision
    )
    return [(row["item"], row["state"], row["reason"]) for row in rows]
