"""Which processes serve this database, as they said last. The rows belong to no tenant: see `NIL_TENANT`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from coordinator.store.database import NIL_TENANT, Database

ANNOUNCE = """
INSERT INTO processes (tenant_id, id, state, expires_at)
VALUES ($1, $2, $3, clock_timestamp() + $4 * interval '1 s')
ON CONFLICT (tenant_id, id) DO UPDATE SET state = excluded.state, expires_at = excluded.expires_at
"""

# Long after they fell silent, so that nothing is lost by a clock that jumps; SKIP LOCKED, since everyone tidies up.
FORGET = """
DELETE FROM processes WHERE tenant_id = $1 AND id IN (
    SELECT id FROM processes WHERE tenant_id = $1 AND expires_at < clock_timestamp() - interval '1 minute'
    FOR UPDATE SKIP LOCKED)
"""

PRESENT = "SELECT state FROM processes WHERE tenant_id = $1 AND expires_at > clock_timestamp()"

LEAVE = "DELETE FROM processes WHERE tenant_id = $1 AND id = $2"


async def announce(database: Database, id: UUID, state: bytes, seconds: float) -> None:
    """This process is there, for so long unless it says so again."""
    async with database.transaction(NIL_TENANT) as connection:
        await connection.execute(ANNOUNCE, NIL_TENANT, id, state, seconds)
        await connection.execute(FORGET, NIL_TENANT)


async def present(database: Database) -> Sequence[bytes]:
    """What each process that is there said last."""
    async with database.transaction(NIL_TENANT) as connection:
        return [row["state"] for row in await connection.fetch(PRESENT, NIL_TENANT)]


async def leave(database: Database, id: UUID) -> None:
    """This process stops."""
    async with database.transaction(NIL_TENANT) as connection:
        await connection.execute(LEAVE, NIL_TENANT, id)
