"""The service as its callers see it: ask for a decision and wait, look at one, cancel one, put a record.

What runs here is owned by `holdings`; a request only waits for it. A caller that sends a known key again gets the stored answer,
or waits with whoever came first, wherever that runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import UUID

import anyio
import msgspec

from coordinator import telemetry
from coordinator.config import Settings
from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.decision import RESTING, Coordinator
from coordinator.core.request import DecisionRequest
from coordinator.core.view import DecisionView, decode_view
from coordinator.engine.admit import Queued, admit, check_request
from coordinator.engine.budgets import Budgets
from coordinator.engine.cancel import Cancelling
from coordinator.engine.follow import Streams
from coordinator.engine.holdings import Holdings
from coordinator.engine.operations import Operations
from coordinator.engine.pooled import PoolNow
from coordinator.engine.queues import QueueView, queues
from coordinator.engine.review import Reviews
from coordinator.engine.run import Refusal, Run
from coordinator.engine.show import pending, shown, unfinished
from coordinator.errors import (
    ClassNotAllowed,
    CommitUnknown,
    DecisionInFlight,
    Draining,
    NotFound,
    Overloaded,
    PreconditionFailed,
    TransitionRefused,
)
from coordinator.store import queue, reading
from coordinator.store.admit import Known
from coordinator.store.commit import Committed
from coordinator.store.database import Connection, Database, open_database
from coordinator.store.keys import Key
from coordinator.store.reading import DecisionRow
from coordinator.store.records import history, lock_records, put_if_version


class Rested(msgspec.Struct, frozen=True):
    """The decision rests. ``body`` is a problem document if ``status`` >= 400."""

    id: UUID
    status: int
    body: bytes
    replayed: bool


class Pending(msgspec.Struct, frozen=True):
    """It was accepted and does not rest yet."""

    id: UUID
    body: bytes


class Looked(msgspec.Struct, frozen=True):
    """A decision as JSON. ``etag`` if it is in review."""

    body: bytes
    etag: int | None


class Service:
    """Use `run_service`."""

    def __init__(self, coordinator: Coordinator, database: Database, holdings: Holdings) -> None:
        self.coordinator = coordinator
        self.database = database
        self.settings = database.settings
        self._holdings = holdings
        self._cancelling = Cancelling(coordinator, holdings)
        self.operations = Operations(holdings.engine)
        self.workers = holdings.remote.workers
        self.streams = Streams(coordinator, database, holdings)
        self.reviews = Reviews(coordinator, holdings)
        self.budgets = Budgets(holdings.engine)

    @property
    def draining(self) -> bool:
        return self._holdings.draining

    @property
    def idle(self) -> bool:
        """Whether nothing runs here, neither a decision nor an operation."""
        return self._holdings.idle

    def stop_taking(self) -> None:
        """From now on new requests are refused with `Draining`; what runs goes on."""
        self._holdings.stop_taking()

    # Deciding ---------------------------------------------------------------------------------------------------------------

    async def decide(
        self,
        caller: Key,
        idempotency_key: str,
        request: DecisionRequest,
        body: JsonValue,
        *,
        wait_s: float,
        traceparent: str | None,
        session: str | None = None,
    ) -> Rested | Pending:
        """Admit a request and wait up to ``wait_s`` for its decision to rest. ``session`` is the caller's own name for what it may
        cancel together. Raises the leaves of `RequestRefused`."""
        if self._holdings.draining:
            raise Draining("this process is stopping; another one will answer", retry_after_ms=1000)
        until = time.monotonic() + wait_s
        admitted = await self._admit(caller, idempotency_key, request, body, traceparent, session)
        match admitted:
            case Run():
                answer = self._holdings.answers[admitted.id]
                await asyncio.wait([answer], timeout=max(0.0, until - time.monotonic()))
                if answer.done() and isinstance(result := answer.result(), Committed):
                    finished = result.finished
                    return Rested(admitted.id, finished.answer_status, finished.answer, replayed=False)
            case Queued() if wait_s <= 0:
                return self._pending(admitted.row, admitted.estimated_ms, admitted.position)
            case Known():
                return await self._join(caller.tenant, admitted, until)
        return await self._wait(caller.tenant, admitted.id, until)

    async def ask(
        self,
        caller: Key,
        idempotency_key: str,
        request: DecisionRequest,
        body: JsonValue,
        traceparent: str | None,
    ) -> UUID:
        """The decision of a key, admitted unless it is known, for another one that runs here: while this process stops, what runs
        goes on, and so does what it needs. Raises the leaves of `RequestRefused`."""
        return (await self._admit(caller, idempotency_key, request, body, traceparent, None)).id

    async def _admit(
        self,
        caller: Key,
        idempotency_key: str,
        request: DecisionRequest,
        body: JsonValue,
        traceparent: str | None,
        session: str | None,
    ) -> Run | Queued | Known:
        """Known, stored in the queue, or taken on with a slot."""
        declared, input = check_request(self.coordinator, request)
        if caller.classes is not None and request.class_ not in caller.classes:
            known = sorted(caller.classes)
            raise ClassNotAllowed(
                f"this key may not ask for class {request.class_!r}, only for {', '.join(known)}",
                classes=known,
            )
        trace = telemetry.continued_or_new(traceparent)
        holdings, schedule = self._holdings, self._holdings.schedule
        slot = schedule.try_start(request.class_, caller.tenant)
        admitted: Run | Queued | Known | None = None
        try:
            admitted = await admit(
                holdings.engine,
                schedule,
                caller,
                idempotency_key,
                declared,
                input,
                request,
                body,
                trace,
                slot,
                session,
            )
        finally:
            if slot is not None and not isinstance(admitted, Run):
                schedule.give_back(slot)
        if isinstance(admitted, Run):
            if slot is not None:
                schedule.runs(slot, declared.cost, 0)
            holdings.take_on(admitted, slot, time.monotonic() + self.settings.lease_ms / 1000)
        elif isinstance(admitted, Queued):
            schedule.queued(request.class_, caller.tenant)
        return admitted

    def _pending(self, row: DecisionRow, estimated_ms: int, position: int) -> Pending:
        view = unfinished(self.coordinator, row)
        return Pending(row.id, pending(view, estimated_start_ms=estimated_ms, queue_position=position))

    async def _wait(self, tenant: UUID, id: UUID, until: float) -> Rested | Pending:
        """Until it rests, wherever that happens, or the caller's patience ends."""
        row = await self._until_rested(tenant, id, until)
        if row.answer is not None and row.answer_status is not None:
            return Rested(id, row.answer_status, row.answer, replayed=False)
        async with self.database.transaction(tenant) as connection:
            position = await queue.position(connection, tenant, id)
        estimate = self._holdings.schedule.estimate_ms(row.class_, tenant, position)
        return self._pending(row, estimate, position)

    async def _until_rested(self, tenant: UUID, id: UUID, until: float) -> DecisionRow:
        """The decision as it is when it rests, or when the time is up."""
        while True:
            left = until - time.monotonic()
            over = left <= 0 or self.draining
            looked = over or await self._holdings.awaited.rested(tenant, id, left)
            row = await self._row(tenant, id)
            if row.answer is not None or not looked or over or self.draining:
                return row

    async def _join(self, tenant: UUID, known: Known, until: float) -> Rested:
        """The stored answer of a key that is in use, once there is one. Raises `DecisionInFlight` if there is none in time."""
        answer, status = known.answer, known.answer_status
        if answer is None or status is None:
            row = await self._until_rested(tenant, known.id, until)
            answer, status = row.answer, row.answer_status
        if answer is None or status is None:
            raise DecisionInFlight(
                "the decision of this key is still under way", decision=str(known.id), retry_after_ms=1000
            )
        return Rested(known.id, 200 if status < 400 else status, answer, replayed=True)

    async def rests(self, tenant: UUID, id: UUID, until: float) -> DecisionView | None:
        """A decision at its rest, as soon as it is there, for another one that runs here and goes on while this process stops;
        None if it does not rest ``until`` then."""
        while (left := until - time.monotonic()) > 0:
            with suppress(
                CommitUnknown, Overloaded
            ):  # a database that is away for a moment says nothing of the child
                if (view := await self.view(tenant, id)) is not None:
                    return view
            await self._holdings.awaited.rested(tenant, id, left)
        return None

    async def queues(self, tenant: UUID) -> Sequence[QueueView]:
        """One view for each class."""
        return await queues(self.database, self._holdings.schedule, tenant)

    async def pools(self) -> list[PoolNow]:
        """Every provider of a declared source or sink, by name."""
        return await self._holdings.pools.now()

    # Showing, cancelling, records -------------------------------------------------------------------------------------------

    async def _row(self, tenant: UUID, id: UUID) -> DecisionRow:
        async with self.database.transaction(tenant) as connection:
            row = await reading.decision(connection, tenant, id)
        if row is None:
            raise NotFound("there is no such decision")
        return row

    async def show(self, tenant: UUID, id: UUID) -> bytes | None:
        """`look` without the etag."""
        found = await self.look(tenant, id)
        return None if found is None else found.body

    async def look(self, tenant: UUID, id: UUID) -> Looked | None:
        """The decision with its operations' present states; None if this tenant has none of that id."""
        async with self.database.transaction(tenant) as connection:
            row = await reading.decision(connection, tenant, id)
            operations = await reading.operations_of(connection, tenant, [id])
        if row is None:
            return None
        etag = row.fencing_token if row.status == "in_review" else None
        return Looked(shown(self.coordinator, row, operations), etag)

    async def list(
        self,
        tenant: UUID,
        *,
        status: str | None = None,
        type: str | None = None,
        record: tuple[str, str] | None = None,
        class_: str | None = None,
        before: UUID | None = None,
        limit: int,
    ) -> tuple[list[bytes], UUID | None]:
        """A page of decisions, newest first, and where the next one begins."""
        async with self.database.transaction(tenant) as connection:
            rows = await reading.decisions(
                connection,
                tenant,
                status=status,
                type=type,
                record=record,
                class_=class_,
                before=before,
                limit=limit + 1,
            )
            page = rows[:limit]
            operations = await reading.operations_of(connection, tenant, [row.id for row in page])
        bodies = [
            shown(self.coordinator, row, [op for op in operations if op.decision_id == row.id])
            for row in page
        ]
        return bodies, page[-1].id if len(rows) > limit else None

    async def cancel(self, caller: Key, id: UUID) -> bytes:
        """Stop a decision that does not rest yet, here or in another process; the answer says whether it was stopped, and what
        had happened outside by then. Raises `NotFound`."""
        row = await self._row(caller.tenant, id)
        if row.status == "in_review":
            await self.reviews.withdraw(caller.tenant, id)
            row = await self._row(caller.tenant, id)
        row = await self._cancelling.stopped(caller.tenant, row)
        stopped = row.status == "cancelled"
        if row.status == "committed":
            await self.operations.cancel(caller.tenant, id)
        async with self.database.transaction(caller.tenant) as connection:
            operations = await reading.operations_of(connection, caller.tenant, [id])
        happened = [{"id": str(op.id), "effect": op.effect, "state": op.state} for op in operations]
        return canonical({"id": str(id), "status": row.status, "stopped": stopped, "operations": happened})

    async def stop_unfinished(self, tenant: UUID, id: UUID) -> None:
        """Cancel a decision unless it rests already: then everything stays as it is."""
        await self._cancelling.stopped(tenant, await self._row(tenant, id))

    async def view(self, tenant: UUID, id: UUID) -> DecisionView | None:
        """A decision that rests, as it is now; None if it does not rest yet."""
        row = await self._row(tenant, id)
        stored = row.view or (row.answer if (row.answer_status or 0) < 400 else None)
        return decode_view(stored) if stored is not None and row.status in RESTING else None

    async def put_record(self, caller: Key, kind: str, id: str, expected: int, data: JsonValue) -> int:
        """Replace a record that is at version ``expected`` (0: does not exist yet); the new version. Raises
        `PreconditionFailed` with ``current_version``, or `TransitionRefused`."""
        key, stored = (kind, id), canonical(data)

        async def put(connection: Connection) -> int:
            locked = (await lock_records(connection, caller.tenant, {key}))[key]
            if locked.version != expected:
                detail = f"record {kind}/{id} is at version {locked.version}, not {expected}"
                raise PreconditionFailed(detail, current_version=locked.version)
            declared = self.coordinator.record_kinds.get(kind)
            old = None if locked.data is None else msgspec.json.decode(locked.data)
            if declared and (reason := declared.refusal(old, data)):
                raise TransitionRefused(reason)
            return await put_if_version(
                connection, caller.tenant, key, expected=expected, data=stored, key_id=caller.id
            )

        try:
            return await self.database.run(caller.tenant, put)
        except CommitUnknown as unknown:
            async with self.database.transaction(caller.tenant) as connection:
                made = await history(connection, caller.tenant, key, below=expected + 2, limit=1)
            if made and (made[0].version, made[0].data, made[0].key_id) == (expected + 1, stored, caller.id):
                return expected + 1
            raise Overloaded(
                "the database went away during the commit; read the record again", retry_after_ms=1000
            ) from unknown


@asynccontextmanager
async def run_service(
    coordinator: Coordinator, url: str, settings: Settings, *, render_refusal: Refusal
) -> AsyncIterator[Service]:
    """The service, for as long as the block lasts; then it drains."""
    async with open_database(url, settings) as database, anyio.create_task_group() as tasks:
        holdings = Holdings(coordinator, database, tasks, render_refusal)
        service = Service(coordinator, database, holdings)
        holdings.engine.children.decider = service
        holdings.start_loops()
        try:
            yield service
        finally:
            with anyio.CancelScope(shield=True):
                await holdings.drain()
                await holdings.engine.flights.aclose()
                for adapter in coordinator.closables():
                    await adapter.aclose()
            tasks.cancel_scope.cancel()
