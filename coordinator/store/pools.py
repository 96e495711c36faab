"""Pools over all processes: the slots of a provider that each process holds, and what its rates have granted.

    declare   a starting process writes the limits as its program declares them; the latest declaration wins
    share     under the pools' row locks: what everybody holds is read, one process's part is computed, and its row is written under
              a lease. The reading is a statement of its own, begun after the lock was granted, so that it sees what the one before wrote
    claim     under the pool's row lock: as many calls as there is room for may begin
    release   a stopping process gives back

A share counts until `frees_at`: its lease, and then the longest call that may have begun before it ran out. So a process that was
killed or paused has no call under way in a slot that another holds. A transaction that is paused itself loses the lock, and its
connection, after `LET_GO_MS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

import asyncpg
import msgspec

from coordinator.core.pool import Limits
from coordinator.core.rate import Correction, Granted, Rates
from coordinator.core.share import Holder
from coordinator.store.database import NIL_TENANT, Connection

LET_GO_MS = 1_000

LET_GO = f"; SET LOCAL idle_in_transaction_session_timeout = {LET_GO_MS}"

DECLARE = """
INSERT INTO pools (tenant_id, provider, concurrency, requests_per_min, units_per_min)
SELECT $1, said.*
FROM unnest($2::text[], $3::int[], $4::int[], $5::bigint[]) AS said (provider, concurrency, requests_per_min, units_per_min)
WHERE NOT EXISTS (
    SELECT FROM pools
    WHERE tenant_id = $1 AND provider = said.provider
        AND (concurrency, requests_per_min, units_per_min)
            IS NOT DISTINCT FROM (said.concurrency, said.requests_per_min, said.units_per_min)
)
ON CONFLICT (tenant_id, provider) DO UPDATE
SET concurrency = excluded.concurrency, requests_per_min = excluded.requests_per_min, units_per_min = excluded.units_per_min,
    declared_at = clock_timestamp()
"""


async def declare(connection: Connection, pools: Mapping[str, Limits]) -> None:
    """In one order, so that processes that start together do not wait for each other in a circle; what is there already is not
    locked."""
    names = sorted(pools)
    await connection.execute(
        DECLARE,
        NIL_TENANT,
        names,
        [pools[name].concurrency for name in names],
        [pools[name].requests_per_min for name in names],
        [pools[name].units_per_min for name in names],
    )


LOCK = """
SELECT provider, concurrency FROM pools
WHERE tenant_id = $1 AND provider = ANY ($2::text[]) AND concurrency IS NOT NULL
ORDER BY provider FOR UPDATE
"""

HELD = """
WITH freed AS (
    DELETE FROM pool_shares WHERE tenant_id = $1 AND provider = ANY ($2::text[]) AND frees_at <= clock_timestamp()
)
SELECT provider, process_id, slots, wanted, expires_at > clock_timestamp() AS alive,
    coalesce(extract(epoch FROM clock_timestamp() - waiting_since) * 1000, 0)::int AS waited_ms
FROM pool_shares
WHERE tenant_id = $1 AND provider = ANY ($2::text[]) AND frees_at > clock_timestamp()
"""

WRITE = """
INSERT INTO pool_shares
    (tenant_id, provider, process_id, slots, busy, waiting, wanted, waiting_since, expires_at, frees_at)
SELECT $1, provider, $2, slots, busy, waiting, wanted,
    CASE WHEN waiting > 0 THEN clock_timestamp() - waited_ms * interval '1 ms' END,
    clock_timestamp() + $3 * interval '1 ms',
    clock_timestamp() + ($3 + longest_ms) * interval '1 ms'
FROM unnest($4::text[], $5::int[], $6::int[], $7::int[], $8::int[], $9::int[], $10::int[])
    AS mine (provider, slots, busy, waiting, wanted, waited_ms, longest_ms)
ON CONFLICT (tenant_id, provider, process_id) DO UPDATE
SET slots = excluded.slots, busy = excluded.busy, waiting = excluded.waiting, wanted = excluded.wanted,
    waiting_since = excluded.waiting_since, expires_at = excluded.expires_at, frees_at = excluded.frees_at
"""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself: what it holds from now on, and what it has to do. ``longest_ms``: how long after its lease a call
    of it may still be under way."""

    slots: int
    busy: int
    waiting: int
    wanted: int
    waited_ms: int
    longest_ms: int


Decide = Callable[[str, int, Sequence[Holder], int], Told]
"""``decide(provider, limit, holders, me)``: under the lock, and from then on the process uses no more than it says."""


async def share(
    connection: Connection, process: UUID, providers: Sequence[str], lease_ms: int, decide: Decide
) -> None:
    """Take, renew or give back slots of ``providers``, as ``decide`` says."""
    limits = {
        row["provider"]: row["concurrency"] for row in await connection.fetch(LOCK, NIL_TENANT, providers)
    }
    held: dict[str, dict[UUID, Holder]] = {name: {process: Holder(slots=0)} for name in limits}
    for row in await connection.fetch(HELD, NIL_TENANT, [*limits]):
        held[row["provider"]][row["process_id"]] = Holder(
            slots=row["slots"], wanted=row["wanted"], waited_ms=row["waited_ms"], alive=row["alive"]
        )
    told: dict[str, Told] = {}
    for name, limit in limits.items():
        order = sorted(held[name])
        holders = [held[name][each] for each in order]
        told[name] = decide(name, limit, holders, order.index(process))
    await connection.execute(
        WRITE,
        NIL_TENANT,
        process,
        lease_ms,
        [*told],
        [each.slots for each in told.values()],
        [each.busy for each in told.values()],
        [each.waiting for each in told.values()],
        [each.wanted for each in told.values()],
        [each.waited_ms for each in told.values()],
        [each.longest_ms for each in told.values()],
    )


RELEASE = """
UPDATE pool_shares SET slots = still.busy, busy = still.busy, wanted = 0, waiting = 0, waiting_since = NULL,
    expires_at = least(expires_at, clock_timestamp())
FROM unnest($3::text[], $4::int[]) AS still (provider, busy)
WHERE tenant_id = $1 AND process_id = $2 AND pool_shares.provider = still.provider AND slots >= still.busy
"""

FORGET = "DELETE FROM pool_shares WHERE tenant_id = $1 AND process_id = $2 AND slots = 0"


async def release(connection: Connection, process: UUID, busy: Mapping[str, int]) -> None:
    """Give back what is free; slots that are still ``busy`` come free when the longest call has ended."""
    await connection.execute(RELEASE, NIL_TENANT, process, [*busy], [*busy.values()])
    await connection.execute(FORGET, NIL_TENANT, process)


LOCK_RATES = """
SELECT concurrency, requests_per_min, units_per_min, rates, extract(epoch FROM clock_timestamp())::float8 AS now
FROM pools WHERE tenant_id = $1 AND provider = $2 FOR UPDATE
"""

KEEP_RATES = "UPDATE pools SET rates = $3 WHERE tenant_id = $1 AND provider = $2"

_RATES = msgspec.json.Decoder(Rates)


async def claim(
    connection: Connection, provider: str, calls: Sequence[int], corrections: Sequence[Correction]
) -> Granted:
    """As many of ``calls`` (their units, in order) as may begin now, once ``corrections`` are made."""
    row = await connection.fetchrow(LOCK_RATES, NIL_TENANT, provider)
    if row is None:
        raise LookupError(f"the pool of provider {provider!r} was not declared")
    rates = _RATES.decode(row["rates"])
    granted = rates.claim(_limits(row), row["now"], calls, corrections)
    await connection.execute(KEEP_RATES, NIL_TENANT, provider, msgspec.json.encode(rates))
    return granted


STATE = """
SELECT provider, concurrency, requests_per_min, units_per_min, rates, extract(epoch FROM clock_timestamp())::float8 AS now,
    others.busy, others.waiting, others.waited_ms
FROM pools, LATERAL (
    SELECT coalesce(sum(busy), 0)::int AS busy, coalesce(sum(waiting), 0)::int AS waiting,
        coalesce(max(extract(epoch FROM clock_timestamp() - waiting_since)) * 1000, 0)::int AS waited_ms
    FROM pool_shares AS shares
    WHERE shares.tenant_id = $1 AND shares.provider = pools.provider AND process_id <> $3 AND expires_at > clock_timestamp()
) AS others
WHERE tenant_id = $1 AND provider = ANY ($2::text[])
"""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as the other processes said last, and its rates now; ``None`` where there is no such limit."""

    limits: Limits
    busy: int
    waiting: int
    waited_ms: int
    requests_left: int | None
    units_left: int | None
    resets_in_s: float


async def state(connection: Connection, process: UUID, providers: Sequence[str]) -> dict[str, PoolState]:
    """By provider; what ``process`` itself does is left out."""
    rows = await connection.fetch(STATE, NIL_TENANT, providers, process)
    found: dict[str, PoolState] = {}
    for row in rows:
        limits, rates = _limits(row), _RATES.decode(row["rates"])
        rates.claim(limits, row["now"], [])  # lets time pass
        requests, units = limits.requests_per_min, limits.units_per_min
        found[row["provider"]] = PoolState(
            limits=limits,
            busy=row["busy"],
            waiting=row["waiting"],
            waited_ms=row["waited_ms"],
            requests_left=None if requests is None else max(0, rates.requests.left(requests)),
            units_left=None if units is None else max(0, rates.units.left(units)),
            resets_in_s=max(rates.requests.resets_in_s(), rates.units.resets_in_s()),
        )
    return found


def _limits(row: asyncpg.Record) -> Limits:
    return Limits(
        concurrency=row["concurrency"],
        requests_per_min=row["requests_per_min"],
        units_per_min=row["units_per_min"],
    )
