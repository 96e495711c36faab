"""Commit: bring the decision to rest in one transaction, and render what it will answer for ever.

The answer is rendered inside the transaction, when it is certain which version was made and what the checks under lock said, and
stored with the decision: what a client is told, and what any later replay of its key is told, are the same bytes.

If the connection fails during COMMIT, nobody knows whether it happened. Then the decision is read back: if it rests, it was
committed; if this process still holds it, the transaction is tried again, and the fencing token makes that safe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.fence import Check, ReadCheck
from coordinator.core.graph import Graph, graph_of
from coordinator.core.packet import Packet
from coordinator.core.receipt import Receipt, receipt
from coordinator.core.view import (
    DecisionView,
    FenceView,
    OperationView,
    OutcomeView,
    RecordView,
    encode_view,
    timestamp,
)
from coordinator.engine.decide import Decided
from coordinator.engine.reviewing import approvals, count, keep, rest_kind, review_view
from coordinator.engine.run import Engine, Reading, Run
from coordinator.engine.spending import budget_view, paid_operations, spending_of, unreserved_of
from coordinator.errors import CommitUnknown, Overloaded, RequestRefused
from coordinator.failpoints import failpoint
from coordinator.store import reading
from coordinator.store.commit import Committed, Facts, Finished, NewOperation, Proposal, Result, Superseded

READ_BACK_PAUSE_S = 0.2


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """How a decision comes to rest. ``readings`` are those of the packet, where the rest is a review. ``refusal`` is what POST
    answers in place of the decision, if it does."""

    decided: Decided
    packet: Packet | None = None
    readings: Mapping[str, Reading] = {}
    checks: Sequence[Check] = ()
    confirmed: Mapping[str, float] = {}
    reads: Sequence[ReadCheck] = ()
    fresh: Callable[[], bool] = lambda: True
    refusal: RequestRefused | None = None
    policy_version: str | None = None

    def version(self, run: Run) -> str:
        """Of the policy that concluded this: the one declared here, unless it says otherwise."""
        return self.policy_version or run.type.policy_version


def rest_without_commit(
    status: str, code: str, reason: str, packet: Packet | None = None, **more: Any
) -> Rest:
    """A rest that changes nothing and sends nothing."""
    outcome = OutcomeView(kind=status.replace("_", "-"), reason=reason, code=code)
    return Rest(decided=Decided(status=status, outcome=outcome, digest=""), packet=packet, **more)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal that has its place in the queue for the database."""

    proposal: Proposal
    result: asyncio.Future[Result]
    began: float


def propose(engine: Engine, run: Run, rest: Rest) -> Proposed:
    """Take a place at the durable boundary, at once: who proposes first is judged first."""
    proposal = _proposal(engine, run, rest)
    return Proposed(proposal, engine.boundary.commit.enqueue(run.tenant, proposal), time.monotonic())


async def settled(engine: Engine, run: Run, proposed: Proposed) -> Result:
    """Committed, or why not. Waits as long as it takes: a decision that was admitted has to come to rest."""
    waiting = proposed.result
    while True:
        try:
            # Shielded: it cannot be called back, and what became of it decides what is sent.
            status = proposed.proposal.status
            with (
                telemetry.span("coordinator.commit", run.traceparent, decision_status=status),
                anyio.CancelScope(shield=True),
            ):
                result = await waiting
            if isinstance(result, Committed):
                await failpoint("commit.after")
        except (CommitUnknown, Overloaded):
            known = await _read_back(engine, run)
            if known is not None:
                return known
            waiting = engine.boundary.commit.enqueue(run.tenant, proposed.proposal)
            continue
        telemetry.STAGE_SECONDS.labels("commit").observe(time.monotonic() - proposed.began)
        if run.type.needs:
            engine.freed.tell(run.tenant)
        if isinstance(result, Committed):
            count(run, proposed.proposal.status)
        else:
            run.events.unseal()
        return result


async def commit(engine: Engine, run: Run, rest: Rest) -> Result:
    """`propose`, and wait until it is `settled`."""
    return await settled(engine, run, propose(engine, run, rest))


async def _read_back(engine: Engine, run: Run) -> Result | None:
    """What became of the decision: at rest (as us or as another), or None if it is still ours to bring to rest."""
    while True:
        await anyio.sleep(READ_BACK_PAUSE_S)
        try:
            async with engine.boundary.database.transaction(run.tenant) as connection:
                row = await reading.decision(connection, run.tenant, run.id)
        except (CommitUnknown, Overloaded):
            if engine.stopping():
                raise
            continue
        if row and row.answer is not None and row.answer_status is not None and not row.held:
            if row.fencing_token == run.token:
                # Its operations are left to their lease: it may have run out while the database was away.
                return Committed(Finished(row.answer, row.answer_status, row.view, ()))
            return Superseded()
        return None


def _proposal(engine: Engine, run: Run, rest: Rest) -> Proposal:
    began = time.monotonic()

    def finish(facts: Facts) -> Finished:
        run.rendered_at = time.monotonic()
        events = run.events.seal()
        commit_ms = round((time.monotonic() - began) * 1000)
        view = encode_view(_view(run, rest, facts, commit_ms))
        receipts = _receipts(run, rest, facts)
        review = keep(run, rest.decided, rest.version(run), rest.readings, facts.now)
        if run.review is not None:  # it was answered when it came into review
            return Finished(view, 201, view, receipts, review)
        if rest.refusal is None:
            return Finished(view, 201, None, receipts, review, events)
        status, answer = engine.render_refusal(rest.refusal)
        return Finished(answer, status, view, receipts, review, events)

    operations = paid_operations(run, rest.decided.operations)
    return Proposal(
        decision_id=run.id,
        decision_type=run.type.name,
        token=run.token,
        status=rest.decided.status,
        changes=rest.decided.changes,
        reads=rest.reads,
        operations=operations,
        traceparent=run.traceparent,
        lease_owner=engine.owner,
        lease_ms=engine.settings.lease_ms,
        fresh=rest.fresh,
        finish=finish,
        spending=spending_of(run, operations),
        unreserved=unreserved_of(engine, run),
        own_receipts=1 + len(approvals(run, rest.decided.status)),
        locks=run.lock_names,
        under=run.locks if rest.decided.status == "committed" else {},
    )


def _view(run: Run, rest: Rest, facts: Facts, commit_ms: int) -> DecisionView:
    decided = rest.decided
    checks = _checks(rest, facts)
    waits = run.review is not None and decided.status == "in_review"
    return DecisionView(
        id=str(run.id),
        type=run.type.name,
        policy_version=rest.version(run),
        status=decided.status,
        class_=run.request.class_,
        input=run.request.input,
        record=_record_view(run, decided),
        outcome=decided.outcome,
        packet_digest=rest.packet.digest if rest.packet else None,
        evidence=msgspec.Raw(rest.packet.bytes if rest.packet else b"[]"),
        fence=FenceView(rounds=run.rounds, checks=[*run.moves, *checks]),
        operations=[
            OperationView(
                id=str(op.id), effect=op.effect, state=_born(op), receipt=facts.receipt + 1 + op.ordinal
            )
            for op in decided.operations
        ],
        budget=budget_view(run),
        timeline=[*run.stages, run.stage_now("commit", commit_ms)],
        trace_id=telemetry.trace_id(run.traceparent),
        created_at=timestamp(run.created_at),
        finished_at=timestamp(run.review.since if run.review and waits else facts.now),
        review=review_view(run, decided, rest.packet, rest.readings, checks, facts.now),
        graph=_graph(run, rest.packet),
    )


def _graph(run: Run, packet: Packet | None) -> Graph | msgspec.UnsetType:
    if packet is None or not packet.items:
        return msgspec.UNSET
    return graph_of(run.type.after, {item.name: item.elapsed_ms for item in packet.items})


def _born(op: NewOperation) -> str:
    return "ready" if op.after else "dispatching"


def _record_view(run: Run, decided: Decided) -> RecordView | None:
    if run.record_key is None:
        return None
    kind, id = run.record_key
    made = next(
        (change.base + 1 for change in decided.changes if (change.kind, change.id) == (kind, id)), None
    )
    return RecordView(kind=kind, id=id, base_version=run.record.version, committed_version=made)


def _checks(rest: Rest, facts: Facts) -> list[Check]:
    """External evidence: how long before COMMIT its confirming read began. Our own records: checked under lock, 0 ms before."""
    now = time.monotonic()
    return [
        msgspec.structs.replace(
            check, confirmed_ms_before_commit=round((now - rest.confirmed[check.evidence]) * 1000)
        )
        if check.evidence in rest.confirmed
        else check
        for check in (*rest.checks, *facts.checks)
    ]


def _receipts(run: Run, rest: Rest, facts: Facts) -> list[Receipt]:
    decided, id = rest.decided, str(run.id)
    record = _record_view(run, decided)
    own = receipt(
        rest_kind(run, decided.status),
        decision_id=id,
        policy_version=rest.version(run),
        packet_digest=rest.packet.digest if rest.packet else None,
        outcome_digest=decided.digest or None,
        code=decided.outcome.code,
        record=record,
        changes=[{"kind": c.kind, "id": c.id, "version": c.base + 1} for c in decided.changes] or None,
        checks=_checks(rest, facts) or None,
        reviewed_by=str(run.review.reviewer) if run.review else None,
        fencing_token=run.token,
        trace_id=telemetry.trace_id(run.traceparent),
    )
    return [*approvals(run, decided.status), own] + [
        receipt(
            f"operation.{_born(op)}",
            decision_id=id,
            operation_id=str(op.id),
            effect=op.effect,
            key=op.key,
            payload_hash=op.payload_hash,
            fencing_token=1,
        )
        for op in decided.operations
    ]
