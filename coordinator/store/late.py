"""Late answers: a worker that was superseded did the work all the same, and it costs what it costs.

    reading still waits     its end takes the costs of those who came before along (`account`): the decision settles them
    decision at rest        the reservation is uncertain: when every holder has said what it cost, it is settled with the sum
                            it has closed: the cost is an overage, under the bill's own name
                            there is none: it is written down as what nobody reserved for
    in between              it waits until the decision rests

Each answer is accounted for once: whoever does it marks the row, in the same transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from uuid import UUID

import asyncpg

from coordinator.core.budget import close
from coordinator.core.money import Money
from coordinator.store import bills, closing
from coordinator.store.bills import Bill
from coordinator.store.closing import Closed, Reservation
from coordinator.store.database import Connection

AT_ONCE = 100

REMEMBER = """
INSERT INTO late_answers (tenant_id, task_id, token, cost_minor, currency, billed_at)
VALUES ($1, $2, $3, $4, $5, CASE WHEN $4::bigint IS NULL THEN clock_timestamp() END)
ON CONFLICT DO NOTHING RETURNING token
"""

ACCOUNT = """
UPDATE late_answers SET billed_at = clock_timestamp()
WHERE tenant_id = $1 AND task_id = $2 AND billed_at IS NULL RETURNING cost_minor, currency
"""

UNBILLED = """
SELECT l.task_id, l.token, l.cost_minor, l.currency, t.decision_id, t.evidence
FROM late_answers l JOIN tasks t ON t.tenant_id = $1 AND t.id = l.task_id
JOIN decisions d ON d.tenant_id = $1 AND d.id = t.decision_id
WHERE l.tenant_id = $1 AND l.billed_at IS NULL AND d.answer IS NOT NULL
ORDER BY l.task_id, l.token LIMIT $2
FOR NO KEY UPDATE OF l SKIP LOCKED
"""

MARK = """
UPDATE late_answers SET billed_at = clock_timestamp() WHERE tenant_id = $1 AND task_id = $2 AND token = $3 AND billed_at IS NULL
"""

# What the holders of an evidence's tasks have said so far, and how many of them have not said what it cost.
TOLD = """
SELECT coalesce(sum(own.cost), 0)::bigint + coalesce(sum(late.cost), 0)::bigint AS cost_minor,
       sum(t.fencing_token - late.said - (own.cost IS NOT NULL)::int)::bigint AS silent
FROM tasks t
CROSS JOIN LATERAL (SELECT (t.answer -> 'cost' ->> 'amount_minor')::bigint AS cost) own
CROSS JOIN LATERAL (
    SELECT sum(l.cost_minor) AS cost, count(l.cost_minor) AS said FROM late_answers l
    WHERE l.tenant_id = $1 AND l.task_id = t.id
) late
WHERE t.tenant_id = $1 AND t.decision_id = $2 AND t.evidence = $3
"""

TENANTS_WITH_UNBILLED = "SELECT DISTINCT tenant_id FROM late_answers WHERE billed_at IS NULL"


async def remember(
    connection: Connection, tenant: UUID, task: UUID, token: int, cost: Mapping[str, object] | None
) -> bool:
    """False if an answer under this token was kept before."""
    told = (None, None) if cost is None else (cost["amount_minor"], cost["currency"])
    return await connection.fetchval(REMEMBER, tenant, task, token, *told) is not None


async def account(connection: Connection, tenant: UUID, task: UUID) -> list[Money]:
    """What earlier holders of a task, whose end its decision has just learnt, said that it cost them. Whoever asks settles it."""
    rows = await connection.fetch(ACCOUNT, tenant, task)
    return [Money(row["cost_minor"], row["currency"]) for row in rows]


async def bill_unbilled(connection: Connection, tenant: UUID) -> int:
    """Of decisions at rest, a hundred answers at once. How many were accounted for."""
    rows = await connection.fetch(UNBILLED, tenant, AT_ONCE)
    groups: dict[tuple[UUID, str, str], list[asyncpg.Record]] = defaultdict(list)
    for row in rows:
        groups[row["decision_id"], row["evidence"], row["currency"]].append(row)
    reservations = await closing.lock(connection, tenant, decisions={decision for decision, _, _ in groups})
    for (decision, evidence, currency), late in groups.items():
        own = [
            each
            for each in reservations
            if (each.decision_id, each.kind, each.item) == (decision, "evidence", evidence)
            and each.currency == currency
        ]
        await _bill(connection, tenant, late, own)
    for row in rows:
        await connection.execute(MARK, tenant, row["task_id"], row["token"])
    return len(rows)


async def _bill(
    connection: Connection, tenant: UUID, late: Sequence[asyncpg.Record], own: Sequence[Reservation]
) -> None:
    """The late answers of one evidence; ``own`` are its reservations."""
    first, cost_minor = late[0], sum(row["cost_minor"] for row in late)
    by = {"late_answers": [f"{row['task_id']}.{row['token']}" for row in late]}
    uncertain = next((each for each in own if each.state == "uncertain"), None)
    if uncertain is not None:
        await _settle_if_all_said(connection, tenant, first, uncertain, own, by)
    elif cost_minor and own:
        await closing.write(connection, tenant, [closing.late(own[-1], cost_minor, by)])
    elif cost_minor:
        cost = Money(cost_minor, first["currency"])
        bill = Bill(id=_bill_id(first), kind="evidence", item=first["evidence"], provider="", cost=cost)
        rooms = await bills.rooms_for(connection, tenant, [bill])
        await bills.unreserved(connection, tenant, rooms, first["decision_id"], [bill])


async def _settle_if_all_said(
    connection: Connection,
    tenant: UUID,
    late: asyncpg.Record,
    uncertain: Reservation,
    own: Sequence[Reservation],
    by: Mapping[str, object],
) -> None:
    """What other reservations of the same evidence have settled is not paid for again."""
    told = await connection.fetchrow(TOLD, tenant, late["decision_id"], late["evidence"])
    if told is None or told["silent"]:
        return
    elsewhere = sum(each.drawn_minor for each in own if not each.is_open)
    closed = close(uncertain.drawn_minor, [max(0, told["cost_minor"] - elsewhere)], silent=False)
    await closing.write(connection, tenant, [Closed(reservation=uncertain, closing=closed, by=by)])


def _bill_id(late: asyncpg.Record) -> UUID:
    """The same for the same answer, so that it cannot be written down twice."""
    id: UUID = late["task_id"]
    return UUID(int=(id.int + late["token"]) % 2**128)


async def tenants_with_unbilled(connection: Connection) -> Sequence[UUID]:
    """Runs in the dispatch view, not in a tenant's transaction."""
    return [found["tenant_id"] for found in await connection.fetch(TENANTS_WITH_UNBILLED)]
