"""Settling operations: what the provider said becomes the operation's state, by token, with its receipt.

    dispatching | uncertain  --settle-->  succeeded | failed | ready (send again at due_at) | uncertain (ask at due_at, or parked)

A holder whose token is old changes no state. What it learnt is kept all the same, as a receipt; and if it learnt that
the provider acted while we still do not know, that evidence wins: the operation succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import msgspec

from coordinator.core.receipt import Receipt, receipt
from coordinator.failpoints import failpoint
from coordinator.store import bills, log
from coordinator.store.bills import Bill, OperationBill
from coordinator.store.database import Connection
from coordinator.store.follow import follow, lock_decisions


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """``due_ms``: when to look at it again, from now; None for never. ``sent`` and ``asked`` say which attempt this was;
    ``in_doubt`` whether, after it, some send may have been acted upon without our knowing. ``linked``: something may follow
    for other operations of its decision."""

    operation_id: UUID
    decision_id: UUID
    token: int
    state: str
    reference: str | None
    reason: str | None
    due_ms: int | None
    sent: bool
    asked: bool
    in_doubt: bool
    linked: bool
    paid: bool = False
    """Whether its decision holds reservations for its operations."""
    bill: Bill | None = None
    """What the provider said that it cost."""


# The guard: the row is still held, and under this token; a settled one keeps its token, but nobody holds it. Provider evidence
# of success also settles a row that is merely uncertain, waits to be sent again or is in someone else's hands, since what
# happened, happened.
SETTLE = """
UPDATE operations o
SET state = s.state, reference = coalesce(s.reference, o.reference), reason = s.reason,
    due_at = clock_timestamp() + s.due_ms * interval '1 ms',
    sends = o.sends + s.sent::int, lookups = o.lookups + s.asked::int, in_doubt = s.in_doubt,
    last_sent_at = CASE WHEN s.sent THEN clock_timestamp() ELSE o.last_sent_at END,
    lease_owner = NULL, lease_expires_at = NULL,
    settled_at = CASE WHEN s.state IN ('succeeded', 'failed') THEN clock_timestamp() END
FROM unnest($2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::int[], $8::bool[], $9::bool[],
            $10::bool[])
     AS s (id, token, state, reference, reason, due_ms, sent, asked, in_doubt)
WHERE o.tenant_id = $1 AND o.id = s.id
  AND (o.state IN ('dispatching', 'uncertain') AND o.fencing_token = s.token AND o.lease_owner IS NOT NULL
       OR o.state IN ('dispatching', 'uncertain', 'ready') AND s.state = 'succeeded')
RETURNING o.id
"""


# One row per tenant and minute: a hot spot only while a provider is failing, which is what it is for.
COUNT_RETRIES = """
INSERT INTO retry_minutes (tenant_id, minute, used) VALUES ($1, date_trunc('minute', clock_timestamp()), $2)
ON CONFLICT (tenant_id, minute) DO UPDATE SET used = retry_minutes.used + excluded.used
RETURNING used, (extract(epoch FROM minute + interval '1 minute' - clock_timestamp()) * 1000)::int AS left_ms
"""


async def settle(
    connection: Connection, tenant: UUID, settlements: Sequence[Settlement], *, retries_per_minute: int
) -> Sequence[bool]:
    """For each whether it changed the operation's state; one after the other where they speak of the same operation. Repeats
    beyond the tenant's budget wait for the next minute."""
    settlements = await _within_budget(connection, tenant, settlements, retries_per_minute)
    changed: list[bool] = []
    for distinct in _without_repeats(settlements):
        changed += await _settle_distinct(connection, tenant, distinct)
    await failpoint("settle.before")
    return changed


def _without_repeats(settlements: Sequence[Settlement]) -> Iterator[list[Settlement]]:
    """In order, as few runs as it takes for none to name an operation twice: one UPDATE changes a row only once."""
    run: dict[UUID, Settlement] = {}
    for settlement in settlements:
        if settlement.operation_id in run:
            yield [*run.values()]
            run = {}
        run[settlement.operation_id] = settlement
    yield [*run.values()]


async def _settle_distinct(
    connection: Connection, tenant: UUID, settlements: Sequence[Settlement]
) -> list[bool]:
    linked = {s.decision_id for s in settlements if s.linked}
    paid = {s.decision_id for s in settlements if s.paid or s.bill}
    told = [
        OperationBill(s.operation_id, s.decision_id, f"{s.operation_id}.{s.token}", s.bill)
        for s in settlements
    ]
    locked = await bills.lock_for_operations(connection, tenant, sorted(paid), told) if paid else None
    if linked:
        await lock_decisions(connection, tenant, linked)
    rows = await connection.fetch(
        SETTLE,
        tenant,
        [s.operation_id for s in settlements],
        [s.token for s in settlements],
        [s.state for s in settlements],
        [s.reference for s in settlements],
        [s.reason for s in settlements],
        [s.due_ms for s in settlements],
        [s.sent for s in settlements],
        [s.asked for s in settlements],
        [s.in_doubt for s in settlements],
    )
    settled = {row["id"] for row in rows}
    receipts = [_receipt(s, s.operation_id in settled) for s in settlements]
    if linked:
        receipts += await follow(connection, tenant, linked)
    await log.append(connection, tenant, receipts)
    if locked is not None:
        ended = [t for t, s in zip(told, settlements, strict=True) if _tells(s, s.operation_id in settled)]
        await bills.close_operations(connection, tenant, locked, ended)
    return [s.operation_id in settled for s in settlements]


def _tells(settlement: Settlement, changed: bool) -> bool:
    """Whether this says what the operation cost in the end. What comes late is not taken for a second bill of the same."""
    return changed and settlement.state in ("succeeded", "failed")


async def _within_budget(
    connection: Connection, tenant: UUID, settlements: Sequence[Settlement], limit: int
) -> Sequence[Settlement]:
    repeats = sum(s.state == "ready" for s in settlements)
    if not repeats:
        return settlements
    row = await connection.fetchrow(COUNT_RETRIES, tenant, repeats)
    if row is None or row["used"] <= limit:
        return settlements
    return [
        msgspec.structs.replace(s, due_ms=(s.due_ms or 0) + row["left_ms"]) if s.state == "ready" else s
        for s in settlements
    ]


def _receipt(settlement: Settlement, changed: bool) -> Receipt:
    return receipt(
        f"operation.{settlement.state}" if changed else "operation.late-evidence",
        decision_id=str(settlement.decision_id),
        operation_id=str(settlement.operation_id),
        fencing_token=settlement.token,
        reference=settlement.reference,
        reason=settlement.reason,
        learnt=None if changed else settlement.state,
    )
