"""Recover: keep hold of what this process works on, and take over what nobody holds any more.

    renew     every third of a lease, this process extends the leases of its decisions and operations
    sweep     every `poll_ms`, and when something is known to be due: tenants that have work nobody holds, then their rows
    look      every `queue_poll_ms`: how many decisions are queued, of all tenants

The sweep puts decisions whose holder fell silent back into the queue; whoever claims one walks its path from the beginning: it had
changed nothing yet. Operations are claimed with SKIP LOCKED and a higher fencing token; one may have been sent: see `dispatch`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import anyio

from coordinator import telemetry
from coordinator.engine.run import Engine
from coordinator.engine.schedule import Schedule
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.failpoints import failpoint
from coordinator.store import lease, queue

log = logging.getLogger(__name__)
CLAIM_AT_ONCE = 64


@dataclass(slots=True)
class Held:
    """A row that this process holds. ``until`` is on the monotonic clock and counted from before the lease was written, so the
    lease is certainly good until then."""

    tenant: UUID
    until: float
    token: int


async def renew_leases(engine: Engine, decisions: dict[UUID, Held], operations: dict[UUID, Held]) -> None:
    """Runs as long as the service does."""
    while True:
        await anyio.sleep(engine.settings.lease_ms / 3000)
        by_tenant: dict[UUID, tuple[list[UUID], list[UUID]]] = defaultdict(lambda: ([], []))
        for kind, held in enumerate((decisions, operations)):
            for id, row in held.items():
                by_tenant[row.tenant][kind].append(id)
        for tenant, (of_decisions, of_operations) in by_tenant.items():
            renew = partial(_renew, engine, tenant, of_decisions, of_operations, operations)
            await quietly("renew leases", renew)


async def _renew(
    engine: Engine, tenant: UUID, decisions: list[UUID], operations: list[UUID], held: dict[UUID, Held]
) -> None:
    """What another process has taken meanwhile is not held any more, and will not be sent from here."""
    until = time.monotonic() + engine.settings.lease_ms / 1000
    renewed = await engine.boundary.database.run(
        tenant,
        lambda connection: lease.renew(
            connection,
            tenant,
            owner=engine.owner,
            lease_ms=engine.settings.lease_ms,
            decisions=decisions,
            operations=operations,
        ),
    )
    for id in operations:
        if id in held:
            held[id].until = until if id in renewed else 0.0


@dataclass(frozen=True, slots=True)
class Takers:
    """Where the sweep brings what it finds. ``free()`` is how many operations this process can take on now."""

    free: Callable[[], int]
    requeued: Callable[[UUID, str], None]
    overdue: Callable[[UUID, queue.Claimed, float], None]
    operation: Callable[[UUID, lease.ClaimedOperation, float], None]


async def sweep(engine: Engine, takers: Takers, sleep: Callable[[], Awaitable[None]]) -> None:
    """Runs as long as the service does."""
    while True:
        await quietly("look for work", partial(_sweep_once, engine, takers))
        await sleep()


async def _sweep_once(engine: Engine, takers: Takers) -> None:
    async with engine.boundary.database.dispatch_view() as connection:
        tenants = await lease.tenants_with_work(connection)
    for tenant in tenants:
        await _sweep_tenant(engine, tenant, takers)


async def _sweep_tenant(engine: Engine, tenant: UUID, takers: Takers) -> None:
    until = time.monotonic() + engine.settings.lease_ms / 1000
    by = engine.boundary.by
    async with engine.boundary.database.transaction(tenant) as connection:
        requeued = await queue.requeue_expired(connection, tenant, limit=CLAIM_AT_ONCE)
        overdue = await queue.claim_overdue(connection, tenant, by, limit=CLAIM_AT_ONCE)
        due = await lease.claim_operations(connection, tenant, by, limit=min(takers.free(), CLAIM_AT_ONCE))
        if requeued or overdue or due:
            await failpoint("claim.before")
    if requeued or overdue or due:
        await failpoint("claim.after")
    for class_ in requeued:
        telemetry.TAKEN_OVER.labels("decision").inc()
        takers.requeued(tenant, class_)
    for decision in overdue:
        takers.overdue(tenant, decision, until)
    for operation in due:
        if operation.was == "dispatching":
            telemetry.TAKEN_OVER.labels("operation").inc()
        takers.operation(tenant, operation, until)


async def look_at_queue(engine: Engine, schedule: Schedule) -> None:
    """Runs as long as the service does."""
    while True:
        await quietly("look at the queue", partial(_look_once, engine, schedule))
        await anyio.sleep(engine.settings.queue_poll_ms / 1000)


async def _look_once(engine: Engine, schedule: Schedule) -> None:
    schedule.looking()
    async with engine.boundary.database.dispatch_view() as connection:
        waiting = await queue.waiting(connection)
    oldest: dict[str, float] = {}
    for row in waiting:
        oldest[row.class_] = max(row.oldest_ms, oldest.get(row.class_, 0.0))
    schedule.seen({(row.class_, row.tenant): row.depth for row in waiting}, oldest)


async def quietly(what: str, work: Callable[[], Awaitable[None]]) -> bool:
    """Whether it worked. A loop of the service survives a database that is away; what a failed round missed, the next finds."""
    try:
        await work()
        return True
    except (CommitUnknown, Overloaded, OSError) as error:
        log.warning("could not %s: %s", what, error)
    except Exception:  # the boundary of a loop that must not end
        log.exception("could not %s", what)
    return False
