"""Pools over all processes: the slots of a provider that each process holds, and what its rates have granted.

    declare   a starting process writes the limits as its program declares them; the latest declaration wins
    share     what everybody holds is read, one process's part is computed, and its row is written under a lease, unless another process
              has written one since
    claim     what was granted of late is read, how many calls may begin is computed, and that is written, unless another has claimed
    release   a stopping process gives back

Nothing is locked while anybody computes. A process that is paused in between finds that the others went on, and one that is paused with
its write done and not committed loses its connection after `LET_GO_MS`. (A lock that is taken first would be held for as long as the
process is paused: while a statement is being prepared, PostgreSQL takes its session for a busy one.)

A share counts until `frees_at`: its lease, and then the longest call that may have begun before it ran out. So a process that was
killed or paused has no call under way in a slot that another holds.
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


HELD = """
SELECT concurrency, moves, process_id, slots, wanted, waited_ms, expires_at > clock_timestamp() AS alive
FROM pools LEFT JOIN pool_shares
    ON pool_shares.tenant_id = $1 AND pool_shares.provider = pools.provider AND frees_at > clock_timestamp()
WHERE pools.tenant_id = $1 AND pools.provider = $2 AND concurrency IS NOT NULL
"""

WRITE_IF_UNMOVED = """
WITH unmoved AS (
    UPDATE pools SET moves = moves + 1 WHERE tenant_id = $1 AND provider = $2 AND moves = $3 RETURNING provider
), freed AS (
    DELETE FROM pool_shares USING unmoved
    WHERE tenant_id = $1 AND pool_shares.provider = unmoved.provider AND frees_at <= clock_timestamp() AND process_id <> $4
)
INSERT INTO pool_shares
    (tenant_id, provider, process_id, slots, busy, waiting, wanted, waited_ms, expires_at, frees_at)
SELECT $1, provider, $4, $5, $6, $7, $8, $9,
    clock_timestamp() + $10::int * interval '1 ms', clock_timestamp() + ($10 + $11::int) * interval '1 ms'
FROM unmoved
ON CONFLICT (tenant_id, provider, process_id) DO UPDATE
SET slots = excluded.slots, busy = excluded.busy, waiting = excluded.waiting, wanted = excluded.wanted,
    waited_ms = excluded.waited_ms, expires_at = excluded.expires_at, frees_at = excluded.frees_at
RETURNING slots
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


Decide = Callable[[int, Sequence[Holder], int], Told]
"""``decide(limit, holders, me)``: from then on the process uses no more than it says."""


async def share(connection: Connection, process: UUID, provider: str, lease_ms: int, decide: Decide) -> bool:
    """Take, renew or give back slots, as ``decide`` says; false if another was quicker, and nothing was written."""
    rows = await connection.fetch(HELD, NIL_TENANT, provider)
    if not rows:
        raise LookupError(f"the pool of provider {provider!r} limits no concurrency, or was not declared")
    held = {process: Holder(slots=0)} | {
        row["process_id"]: Holder(
            slots=row["slots"], wanted=row["wanted"], waited_ms=row["waited_ms"], alive=row["alive"]
        )
        for row in rows
        if row["process_id"] is not None
    }
    order = sorted(held)
    told = decide(rows[0]["concurrency"], [held[each] for each in order], order.index(process))
    written = await connection.fetchval(
        WRITE_IF_UNMOVED,
        NIL_TENANT,
        provider,
        rows[0]["moves"],
        process,
        told.slots,
        told.busy,
        told.waiting,
        told.wanted,
        told.waited_ms,
        lease_ms,
        told.longest_ms,
    )
    return written is not None


RELEASE = """
UPDATE pool_shares SET slots = still.busy, busy = still.busy, wanted = 0, waiting = 0, waited_ms = 0,
    expires_at = least(expires_at, clock_timestamp())
FROM unnest($3::text[], $4::int[]) AS still (provider, busy)
WHERE tenant_id = $1 AND process_id = $2 AND pool_shares.provider = still.provider AND slots >= still.busy
"""

FORGET = "DELETE FROM pool_shares WHERE tenant_id = $1 AND process_id = $2 AND slots = 0"


async def release(connection: Connection, process: UUID, busy: Mapping[str, int]) -> None:
    """Give back what is free; slots that are still ``busy`` come free when the longest call has ended."""
    await connection.execute(RELEASE, NIL_TENANT, process, [*busy], [*busy.values()])
    await connection.execute(FORGET, NIL_TENANT, process)


RATES = """
SELECT concurrency, requests_per_min, units_per_min, rates, claims, extract(epoch FROM clock_timestamp())::float8 AS now
FROM pools WHERE tenant_id = $1 AND provider = $2
"""

KEEP_RATES_IF_UNCLAIMED = """
UPDATE pools SET rates = $3, claims = claims + 1 WHERE tenant_id = $1 AND provider = $2 AND claims = $4
"""

_RATES = msgspec.json.Decoder(Rates)


async def claim(
    connection: Connection, provider: str, calls: Sequence[int], corrections: Sequence[Correction]
) -> Granted | None:
    """As many of ``calls`` (their units, in order) as may begin now, once ``corrections`` are made. None if another was quicker: then
    nothing was written, and the transaction should end before the next attempt, since it may have waited for the other's row."""
    row = await connection.fetchrow(RATES, NIL_TENANT, provider)
    if row is None:
        raise LookupError(f"the pool of provider {provider!r} was not declared")
    rates = _RATES.decode(row["rates"])
    granted = rates.claim(_limits(row), row["now"], calls, corrections)
    encoded = msgspec.json.encode(rates)
    done = await connection.execute(KEEP_RATES_IF_UNCLAIMED, NIL_TENANT, provider, encoded, row["claims"])
    return granted if done == "UPDATE 1" else None


STATE = """
SELECT provider, concurrency, requests_per_min, units_per_min, rates, extract(epoch FROM clock_timestamp())::float8 AS now,
    others.busy, others.waiting, others.waited_ms
FROM pools, LATERAL (
    SELECT coalesce(sum(busy), 0)::int AS busy, coalesce(sum(waiting), 0)::int AS waiting,
        coalesce(max(waited_ms), 0) AS waited_ms
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
