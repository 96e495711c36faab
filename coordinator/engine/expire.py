"""Expire: reviews that nobody ended in time end as `expired`; on the way, the open ones are counted.

Every process looks, every `review_poll_ms`; a row is taken with SKIP LOCKED, so that each is ended once. A review that is being
approved at the moment its time runs out is left to that approval.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from uuid import UUID

import anyio

from coordinator import telemetry
from coordinator.core.view import OutcomeView
from coordinator.engine.reviewing import Ended, count_end, end
from coordinator.engine.run import Engine
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store import reviews
from coordinator.store.database import Connection

log = logging.getLogger(__name__)
AT_ONCE = 64
OUTCOME = OutcomeView(
    kind="expired",
    reason="nobody reviewed it in time; nothing was changed, nothing was sent",
    code="review-expired",
)


async def expire(engine: Engine, types: Sequence[str]) -> None:
    """Runs as long as the service does."""
    while True:
        try:
            await expire_overdue(engine, types)
        except (CommitUnknown, Overloaded, OSError) as error:
            log.warning("could not look for reviews that are over: %s", error)
        except Exception:  # the boundary of a loop that must not end; the next round looks again
            log.exception("could not look for reviews that are over")
        await anyio.sleep(engine.settings.review_poll_ms / 1000)


async def expire_overdue(engine: Engine, types: Sequence[str]) -> None:
    """One round, over all tenants."""
    async with engine.boundary.database.dispatch_view() as connection:
        tenants = await reviews.tenants_with_overdue(connection)
        open_now = await reviews.open_by_type(connection)
    for type in types:  # others are another service's to count
        telemetry.REVIEWS_OPEN.labels(type).set(open_now.get(type, 0))
    for tenant in tenants:
        for ended in await engine.boundary.database.run(tenant, partial(_expire, tenant)):
            count_end(ended)


async def _expire(tenant: UUID, connection: Connection) -> list[Ended]:
    rows = await reviews.overdue(connection, tenant, limit=AT_ONCE)
    return [await end(connection, tenant, row, "expired", OUTCOME) for row in rows]
