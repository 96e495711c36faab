"""Recover: keep hold of what this process works on, and take over what nobody holds any more.

    renew     every third of a lease, this process extends the leases of its decisions and operations
    sweep     every `poll_ms`, and when something is known to be due: tenants that have work nobody holds, then their rows,
              claimed with SKIP LOCKED and a higher fencing token

A taken-over decision walks its path from the beginning: it had changed nothing yet. A taken-over operation may have been
sent; see `dispatch`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import anyio

from coordinator import telemetry
from coordinator.engine.run import Engine
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.failpoints import failpoint
from coordinator.store import lease

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
            await _quietly("renew leases", renew)


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


async def sweep(
    engine: Engine,
    *,
    types: Sequence[str],
    free: Callable[[], tuple[int, int]],
    take_decision: Callable[[UUID, lease.ClaimedDecision, float], None],
    take_operation: Callable[[UUID, lease.ClaimedOperation, float], None],
    sleep: Callable[[], Awaitable[None]],
) -> None:
    """Runs as long as the service does. ``free()`` is how many decisions and operations this process can take on now."""
    while True:
        await _quietly(
            "look for work", partial(_sweep_once, engine, types, free, take_decision, take_operation)
        )
        await sleep()


async def _sweep_once(
    engine: Engine,
    types: Sequence[str],
    free: Callable[[], tuple[int, int]],
    take_decision: Callable[[UUID, lease.ClaimedDecision, float], None],
    take_operation: Callable[[UUID, lease.ClaimedOperation, float], None],
) -> None:
    async with engine.boundary.database.dispatch_view() as connection:
        tenants = await lease.tenants_with_work(connection)
    for tenant in tenants:
        until = time.monotonic() + engine.settings.lease_ms / 1000
        decisions, operations = (min(count, CLAIM_AT_ONCE) for count in free())
        async with engine.boundary.database.transaction(tenant) as connection:
            claim = lease.Claim(engine.owner, engine.settings.lease_ms, types)
            claimed = await lease.claim_decisions(connection, tenant, claim, limit=decisions)
            due = await lease.claim_operations(connection, tenant, claim, limit=operations)
            if claimed or due:
                await failpoint("claim.before")
        if claimed or due:
            await failpoint("claim.after")
        for decision in claimed:
            telemetry.TAKEN_OVER.labels("decision").inc()
            take_decision(tenant, decision, until)
        for operation in due:
            if operation.was == "dispatching":
                telemetry.TAKEN_OVER.labels("operation").inc()
            take_operation(tenant, operation, until)


async def _quietly(what: str, work: Callable[[], Awaitable[None]]) -> bool:
    """Whether it worked. A loop of the service survives a database that is away; what a failed round missed, the next finds."""
    try:
        await work()
        return True
    except (CommitUnknown, Overloaded, OSError) as error:
        log.warning("could not %s: %s", what, error)
    except Exception:  # the boundary of a loop that must not end
        log.exception("could not %s", what)
    return False
