"""Budgets as the api sees them, and the loop that keeps reservations honest.

expired     held, and nobody can be working under it any more        -> uncertain, never released
uncertain   its source is asked what was billed, if it can be asked  -> settled with the provider's word
            else a person says it: `resolve`
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar
from uuid import UUID

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.decision import Coordinator
from coordinator.core.evidence import Billed, clean_text
from coordinator.core.money import Money
from coordinator.engine.recover import quietly
from coordinator.engine.run import Engine
from coordinator.errors import CommitUnknown, MalformedRequest, Overloaded, RequestRefused
from coordinator.logs import THEIR_FAULTS, traceback_of
from coordinator.store import bills, budgets, closing
from coordinator.store.budgets import Asked, NewBudget
from coordinator.store.database import Connection
from coordinator.store.keys import Key

log = logging.getLogger(__name__)
T = TypeVar("T")
Sources = Mapping[tuple[str, str], tuple[str, Billed]]
"""By decision type and evidence: the provider, and the source that can be asked."""
AT_ONCE = 100
ASK_TIMEOUT_S = 10.0


class Budgets:
    """The budgets of one service, for the api."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def set(self, caller: Key, budget: NewBudget) -> None:
        """Make a budget or change its ceiling. Raises `MalformedRequest` for a zone that the database does not know, and
        `StateConflict`."""

        async def work(connection: Connection) -> None:
            if not await budgets.is_zone(connection, budget.timezone):
                what = "is no IANA time zone, such as Asia/Singapore"
                raise MalformedRequest(f"{budget.timezone!r} {what}.", [("/timezone", what)])
            await budgets.set_budget(connection, caller.tenant, budget, caller.id)

        await self._run(caller.tenant, work)

    async def resolve(self, caller: Key, id: UUID, cost: Money, note: str) -> None:
        """A person says what an uncertain reservation really cost. Raises `NotFound`, `StateConflict`."""
        by = {"resolved_by": str(caller.id), "note": clean_text(note)}
        await self._run(caller.tenant, lambda c: bills.resolve(c, caller.tenant, id, cost, by))

    async def bill_late(self, caller: Key, id: UUID, bill: str, cost: Money, note: str) -> bool:
        """A bill for a reservation that has closed; False if it was counted before. Raises `NotFound`, `StateConflict`."""
        by = {"billed_by": str(caller.id), "note": clean_text(note)}
        return await self._run(caller.tenant, lambda c: bills.bill_late(c, caller.tenant, id, bill, cost, by))

    async def _run(self, tenant: UUID, work: Callable[[Connection], Awaitable[T]]) -> T:
        try:
            result = await self._engine.boundary.database.run(tenant, work)
        except CommitUnknown as unknown:
            detail = "the database went away during the commit; look at the budget before you repeat"
            raise Overloaded(detail, retry_after_ms=1000) from unknown
        self._engine.freed.tell(tenant)
        return result


async def reconcile_reservations(engine: Engine, coordinator: Coordinator) -> None:
    """Runs as long as the service does."""
    sources = {
        (type.name, name): (evidence.provider, evidence.source)
        for type in coordinator.types.values()
        for name, evidence in type.evidence.items()
        if evidence.provider and evidence.reserves is not None and isinstance(evidence.source, Billed)
    }
    while True:
        await anyio.sleep(engine.settings.budget_sweep_ms / 1000)
        await quietly("reconcile reservations", partial(_reconcile, engine, sources))


async def _reconcile(engine: Engine, sources: Sources) -> None:
    database = engine.boundary.database
    async with database.dispatch_view() as connection:
        tenants = await budgets.tenants_to_reconcile(connection, ask=bool(sources))
    for tenant in tenants:
        await _reconcile_tenant(engine, sources, tenant)


async def _reconcile_tenant(engine: Engine, sources: Sources, tenant: UUID) -> None:
    async def give_up(connection: Connection) -> int:
        return await closing.give_up_expired(connection, tenant, limit=AT_ONCE)

    async def claim(connection: Connection) -> Sequence[Asked]:
        again_ms = engine.settings.budget_ask_ms
        return await budgets.claim_questions(
            connection, tenant, list(sources), limit=AT_ONCE, again_ms=again_ms
        )

    database = engine.boundary.database
    telemetry.RECONCILED.labels("uncertain").inc(await database.run(tenant, give_up))
    for question in await database.run(tenant, claim) if sources else ():
        await _ask(engine, tenant, question, *sources[question.decision_type, question.item])


async def _ask(engine: Engine, tenant: UUID, asked: Asked, provider: str, source: Billed) -> None:
    """Outside any transaction, inside the provider's limits."""
    cost = await _billed(engine, provider, source, str(asked.id))
    if cost is None:
        return
    by = {"provider": provider}
    try:
        await engine.boundary.database.run(tenant, lambda c: bills.resolve(c, tenant, asked.id, cost, by))
    except RequestRefused as refused:
        log.info("reservation %s was not resolved: %s", asked.id, refused)
        return
    telemetry.RECONCILED.labels("settled").inc()
    engine.freed.tell(tenant)


async def _billed(engine: Engine, provider: str, source: Billed, reservation: str) -> Money | None:
    try:
        with anyio.move_on_after(ASK_TIMEOUT_S):
            async with engine.providers.of(provider).slot():
                said = await source.billed(reservation)
            cost = msgspec.convert(msgspec.to_builtins(said), Money | None)
            if cost is None or cost.amount_minor >= 0:
                return cost
            log.error("provider %s says that less than nothing was billed", provider)
    except THEIR_FAULTS as error:  # the boundary to adapters; logged
        log.error("a source of %s could not say what was billed: %s", provider, traceback_of(error))
    return None
