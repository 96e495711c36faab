"""Named locks: a decision takes them in the order of their names before it reads, and lets go of them in the transaction of its rest.

    take      the decision's row is locked (is it still held, under this token), then the locks' rows in order; who gets what is
              `core.lock`'s rule; rows, receipts and what the decision's record holds now, in one transaction
    commit    the locks' rows in order, behind the decisions; tokens are compared, and whoever comes to rest lets go of them

A process that dies in between leaves its locks with its decision, which is queued again once its lease has run out: from then on
they are anybody's, and the decision's own, under higher tokens, if nobody took them before it runs again. A holder that was paused past
its time finds its token old in the commit, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.lock import Lock, Locks, Terms, Wish
from coordinator.core.receipt import Receipt
from coordinator.failpoints import failpoint
from coordinator.store import log
from coordinator.store.database import Connection
from coordinator.store.records import Key, Locked, read_records


class Claim(msgspec.Struct, frozen=True):
    """A wish, and the record that its decision is about."""

    wish: Wish
    record: Key | None


class Granted(msgspec.Struct, frozen=True):
    """The tokens of the locks that a decision has now, and what its record holds since then."""

    tokens: Mapping[str, int]
    record: Locked


HOLD = """
SELECT id, fencing_token FROM decisions
WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner IS NOT NULL
ORDER BY id
FOR NO KEY UPDATE
"""

# The row that this makes is locked by having been made.
ANCHOR = """
INSERT INTO locks (tenant_id, name) SELECT $1, name FROM unnest($2::text[]) AS n (name)
ORDER BY name COLLATE "C"
ON CONFLICT (tenant_id, name) DO NOTHING
"""

_COLUMNS = """name, fencing_token, decision_id, decision_token, taken_at, expires_at, wanted_by, wanted_since, wanted_until"""

LOCK = f"""
SELECT {_COLUMNS} FROM locks
WHERE tenant_id = $1 AND name = ANY ($2::text[])
ORDER BY name
FOR NO KEY UPDATE
"""

# A statement of its own: only one that begins after the rows are locked sees what their last holders have committed.
NOW = """
SELECT clock_timestamp() AS now,
       ARRAY(SELECT id FROM decisions
             WHERE tenant_id = $1 AND id = ANY ($2::uuid[]) AND lease_owner IS NOT NULL) AS running
"""

WRITE = """
UPDATE locks l
SET fencing_token = u.fencing_token, decision_id = u.decision_id, decision_token = u.decision_token, taken_at = u.taken_at,
    expires_at = u.expires_at, wanted_by = u.wanted_by, wanted_since = u.wanted_since, wanted_until = u.wanted_until
FROM unnest($2::text[], $3::bigint[], $4::uuid[], $5::bigint[], $6::timestamptz[], $7::timestamptz[], $8::uuid[],
            $9::timestamptz[], $10::timestamptz[])
     AS u (name, fencing_token, decision_id, decision_token, taken_at, expires_at, wanted_by, wanted_since, wanted_until)
WHERE l.tenant_id = $1 AND l.name = u.name
"""

HELD = """
SELECT l.name, l.fencing_token, l.decision_id, d.type, l.taken_at, l.expires_at
FROM locks l JOIN decisions d ON d.tenant_id = l.tenant_id AND d.id = l.decision_id AND d.lease_owner IS NOT NULL
WHERE l.tenant_id = $1 AND l.decision_id IS NOT NULL AND l.name > $2
ORDER BY l.name LIMIT $3
"""


async def take(
    connection: Connection, tenant: UUID, claims: Sequence[Claim], *, terms: Terms
) -> Sequence[Granted | None]:
    """Give each claim what is free, first come, first served. None to whoever does not hold its decision any more."""
    wishes = [claim.wish for claim in claims]
    rows = await connection.fetch(HOLD, tenant, [wish.decision_id for wish in wishes])
    holders = {(row["id"], row["fencing_token"]) for row in rows}
    able = [wish for wish in wishes if (wish.decision_id, wish.token) in holders]
    if not able:
        return [None for _ in claims]
    names = sorted({name for wish in able for name in wish.names})
    await connection.execute(ANCHOR, tenant, names)
    rows_of = await lock_rows(connection, tenant, names)
    theirs = [lock.decision_id for lock in rows_of.values() if lock.decision_id is not None]
    locks = Locks(rows_of, terms, *await _now(connection, tenant, theirs))
    tokens = {wish.decision_id: locks.grant(wish) for wish in able}
    await write(connection, tenant, locks.changed.values())
    records = await read_records(connection, tenant, {claim.record for claim in claims if claim.record})
    if locks.receipts:
        await log.append(connection, tenant, locks.receipts)
    await failpoint("lock.before")
    return [
        Granted(tokens[claim.wish.decision_id], records.get(claim.record or ("", ""), Locked(0, None)))
        if (claim.wish.decision_id, claim.wish.token) in holders
        else None
        for claim in claims
    ]


async def _now(
    connection: Connection, tenant: UUID, holders: Sequence[UUID]
) -> tuple[datetime, Collection[UUID]]:
    row = await connection.fetchrow(NOW, tenant, holders)
    assert row is not None
    return row["now"], row["running"]


async def lock_rows(connection: Connection, tenant: UUID, names: Collection[str]) -> dict[str, Lock]:
    """Those of the locks that exist, locked until the transaction ends."""
    return {row["name"]: Lock(*row) for row in await connection.fetch(LOCK, tenant, names)}


async def write(connection: Connection, tenant: UUID, changed: Collection[Lock]) -> None:
    """Store locks whose rows are locked."""
    if changed:
        await connection.execute(WRITE, tenant, *map(list, zip(*map(astuple, changed), strict=True)))


def lost(held: Mapping[str, Lock], decision: UUID, tokens: Mapping[str, int]) -> Sequence[str]:
    """Those of the locks that the decision does not hold any more under these tokens."""
    return [
        name
        for name, token in tokens.items()
        if name not in held or (held[name].decision_id, held[name].token) != (decision, token)
    ]


async def release(
    connection: Connection, tenant: UUID, held: Mapping[str, Lock], decisions: Collection[UUID]
) -> list[Receipt]:
    """Free what those decisions, which come to rest, have; the receipts to append."""
    theirs = [lock for lock in held.values() if lock.decision_id in decisions]
    receipts = [lock.release() for lock in theirs]
    await write(connection, tenant, theirs)
    return receipts


class HeldLock(msgspec.Struct, frozen=True):
    """A lock that a running decision holds."""

    name: str
    fencing_token: int
    decision_id: UUID
    type: str
    taken_at: datetime
    expires_at: datetime


async def held_locks(
    connection: Connection, tenant: UUID, *, after: str = "", limit: int
) -> Sequence[HeldLock]:
    """By name, those behind ``after``."""
    return [HeldLock(**row) for row in await connection.fetch(HELD, tenant, after, limit)]
