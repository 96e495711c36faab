"""What this process holds: decisions from their slot to their rest, operations from claim to settlement.

A decision belongs to its process, not to the request that brought it: a caller that waits too long or goes away leaves it
running. A decision comes here with its slot, from a request (`take_on`) or from the queue (`_claim`); at its rest its operations, born
claimed, go to dispatch, and its slot goes to whoever is next. Each held row is in `decisions` or `operations` while it is held, so its
lease is renewed, and whoever stops the process knows what is left.

A run that holds its slot for longer than `max_run_ms` is stopped and queued again; one that was queued again too often, for this or
because its processes died, is put before a person.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from uuid import UUID

import anyio
from anyio.abc import TaskGroup
from uuid_utils.compat import uuid7

from coordinator import telemetry
from coordinator.core.decision import Coordinator
from coordinator.core.request import decode_request
from coordinator.engine.admit import resume, run_of
from coordinator.engine.awaited import Awaited
from coordinator.engine.budgets import reconcile_reservations
from coordinator.engine.chains import Chains
from coordinator.engine.children import Children
from coordinator.engine.commit import Rest, commit, rest_without_commit
from coordinator.engine.dispatch import dispatch
from coordinator.engine.expire import expire
from coordinator.engine.flights import Flights
from coordinator.engine.kept import Kept
from coordinator.engine.path import walk
from coordinator.engine.pooled import Pooled
from coordinator.engine.pools import Providers
from coordinator.engine.presence import keep_present
from coordinator.engine.record import pass_on, record_followed, tell_progress
from coordinator.engine.recover import Held, Takers, look_at_queue, quietly, renew_leases, sweep
from coordinator.engine.run import Engine, Refusal, Run
from coordinator.engine.schedule import Schedule, Slot
from coordinator.engine.watch import Remote
from coordinator.errors import CommitUnknown, Overloaded, RequestRefused
from coordinator.store import lease, presence, queue
from coordinator.store.boundary import Boundary
from coordinator.store.commit import Committed, NewOperation, Superseded
from coordinator.store.database import Database

log = logging.getLogger(__name__)
Answer = asyncio.Future[Committed | Superseded]
LANDING_S = 1.0
"""How long a cancelled reading may take to end, beside its clean-ups, before its decision goes on without waiting for that."""


class Holdings:
    """``tasks`` owns everything that runs here."""

    def __init__(
        self, coordinator: Coordinator, database: Database, tasks: TaskGroup, render_refusal: Refusal
    ) -> None:
        settings = database.settings
        self.coordinator = coordinator
        self.settings = settings
        self.draining = False
        self._drain_until = 0.0
        self.schedule = Schedule(settings.classes, settings.max_running, self._chosen)
        self.awaited = Awaited(database, tasks)
        self.runs: dict[UUID, Run] = {}
        self.approvals: dict[UUID, asyncio.Event] = {}
        """By decision: set when what is being approved here is over."""
        self.answers: dict[UUID, Answer] = {}
        self._tasks = tasks
        self._database = database
        self._decisions: dict[UUID, Held] = {}
        self._operations: dict[UUID, Held] = {}
        self._claims = 0
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self.remote = Remote(database, tasks, coordinator.types, progress=self._progress)
        owner = uuid7()
        by = lease.Claim(owner, settings.lease_ms, list(coordinator.types))
        self.engine = Engine(
            boundary=Boundary(database, tasks, coordinator.record_kinds, by),
            settings=settings,
            providers=Providers(settings.provider_concurrency, coordinator.pools),
            flights=Flights(settings.cleanup_ms / 1000 + LANDING_S),
            children=Children(database),
            kept=Kept(settings.max_kept_readings, settings.max_kept_bytes),
            chains=Chains(),
            tasks=self.remote.tasks,
            owner=owner,
            new_id=uuid7,
            render_refusal=render_refusal,
            wake_in=self._wake_in,
            stopping=lambda: self.draining,
            still_holds=self._still_holds,
        )
        self.pools = Pooled(coordinator, database, self.engine.providers, self.engine.owner)

    @property
    def idle(self) -> bool:
        return not self.runs and not self.approvals and not self._operations and not self._claims

    def _wake_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._due.set)

    def _still_holds(self, operation: UUID, token: int) -> bool:
        held = self._operations.get(operation)
        return held is not None and held.token == token and time.monotonic() < held.until

    def _progress(self, tenant: UUID, decision: UUID, evidence: str, lines: Sequence[str]) -> None:
        """What a worker says while it works, for whoever follows the decision, which may be held elsewhere."""
        run = self.runs.get(decision)
        if run is not None and run.tenant == tenant:
            tell_progress(self.engine, run, evidence, lines)
        else:
            self._tasks.start_soon(pass_on, self._database, tenant, decision, evidence, lines)

    # Decisions --------------------------------------------------------------------------------------------------------------

    def take_on(self, run: Run, slot: Slot | None, until: float, rest: Rest | None = None) -> Answer:
        """Walk the path of a decision that this process holds, or bring it to this ``rest`` at once. Gives back the slot."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self.answers[run.id] = answer
        self.runs[run.id] = run
        self._decisions[run.id] = Held(run.tenant, until, run.token)
        self._tasks.start_soon(self._drive, run, slot, answer, rest)
        return answer

    async def _drive(self, run: Run, slot: Slot | None, answer: Answer, rest: Rest | None) -> None:
        """From its slot to its rest. Whatever goes wrong in here, the decision is at rest afterwards, or its lease runs out."""
        try:
            result = await self._within_ceiling(run, slot, rest)
            if not answer.done():
                answer.set_result(result)
            if isinstance(result, Committed):
                telemetry.DECISION_SECONDS.labels(run.type.name).observe(
                    time.time() - run.created_at.timestamp()
                )
                self._dispatch_all(run, result.operations)
        except Exception:  # the boundary of a task of its own
            log.exception("decision %s, trace %s", run.id, telemetry.trace_id(run.traceparent))
        finally:
            if not answer.done():
                answer.set_result(Superseded())
            if slot is not None:
                self.schedule.ended(slot)
                self.schedule.give_back(slot)
            self._let_go(run)
            run.events.close()
            self.awaited.told(run.tenant, run.id)
            self._idle.set()

    def carry(self, run: Run, until: float, work: Callable[[], Awaitable[Committed | Superseded]]) -> None:
        """Hold a decision that was claimed in review while ``work`` brings it to rest again; then its operations go to dispatch."""
        over = self.approvals[run.id] = asyncio.Event()
        self._decisions[run.id] = Held(run.tenant, until, run.token)
        self._tasks.start_soon(self._carry, run, work, over)

    async def _carry(
        self, run: Run, work: Callable[[], Awaitable[Committed | Superseded]], over: asyncio.Event
    ) -> None:
        try:
            result = await work()
            if isinstance(result, Committed):
                self._dispatch_all(run, result.operations)
        except (
            Exception
        ):  # the boundary of a task of its own; its lease runs out and the review is open again
            log.exception("review of decision %s, trace %s", run.id, telemetry.trace_id(run.traceparent))
        finally:
            if self.approvals.get(run.id) is over:  # not another claim of ours, made meanwhile
                del self.approvals[run.id], self._decisions[run.id]
            over.set()
            self._idle.set()

    def _let_go(self, run: Run) -> None:
        """Unless this very process has claimed the decision anew, its lease having run out: then that claim holds it."""
        if self.runs.get(run.id) is run:
            del self.answers[run.id], self.runs[run.id], self._decisions[run.id]

    async def _within_ceiling(self, run: Run, slot: Slot | None, rest: Rest | None) -> Committed | Superseded:
        result: Committed | Superseded = Superseded()
        with anyio.move_on_after(self.settings.max_run_ms / 1000) as ceiling:
            if slot is not None:
                run.lend_slot = partial(self._lent, slot, ceiling)
            result = await self._to_rest(run, rest)
        if ceiling.cancelled_caught:
            log.warning("decision %s held its slot for too long; it is queued again", run.id)
            await self._requeue(run.tenant, [run.id], "ran-too-long")
        return result

    @asynccontextmanager
    async def _lent(self, slot: Slot, ceiling: anyio.CancelScope) -> AsyncIterator[None]:
        """The ceiling of a run counts from when it has its slot again."""
        ceiling.deadline = math.inf
        async with self.schedule.lent(slot):
            yield
        ceiling.deadline = anyio.current_time() + self.settings.max_run_ms / 1000

    async def _to_rest(self, run: Run, rest: Rest | None) -> Committed | Superseded:
        try:
            if rest is None:
                return await walk(self.engine, run)
        except Exception:  # a fault of ours must not leave a decision without an end
            trace_id = telemetry.trace_id(run.traceparent)
            log.exception("decision %s, trace %s", run.id, trace_id)
            rest = rest_without_commit(
                "failed", "internal-error", f"an internal error; it was logged with trace {trace_id}"
            )
        result = await commit(self.engine, run, rest)
        return result if isinstance(result, Committed) else Superseded()

    async def _requeue(self, tenant: UUID, ids: Sequence[UUID], reason: str) -> None:
        classes = await self._database.run(
            tenant,
            lambda connection: queue.requeue_held(connection, tenant, self.engine.owner, ids, reason),
        )
        for class_ in classes:
            telemetry.REQUEUED.labels(reason).inc()
            self.schedule.queued(class_, tenant)

    # The queue --------------------------------------------------------------------------------------------------------------

    def _chosen(self, slot: Slot) -> None:
        self._claims += 1
        self._tasks.start_soon(self._claim, slot)

    async def _claim(self, slot: Slot) -> None:
        """Claim what the slot was chosen for, and walk its path."""
        until = time.monotonic() + self.settings.lease_ms / 1000
        claimed: queue.Claimed | None = None
        try:
            claimed = await self.engine.boundary.claim.submit(slot.tenant, slot.class_)
        except (CommitUnknown, Overloaded) as error:
            log.warning("could not claim from the queue: %s", error)
        except Exception:  # the boundary of a task of its own
            log.exception("could not claim from the queue")
        finally:
            self._claims -= 1
            if claimed is None:
                self.schedule.nothing_there(slot)
                self.schedule.give_back(slot)
                self._idle.set()
        if claimed is not None:
            self._observe(slot, claimed)
            self._take_claimed(slot.tenant, claimed, slot, until)

    def _observe(self, slot: Slot, claimed: queue.Claimed) -> None:
        if claimed.requeues == 0:
            self.schedule.runs(slot, self.coordinator.types[claimed.type].cost, claimed.waited_ms)
            if claimed.estimated_ms is not None:
                error_ms = abs(claimed.waited_ms - claimed.estimated_ms)
                telemetry.ESTIMATE_ERROR_SECONDS.labels(slot.class_).observe(error_ms / 1000)

    def _take_claimed(self, tenant: UUID, claimed: queue.Claimed, slot: Slot | None, until: float) -> None:
        declared, rest = self.coordinator.types[claimed.type], None
        try:
            run = resume(self.coordinator, tenant, claimed)
        except RequestRefused as error:
            rest = rest_without_commit(
                "failed", error.code, f"the decision type has changed meanwhile: {error.detail}"
            )
            run = run_of(declared, None, decode_request(claimed.request), tenant, claimed)
        if claimed.requeues > self.settings.max_requeues:
            reason = f"it was begun {claimed.requeues} times and never came to an end; its processes died, or it took too long"
            rest = rest_without_commit("in_review", "requeue-limit", reason)
        self.take_on(run, slot, until, rest)

    # Operations -------------------------------------------------------------------------------------------------------------

    def _dispatch_all(self, run: Run, operations: Sequence[NewOperation]) -> None:
        for op in operations:
            if op.after:
                continue  # it waits for those
            claimed = lease.ClaimedOperation(
                id=op.id,
                token=1,
                was="ready",
                decision_id=run.id,
                decision_type=run.type.name,
                effect=op.effect,
                key=op.key,
                payload=op.payload,
                traceparent=run.traceparent,
                sends=0,
                lookups=0,
                in_doubt=False,
                linked=op.linked,
                paid=op.paid,
                decision_sends=0,
                age_ms=0,
                last_sent_age_ms=None,
            )
            self._take_operation(run.tenant, claimed, run.rendered_at + self.settings.lease_ms / 1000)

    def _take_operation(self, tenant: UUID, claimed: lease.ClaimedOperation, until: float) -> None:
        self._operations[claimed.id] = Held(tenant, until, claimed.token)
        self._tasks.start_soon(self._dispatch, tenant, claimed)

    async def _dispatch(self, tenant: UUID, claimed: lease.ClaimedOperation) -> None:
        try:
            sink = self.coordinator.sinks.get((claimed.decision_type, claimed.effect))
            await dispatch(self.engine, tenant, sink, claimed)
        except (
            Exception
        ):  # the boundary of a task of its own; the lease runs out and the operation is taken over
            log.exception("operation %s", claimed.id)
        finally:
            held = self._operations.get(claimed.id)
            if held is not None and held.token == claimed.token:  # not another claim of it, made meanwhile
                del self._operations[claimed.id]
            self._idle.set()

    def _room_for_operations(self) -> int:
        return 0 if self.draining else max(0, self.settings.max_dispatching - len(self._operations))

    # The life of the process ------------------------------------------------------------------------------------------------

    async def _until_due(self) -> None:
        with anyio.move_on_after(self.settings.poll_ms / 1000):
            await self._due.wait()
        self._due.clear()

    def start_loops(self) -> None:
        self._tasks.start_soon(reconcile_reservations, self.engine, self.coordinator)
        self._tasks.start_soon(self.remote.watch)
        self._tasks.start_soon(expire, self.engine, list(self.coordinator.types))
        self._tasks.start_soon(self.pools.run)
        self._tasks.start_soon(self.engine.providers.measure)
        takers = Takers(
            free=self._room_for_operations,
            requeued=lambda tenant, class_: self.schedule.queued(class_, tenant),
            overdue=lambda tenant, claimed, until: self._take_claimed(tenant, claimed, None, until),
            operation=self._take_operation,
        )
        self._tasks.start_soon(renew_leases, self.engine, self._decisions, self._operations)
        self._tasks.start_soon(record_followed, self.engine, self.runs)
        self._tasks.start_soon(sweep, self.engine, takers, self._until_due)
        self._tasks.start_soon(look_at_queue, self.engine, self.schedule)
        self._tasks.start_soon(keep_present, self._database, self.engine.owner, self.schedule)

    def stop_taking(self) -> None:
        """From now on nothing new is taken on; what runs has until the limit to end."""
        if not self.draining:
            self.draining = True
            self.remote.workers.stop()
            self.schedule.stop()
            self.awaited.stop()
            self._drain_until = time.monotonic() + self.settings.drain_s
            asyncio.get_running_loop().call_later(self.settings.drain_s, self._send_callers_away)

    def _send_callers_away(self) -> None:
        """Callers that still wait are told that their decision goes on. It does, here or in the process that takes it over."""
        for answer in self.answers.values():
            if not answer.done():
                answer.set_result(Superseded())

    async def drain(self) -> None:
        """Take nothing new; wait for what runs, up to the limit; let go of the rest, for others to take over."""
        self.stop_taking()
        with anyio.move_on_after(self._drain_until - time.monotonic()):
            while not self.idle:
                self._idle.clear()
                await self._idle.wait()
        self.remote.tasks.let_go()
        await self.pools.release()
        for tenant in {held.tenant for held in (*self._decisions.values(), *self._operations.values())}:
            decisions = [id for id, held in self._decisions.items() if held.tenant == tenant]
            operations = [id for id, held in self._operations.items() if held.tenant == tenant]
            log.warning("letting go of %s decisions and %s operations", len(decisions), len(operations))
            await quietly(
                "let go of them; their leases run out", partial(self._release, tenant, decisions, operations)
            )
        await quietly(
            "say that this process stops", partial(presence.leave, self._database, self.engine.owner)
        )

    async def _release(self, tenant: UUID, decisions: Sequence[UUID], operations: Sequence[UUID]) -> None:
        async with self._database.transaction(tenant) as connection:
            await queue.requeue_held(connection, tenant, self.engine.owner, decisions, "process-stopped")
            await lease.release(connection, tenant, self.engine.owner, operations)
