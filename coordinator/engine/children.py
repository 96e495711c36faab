"""Children: asking for a decision and waiting for its outcome, as a reading of another decision.

    ask     under a key made of the parent's id, or of what the declaration says: asked again, it is the same child
    adopt   parent and child are stored; if the child waits for the parent, however indirectly, the reading fails: a circle
    wait    without the parent's slot: it is lent to whoever is next, which may be the child

A child of one parent alone is stopped when its reading is cancelled, unless it has come to rest: what it committed stays. When the
process stops, both go on elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import anyio
import msgspec

from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.child import ChildAsk, ChildSource, Concluded
from coordinator.core.evidence import EACH, Answer, Evidence, Failed, Found, ReadRequest, clean_text
from coordinator.core.request import DecisionRequest
from coordinator.core.view import DecisionView
from coordinator.errors import CommitUnknown, RequestRefused
from coordinator.store.children import adopt, waits_for
from coordinator.store.database import Database
from coordinator.store.keys import Key

if TYPE_CHECKING:  # a run's engine has its children
    from coordinator.engine.run import Run

GRACE_S = 5.0
"""The wait ends by the reading's own limit, well before its own."""


_KEY = re.compile(r"[\x21-\x7e]{1,255}\Z")


def key_of(parent: UUID, evidence: str, decision_type: str, asked: ChildAsk, member: JsonValue) -> str:
    """The child's idempotency key: the same for the same question of the same parent, or of all that name the same ``key``."""
    if asked.key is None:
        each = "" if member is None else f"/{hashlib.sha256(canonical(member)).hexdigest()}"
        return f"child/{parent}/{evidence}{each}"
    key = f"child/{decision_type}/{asked.key}"
    return (
        key if _KEY.match(key) else f"child/{decision_type}/{hashlib.sha256(asked.key.encode()).hexdigest()}"
    )


class Decider(Protocol):
    """What is needed of the service."""

    @property
    def draining(self) -> bool: ...
    async def ask(
        self,
        caller: Key,
        idempotency_key: str,
        request: DecisionRequest,
        body: JsonValue,
        traceparent: str | None,
    ) -> UUID: ...
    async def rests(self, tenant: UUID, id: UUID, until: float) -> DecisionView | None: ...
    async def stop_unfinished(self, tenant: UUID, id: UUID) -> None: ...
    async def view(self, tenant: UUID, id: UUID) -> DecisionView | None: ...


class _Lending:
    """The slot of one run, lent while any of its readings waits for a child."""

    def __init__(self, run: Run) -> None:
        self.waiting = 0
        self.returning: asyncio.Event | None = None
        self.lent: AbstractAsyncContextManager[None] = run.lend_slot()


class Children:
    """Of one process's decisions. ``decider`` is given once there is a service."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lendings: dict[UUID, _Lending] = {}
        self.decider: Decider | None = None

    async def read(
        self,
        run: Run,
        declared: Evidence[Any, Any],
        source: ChildSource[Any],
        request: ReadRequest,
        until: float,
    ) -> Answer[Any]:
        assert self.decider is not None, "given when the service starts"
        try:
            asked = source.ask_child(request)
            child = await self._ask(
                self.decider, run, declared, source, asked, request.evidence.get(EACH), until
            )
            if asked.key is None:
                request.on_cancel(partial(self._stop, self.decider, run.tenant, child))
            if child == run.id or await self._closes_a_circle(run, child):
                return Failed("decision-circle", f"decision {child} waits for this one")
            view = await self.decider.view(run.tenant, child)
            if view is None:
                async with self._without_slot(run):
                    view = await self.decider.rests(run.tenant, child, until + GRACE_S)
        except RequestRefused as refused:
            pause = refused.extra.get("retry_after_ms")
            wait_ms = pause if isinstance(pause, int) else None
            return Failed(refused.code, clean_text(str(refused)), wait_ms is not None, wait_ms)
        except CommitUnknown as unknown:
            return Failed("child-unknown", clean_text(str(unknown)), retryable=True)
        except (ValueError, msgspec.ValidationError) as error:
            return Failed("no-address", clean_text(str(error)))
        return _answer(child, view)

    async def _stop(self, decider: Decider, tenant: UUID, child: UUID) -> None:
        """Unless this process is stopping: then the parent goes on elsewhere, and so does its child."""
        if not decider.draining:
            await decider.stop_unfinished(tenant, child)

    async def _ask(
        self,
        decider: Decider,
        run: Run,
        declared: Evidence[Any, Any],
        source: ChildSource[Any],
        asked: ChildAsk,
        member: JsonValue,
        until: float,
    ) -> UUID:
        """Which decision it is. The remaining time is no part of the body: asked again later, it is the same request. Not to be
        cancelled: a child that was stored and that nobody knows of would be nobody's to stop."""
        body: dict[str, JsonValue] = {
            "type": source.decision_type,
            "input": asked.input,
            "class": run.request.class_,
        }
        if asked.record is not None:
            body["record"] = {"kind": asked.record[0], "id": asked.record[1]}
        request = msgspec.structs.replace(
            msgspec.convert(body, DecisionRequest),
            time_limit_ms=min(3_600_000, max(1, round((until - time.monotonic()) * 1000))),
        )
        key = key_of(run.id, declared.name, source.decision_type, asked, member)
        caller = Key(run.tenant, run.requested_by, frozenset({"decide"}))
        with anyio.CancelScope(shield=True):
            child = await decider.ask(caller, key, request, body, run.traceparent)
        return child

    async def _closes_a_circle(self, run: Run, child: UUID) -> bool:
        async with self._database.transaction(run.tenant) as connection:
            await adopt(connection, run.tenant, run.id, child)
        async with self._database.transaction(run.tenant) as connection:
            return await waits_for(connection, run.tenant, child, run.id)

    @asynccontextmanager
    async def _without_slot(self, run: Run) -> AsyncIterator[None]:
        """The first to wait lends the slot, the last gets it back; while it does, nobody lends it anew."""
        while (lending := self._lendings.get(run.id)) is not None and lending.returning is not None:
            await lending.returning.wait()
        if lending is None:
            lending = self._lendings[run.id] = _Lending(run)
            await lending.lent.__aenter__()
        lending.waiting += 1
        try:
            yield
        except BaseException as error:
            if self._is_last(run, lending):
                del self._lendings[run.id]
                await lending.lent.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._is_last(run, lending):
            lending.returning = asyncio.Event()
            try:
                await lending.lent.__aexit__(None, None, None)
            finally:
                del self._lendings[run.id]
                lending.returning.set()

    def _is_last(self, run: Run, lending: _Lending) -> bool:
        lending.waiting -= 1
        return not lending.waiting


def _answer(child: UUID, view: DecisionView | None) -> Answer[Any]:
    outcome = view.outcome if view else None
    if view is None or outcome is None:
        return Failed("child-unfinished", "it has not come to rest")
    if view.status == "committed":
        concluded: Concluded[Any] = Concluded(str(child), view.status, terms=outcome.terms)
        return Found(concluded, view.packet_digest)
    if view.status == "declined":
        return Found(Concluded[Any](str(child), view.status, reason=outcome.reason), view.packet_digest)
    code = f"child-{view.status.replace('_', '-')}"
    return Failed(code, clean_text(f"decision {child}: {outcome.reason}"))
