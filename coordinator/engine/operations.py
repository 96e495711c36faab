"""What people and providers do to operations: resolve, retry, compensate, cancel, give notice, and ask again now.

Each is one transaction of `store.resolve`, after which due work is looked for at once. If nobody knows whether its COMMIT happened,
the caller is told to look and repeat: each of them refuses what was done already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar
from uuid import UUID

from coordinator.core.effect import OperationState
from coordinator.core.evidence import clean_text
from coordinator.core.money import Money
from coordinator.engine.run import Engine
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.failpoints import failpoint
from coordinator.store import resolve
from coordinator.store.bills import Bill
from coordinator.store.database import Connection
from coordinator.store.keys import Key
from coordinator.store.resolve import Resolution

T = TypeVar("T")
Verdict = Literal["happened", "did-not-happen"]


class Operations:
    """The operations of one service, for the api."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def resolve(
        self,
        caller: Key,
        id: UUID,
        verdict: Verdict,
        reference: str,
        note: str,
        cost: Money | None = None,
    ) -> OperationState:
        """A person says what became of an uncertain operation. Raises `NotFound`, `StateConflict`."""
        by = {"resolved_by": str(caller.id), "verdict": verdict, "note": clean_text(note)}
        happened = verdict == "happened"
        resolution = Resolution(
            state="succeeded" if happened else "failed",
            reference=clean_text(reference) or "resolved by hand" if happened else None,
            reason=None if happened else clean_text(f"resolved by hand: {note or 'it did not happen'}"),
            by=by,
            bill=self._bill(cost),
        )
        return await self._run(caller.tenant, lambda c: resolve.resolve(c, caller.tenant, id, resolution))

    async def retry(self, caller: Key, id: UUID, note: str) -> OperationState:
        """A failed operation is sent again, under its key. Raises `NotFound`, `StateConflict`."""
        by = {"retried_by": str(caller.id), "note": clean_text(note)}
        return await self._run(caller.tenant, lambda c: resolve.retry(c, caller.tenant, id, by))

    async def compensate(self, caller: Key, id: UUID, note: str) -> OperationState:
        """A succeeded operation is undone. Raises `NotFound`, `StateConflict`."""
        reason = clean_text(f"by hand, key {caller.id}: {note}")
        return await self._run(caller.tenant, lambda c: resolve.compensate(c, caller.tenant, id, reason))

    async def cancel(self, tenant: UUID, decision: UUID) -> None:
        """After the decision's commit: unsent operations are cancelled, the others undone if they happen and can be."""
        await self._run(tenant, lambda c: resolve.cancel(c, tenant, decision))

    async def notice(
        self,
        tenant: UUID,
        *,
        effect: str,
        event_id: str,
        key: str,
        happened: bool,
        reference: str,
        reason: str,
        cost: Money | None = None,
    ) -> OperationState:
        """The provider's own word on a key, its signature checked. Raises `NotFound`."""
        resolution = Resolution(
            state="succeeded" if happened else "failed",
            reference=clean_text(reference) or key if happened else None,
            reason=None if happened else clean_text(reason) or "the provider says that it did not happen",
            by={"event": event_id},
            bill=self._bill(cost),
        )
        return await self._run(
            tenant,
            lambda c: resolve.notice(
                c, tenant, effect=effect, event_id=event_id, key=key, resolution=resolution
            ),
            point="notice",
        )

    def _bill(self, cost: Money | None) -> Bill | None:
        """Where nothing was reserved, it draws on the budgets of all providers only."""
        if cost is None or cost.amount_minor < 0:
            return None
        return Bill(id=self._engine.new_id(), kind="effect", item="", provider="", cost=cost)

    async def ask_now(self, tenant: UUID) -> int:
        """How many uncertain operations their providers are asked about at once."""
        return await self._run(tenant, lambda c: resolve.ask_now(c, tenant))

    async def _run(
        self,
        tenant: UUID,
        work: Callable[[Connection], Awaitable[T]],
        *,
        point: Literal["resolve", "notice"] = "resolve",
    ) -> T:
        async def written(connection: Connection) -> T:
            result = await work(connection)
            await failpoint(f"{point}.before")
            return result

        try:
            result = await self._engine.boundary.database.run(tenant, written)
            await failpoint(f"{point}.after")
        except CommitUnknown as unknown:
            detail = "the database went away during the commit; look at the operation before you repeat"
            raise Overloaded(detail, retry_after_ms=1000) from unknown
        self._engine.wake_in(0)
        self._engine.freed.tell(tenant)
        return result
