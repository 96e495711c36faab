"""Records: reading them, locking them in the one global order, and the explicit PUT.

Records are locked before anything else in a transaction, in (kind, id) order. One that does not exist yet is locked through a row
at version 0, so that "it was not there" can be relied upon like any other version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.canonical import digest
from coordinator.core.receipt import receipt
from coordinator.errors import PreconditionFailed
from coordinator.store import log
from coordinator.store.database import Connection

Key = tuple[str, str]


class Locked(msgspec.Struct, frozen=True):
    """A record's version and data (JSON bytes; None at version 0)."""

    version: int
    data: bytes | None


READ = """
SELECT r.kind, r.id, r.version, r.data
FROM records r JOIN unnest($2::text[], $3::text[]) AS k (kind, id) USING (kind, id)
WHERE r.tenant_id = $1
"""

# ORDER BY before FOR UPDATE: rows are locked in the order in which the sort delivers them.
LOCK = """
SELECT r.kind, r.id, r.version, r.data
FROM records r JOIN unnest($2::text[], $3::text[]) AS k (kind, id) USING (kind, id)
WHERE r.tenant_id = $1
ORDER BY r.kind COLLATE "C", r.id COLLATE "C"
FOR NO KEY UPDATE OF r
"""

# The row that this makes is locked by having been made.
ANCHOR = """
INSERT INTO records (tenant_id, kind, id, version, data)
SELECT $1, k.kind, k.id, 0, NULL FROM unnest($2::text[], $3::text[]) AS k (kind, id)
ORDER BY k.kind COLLATE "C", k.id COLLATE "C"
ON CONFLICT (tenant_id, kind, id) DO NOTHING
RETURNING kind, id, version, data
"""

PUT = """
WITH put AS (
    UPDATE records SET version = version + 1, data = $5, updated_at = clock_timestamp()
    WHERE tenant_id = $1 AND kind = $2 AND id = $3 AND version = $4
    RETURNING version, data
)
INSERT INTO record_versions (tenant_id, kind, id, version, data, key_id)
SELECT $1, $2, $3, put.version, put.data, $6 FROM put RETURNING version
"""

HISTORY = """
SELECT version, data, decision_id, key_id, at FROM record_versions
WHERE tenant_id = $1 AND kind = $2 AND id = $3 AND version < $4 ORDER BY version DESC LIMIT $5
"""

ANY_VERSION = 2**62


class Version(msgspec.Struct, frozen=True):
    version: int
    data: bytes
    decision_id: UUID | None
    key_id: UUID | None
    at: datetime


async def read_records(connection: Connection, tenant: UUID, keys: Collection[Key]) -> dict[Key, Locked]:
    """Those of the records that exist, unlocked."""
    if not keys:
        return {}
    rows = await connection.fetch(READ, tenant, [kind for kind, _ in keys], [id for _, id in keys])
    return {(row["kind"], row["id"]): Locked(row["version"], row["data"]) for row in rows}


async def lock_records(
    connection: Connection, tenant: UUID, keys: Set[Key], *, absent: Collection[Key] = ()
) -> dict[Key, Locked]:
    """All of the records, locked until the transaction ends. ``absent`` are those of the keys that are thought not to exist yet:
    where that is right, it saves a round trip."""
    locked = await _lock(connection, ANCHOR, tenant, absent)
    locked |= await _lock(connection, LOCK, tenant, keys - locked.keys())
    if missing := keys - locked.keys():
        await _lock(connection, ANCHOR, tenant, missing)
        locked |= await _lock(connection, LOCK, tenant, missing)
    return locked


async def _lock(
    connection: Connection, statement: str, tenant: UUID, keys: Collection[Key]
) -> dict[Key, Locked]:
    if not keys:
        return {}
    rows = await connection.fetch(statement, tenant, [kind for kind, _ in keys], [id for _, id in keys])
    return {(row["kind"], row["id"]): Locked(row["version"], row["data"]) for row in rows}


async def put_if_version(
    connection: Connection, tenant: UUID, key: Key, *, expected: int, data: bytes, key_id: UUID
) -> int:
    """Replace a record's data if it is still at ``expected`` (0: does not exist). The record must be locked. The new version;
    raises `PreconditionFailed`."""
    kind, id = key
    version = await connection.fetchval(PUT, tenant, kind, id, expected, data, key_id)
    if version is None:
        raise PreconditionFailed(f"record {kind}/{id} is not at version {expected}")
    facts = {"kind": kind, "id": id, "version": version, "data_digest": digest(data), "key_id": str(key_id)}
    await log.append(connection, tenant, [receipt("record.put", decision_id=None, record=facts)])
    return int(version)


async def history(
    connection: Connection, tenant: UUID, key: Key, *, below: int | None, limit: int
) -> Sequence[Version]:
    """The newest versions first, those below ``below`` if given."""
    rows = await connection.fetch(HISTORY, tenant, *key, below or ANY_VERSION, limit)
    return [
        Version(row["version"], row["data"], row["decision_id"], row["key_id"], row["at"]) for row in rows
    ]
