"""What the tests of the store begin with: tenants, admissions, proposals, operations, each with one line to say what matters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
from uuid_utils.compat import uuid7

from coordinator.core.canonical import digest
from coordinator.core.effect import operation_key
from coordinator.core.receipt import receipt
from coordinator.core.record import RecordKind
from coordinator.store.admit import Admission, Admitted, admit
from coordinator.store.commit import (
    Committed,
    Facts,
    Finished,
    NewOperation,
    NewVersion,
    Proposal,
    Result,
    commit,
)
from coordinator.store.database import Connection, Database
from coordinator.store.keys import tenant_named
from coordinator.store.lease import Claim
from coordinator.store.queue import Claimed, claim
from coordinator.store.settle import Settlement, settle
from coordinator.store.tasks import NewTask
from coordinator.store.workers import Registration
from tests.support import eventually

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OWNER = uuid7()
NO_KINDS: Mapping[str, RecordKind[Any]] = {}
_numbers = itertools.count()


async def new_tenant(url: str, name: str) -> UUID:
    connection = await asyncpg.connect(url)
    try:
        return await tenant_named(connection, name, uuid7())
    finally:
        await connection.close()


def admission(key: str | None = None, **changes: Any) -> Admission:
    made = Admission(
        id=uuid7(),
        key=key or f"key-{next(_numbers)}",
        fingerprint=b"f" * 32,
        type="quote",
        class_="interactive",
        request=b"{}",
        record_kind=None,
        record_id=None,
        requested_by=uuid7(),
        traceparent=TRACE,
        time_limit_ms=30_000,
        lease_owner=OWNER,
        lease_ms=30_000,
        queue_depth=1_000,
    )
    return msgspec.structs.replace(made, **changes)


def queued(key: str | None = None, **changes: Any) -> Admission:
    """Wants to wait for a slot."""
    return admission(key, **{"lease_owner": None, "estimated_ms": 100, **changes})


async def claim_queued(
    database: Database, tenant: UUID, *wanted: str, owner: UUID = OWNER, types: Sequence[str] = ("quote",)
) -> list[Claimed]:
    """What was there to claim, of these classes (default: one of the usual class)."""
    by = Claim(owner, 30_000, types)
    async with database.transaction(tenant) as connection:
        found = await claim(connection, tenant, wanted or ("interactive",), by)
    return [each for each in found if each is not None]


async def admitted(database: Database, tenant: UUID, **changes: Any) -> UUID:
    """The id of a decision that was stored."""
    one = admission(**changes)
    async with database.transaction(tenant) as connection:
        (result,) = await admit(connection, tenant, [one])
    assert isinstance(result, Admitted)
    return one.id


def proposal(
    decision: UUID,
    *,
    changes: Sequence[NewVersion] = (),
    operations: Sequence[NewOperation] = (),
    **more: Any,
) -> Proposal:
    """Wants to commit: ``{"answer": <decision>}`` and the receipts that belong to it."""

    def finish(facts: Facts) -> Finished:
        own = receipt("decision.committed", decision_id=str(decision))
        promised = [
            receipt("operation.dispatching", decision_id=str(decision), operation_id=str(op.id))
            for op in operations
        ]
        return Finished(msgspec.json.encode({"answer": str(decision)}), 201, None, [own, *promised])

    made = Proposal(
        decision_id=decision,
        decision_type="quote",
        token=1,
        status="committed",
        changes=changes,
        reads=(),
        operations=operations,
        traceparent=TRACE,
        lease_owner=OWNER,
        lease_ms=30_000,
        fresh=lambda: True,
        finish=finish,
    )
    return msgspec.structs.replace(made, **more)


def changes(id: str, base: int, value: int = 0, kind: str = "proposal") -> list[NewVersion]:
    return [NewVersion(kind, id, base, msgspec.json.encode({"value": value}))]


def new_operation(decision: UUID, ordinal: int = 0, guarantee: bytes = b'{"kind":"none"}') -> NewOperation:
    payload = b'{"amount_minor":100}'
    return NewOperation(
        id=uuid7(),
        effect="send",
        ordinal=ordinal,
        key=operation_key(str(decision), "send", ordinal),
        payload=payload,
        payload_hash=digest(payload),
        guarantee=guarantee,
        linked=False,
        after=(),
        on_failure="keep",
        compensation=None,
    )


async def commit_all(
    database: Database, tenant: UUID, *proposals: Proposal, kinds: Mapping[str, RecordKind[Any]] = NO_KINDS
) -> Sequence[Result]:
    """All of them in one transaction."""
    return await database.run(tenant, lambda connection: commit(connection, tenant, proposals, kinds=kinds))


async def promised(database: Database, tenant: UUID, *, lease_ms: int = 30_000) -> tuple[UUID, NewOperation]:
    """A committed decision and the operation that it promised, held by `OWNER` under token 1."""
    decision = await admitted(database, tenant)
    op = new_operation(decision)
    (result,) = await commit_all(database, tenant, proposal(decision, operations=[op], lease_ms=lease_ms))
    assert isinstance(result, Committed)
    return decision, op


def settlement(decision: UUID, op: NewOperation, state: str, token: int = 1, **more: Any) -> Settlement:
    made = Settlement(
        operation_id=op.id,
        decision_id=decision,
        token=token,
        state=state,
        reference="ref-1" if state == "succeeded" else None,
        reason="because" if state in ("failed", "uncertain") else None,
        due_ms=None,
        sent=True,
        asked=False,
        in_doubt=False,
        linked=False,
    )
    return msgspec.structs.replace(made, **more)


def new_task(decision: UUID, **more: Any) -> NewTask:
    """A reading that any worker with the capability ``research`` may make, with half a minute for it."""
    made = NewTask(
        id=uuid7(),
        decision_id=decision,
        decision_token=1,
        evidence="research",
        source="research",
        capability="research",
        pinned=None,
        may_fall_back=False,
        request=b'{"input":{}}',
        traceparent=TRACE,
        deadline_ms=30_000,
        max_attempts=3,
    )
    return msgspec.structs.replace(made, **more)


def registration(name: str = "w1", **more: Any) -> Registration:
    made = Registration(id=uuid7(), name=name, capabilities=["research"], max_tasks=3, incarnation=None)
    return msgspec.structs.replace(made, **more)


async def settle_all(database: Database, tenant: UUID, *settlements: Settlement) -> Sequence[bool]:
    """All of them in one transaction."""
    return await database.run(
        tenant, lambda connection: settle(connection, tenant, settlements, retries_per_minute=1_000)
    )


async def kinds_of(root: asyncpg.Connection, tenant: UUID, **of: UUID) -> list[str]:
    """The kinds of a tenant's receipts in the order of its log; ``decision=`` or ``operation=`` chooses."""
    rows = await root.fetch(
        "SELECT kind FROM receipts WHERE tenant_id = $1 AND ($2::uuid IS NULL OR decision_id = $2)"
        " AND ($3::uuid IS NULL OR operation_id = $3) ORDER BY index",
        tenant,
        of.get("decision"),
        of.get("operation"),
    )
    return [row["kind"] for row in rows]


async def blocked(root: asyncpg.Connection, count: int = 1) -> None:
    """Returns once ``count`` connections wait for a lock that another one holds."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"

    async def enough() -> bool:
        return int(await root.fetchval(waiting)) >= count

    await eventually(enough, what=f"{count} connections wait for a lock")


async def only_row(root: asyncpg.Connection | Connection, query: str, *arguments: object) -> asyncpg.Record:
    (row,) = await root.fetch(query, *arguments)
    return row


async def expire(root: asyncpg.Connection, *ids: UUID) -> None:
    """Let the leases of these decisions and operations run out now."""
    for table in ("decisions", "operations"):
        await root.execute(
            f"UPDATE {table} SET lease_expires_at = clock_timestamp() - interval '1 s'"
            " WHERE id = ANY ($1::uuid[]) AND lease_owner IS NOT NULL",
            ids,
        )
