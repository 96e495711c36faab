"""Cancel: a decision that has not come to rest is stopped, wherever it is.

    runs here        its path is cancelled, with its readings, connections, tasks of workers and clean-ups
    runs elsewhere   it is brought to rest under the token its holder has: whoever commits first wins, the other changes nothing
    waits            the same; nobody holds it

Afterwards it rests, and what it did is over.
"""

from __future__ import annotations

import logging
from uuid import UUID

from coordinator.core.decision import RESTING, Coordinator
from coordinator.engine.admit import resume
from coordinator.engine.commit import commit, rest_without_commit
from coordinator.engine.holdings import Holdings
from coordinator.store import queue, reading
from coordinator.store.reading import DecisionRow
from coordinator.store.records import Locked

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Whoever waits is told when the run is over; this is for a word that was lost."""


class Cancelling:
    """Of one service."""

    def __init__(self, coordinator: Coordinator, holdings: Holdings) -> None:
        self._coordinator = coordinator
        self._holdings = holdings

    async def stopped(self, tenant: UUID, row: DecisionRow) -> DecisionRow:
        """The decision at rest; one that rests already is left as it is."""
        while row.status not in RESTING:
            if row.id in self._holdings.runs:
                run = self._holdings.runs[row.id]
                run.cancelled = True
                run.cancel()
                await self._holdings.awaited.rested(tenant, row.id, LOOK_S)
            else:
                await self._stop_elsewhere(tenant, row)
            row = await self._look(tenant, row)
        return row

    async def _look(self, tenant: UUID, row: DecisionRow) -> DecisionRow:
        async with self._holdings.engine.boundary.database.transaction(tenant) as connection:
            return await reading.decision(connection, tenant, row.id) or row

    async def _stop_elsewhere(self, tenant: UUID, row: DecisionRow) -> None:
        claimed = queue.Claimed(
            id=row.id,
            token=row.fencing_token,
            type=row.type,
            class_=row.class_,
            request=row.request,
            traceparent=row.traceparent,
            requested_by=row.id,
            created_at=row.created_at,
            remaining_ms=0,
            waited_ms=0,
            estimated_ms=None,
            requeues=0,
            record=Locked(0, None),
        )
        run = resume(self._coordinator, tenant, claimed)
        run.accounted = False
        rest = rest_without_commit(
            "cancelled", "cancelled", "cancelled on request; nothing was changed, nothing was sent"
        )
        log.info("cancelling decision %s of type %s, which is not held here", row.id, row.type)
        await commit(self._holdings.engine, run, rest)
