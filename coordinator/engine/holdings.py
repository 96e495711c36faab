"""What this process holds: decisions from their slot to their rest, operations from claim to settlement.

A decision belongs to its process, not to the request that brought it: a caller that waits too long or goes away leaves it
running. `take_on` starts a decision and gives the future of its result; at its rest its operations, born claimed, go to dispatch. The
same two roads serve what `recover` takes over from a silent process. Each held row is in `decisions` or `operations` while it is held,
so its lease is renewed, and whoever stops the process knows what is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from uuid import UUID

import anyio
from anyio.abc import TaskGroup
from uuid_utils.compat import uuid7

from coordinator import telemetry
from coordinator.core.decision import Coordinator
from coordinator.engine.admit import resume
from coordinator.engine.commit import commit, rest_without_commit
from coordinator.engine.dispatch import dispatch
from coordinator.engine.path import walk
from coordinator.engine.pools import Providers
from coordinator.engine.recover import Held, renew_leases, sweep
from coordinator.engine.run import Engine, Refusal, Run
from coordinator.engine.slots import Chains, ClassSlots, Ticket
from coordinator.engine.watch import Remote
from coordinator.errors import CommitUnknown, Overloaded, RequestRefused
from coordinator.store import lease
from coordinator.store.boundary import Boundary
from coordinator.store.commit import Committed, NewOperation, Superseded
from coordinator.store.database import Database

log = logging.getLogger(__name__)
Answer = asyncio.Future[Committed | Superseded]


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
        self.slots = ClassSlots(settings.classes, settings.max_running)
        self.runs: dict[UUID, Run] = {}
        self.answers: dict[UUID, Answer] = {}
        self._tasks = tasks
        self._database = database
        self._decisions: dict[UUID, Held] = {}
        self._operations: dict[UUID, Held] = {}
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self.remote = Remote(database, tasks, progress=lambda tenant, decision, evidence, lines: None)
        self.engine = Engine(
            boundary=Boundary(database, tasks, coordinator.record_kinds),
            settings=settings,
            providers=Providers(settings.provider_concurrency),
            chains=Chains(),
            tasks=self.remote.tasks,
            owner=uuid7(),
            new_id=uuid7,
            render_refusal=render_refusal,
            wake_in=self._wake_in,
            stopping=lambda: self.draining,
            still_holds=self._still_holds,
        )

    @property
    def idle(self) -> bool:
        return not self.runs and not self._operations

    def _wake_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._due.set)

    def _still_holds(self, operation: UUID, token: int) -> bool:
        held = self._operations.get(operation)
        return held is not None and held.token == token and time.monotonic() < held.until

    def take_on(self, run: Run, ticket: Ticket, until: float) -> Answer:
        answer: Answer = asyncio.get_running_loop().create_future()
        self.answers[run.id] = answer
        self.runs[run.id] = run
        self._decisions[run.id] = Held(run.tenant, until, run.token)
        self._tasks.start_soon(self._drive, run, ticket, answer)
        return answer

    async def _drive(self, run: Run, ticket: Ticket, answer: Answer) -> None:
        """From its slot to its rest. Whatever goes wrong in here, the decision is at rest afterwards, or its lease runs out."""
        try:
            result = await self._to_rest(run, ticket)
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
            self.slots.give_back(ticket)
            self._let_go(run)
            self._idle.set()

    def _let_go(self, run: Run) -> None:
        """Unless this very process has claimed the decision anew, its lease having run out: then that claim holds it."""
        if self.runs.get(run.id) is run:
            del self.answers[run.id], self.runs[run.id], self._decisions[run.id]

    async def _to_rest(self, run: Run, ticket: Ticket) -> Committed | Superseded:
        if not ticket.runs():
            await self._until_its_turn(run, ticket)
            if ticket.runs() and not await self._started(run):
                return Superseded()
        try:
            return await walk(self.engine, run)
        except Exception:  # a fault of ours must not leave a decision without an end
            trace_id = telemetry.trace_id(run.traceparent)
            log.exception("decision %s, trace %s", run.id, trace_id)
            rest = rest_without_commit(
                "failed", "internal-error", f"an internal error; it was logged with trace {trace_id}"
            )
            result = await commit(self.engine, run, rest)
            return result if isinstance(result, Committed) else Superseded()

    async def _started(self, run: Run) -> bool:
        """A decision that was taken over is `running` since then, though it waited for its slot here."""
        return run.token > 1 or await self.engine.boundary.start.submit(run.tenant, (run.id, run.token))

    async def _until_its_turn(self, run: Run, ticket: Ticket) -> None:
        """Or until it is cancelled or its time is over, which the path then finds. The ticket's future is not ours to cancel."""
        began = time.monotonic()
        with anyio.CancelScope() as waiting:
            run.cancel = waiting.cancel
            await asyncio.wait([ticket.turn], timeout=max(0.0, run.ends_at - began))
        run.cancelled = waiting.cancel_called
        run.stages.append(run.stage_now("queue", round((time.monotonic() - began) * 1000)))

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

    def _take_decision(self, tenant: UUID, claimed: lease.ClaimedDecision, until: float) -> None:
        self._tasks.start_soon(self._resume, tenant, claimed, until)

    async def _resume(self, tenant: UUID, claimed: lease.ClaimedDecision, until: float) -> None:
        try:
            run = await resume(self.engine, self.coordinator, tenant, claimed)
        except (RequestRefused, CommitUnknown) as error:
            log.warning("decision %s cannot be resumed here: %s", claimed.id, error)
            return
        self.take_on(run, self.slots.take(run.request.class_, bounded=False), until)

    def _free(self) -> tuple[int, int]:
        if self.draining:
            return 0, 0
        return (
            max(0, self.settings.max_running - len(self.runs)),
            max(0, self.settings.max_dispatching - len(self._operations)),
        )

    async def _until_due(self) -> None:
        with anyio.move_on_after(self.settings.poll_ms / 1000):
            await self._due.wait()
        self._due.clear()

    def start_loops(self) -> None:
        self._tasks.start_soon(self.remote.watch)
        self._tasks.start_soon(renew_leases, self.engine, self._decisions, self._operations)
        self._tasks.start_soon(
            partial(
                sweep,
                self.engine,
                types=list(self.coordinator.types),
                free=self._free,
                take_decision=self._take_decision,
                take_operation=self._take_operation,
                sleep=self._until_due,
            )
        )

    def stop_taking(self) -> None:
        """From now on nothing new is taken on; what runs has until the limit to end."""
        if not self.draining:
            self.draining = True
            self.remote.workers.stop()
            self._drain_until = time.monotonic() + self.settings.drain_s

    async def drain(self) -> None:
        """Take nothing new; wait for what runs, up to the limit; let go of the rest, for others to take over."""
        self.stop_taking()
        with anyio.move_on_after(self._drain_until - time.monotonic()):
            while not self.idle:
                self._idle.clear()
                await self._idle.wait()
        left: dict[UUID, tuple[list[UUID], list[UUID]]] = {}
        for index, held in enumerate((self._decisions, self._operations)):
            for id, row in held.items():
                left.setdefault(row.tenant, ([], []))[index].append(id)
        for tenant, (decisions, operations) in left.items():
            log.warning("letting go of %s decisions and %s operations", len(decisions), len(operations))
            try:
                async with self._database.transaction(tenant) as connection:
                    await lease.release(
                        connection,
                        tenant,
                        owner=self.engine.owner,
                        decisions=decisions,
                        operations=operations,
                    )
            except (CommitUnknown, Overloaded) as error:
                log.warning("they are free when their leases have run out: %s", error)
