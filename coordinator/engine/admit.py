"""Admit: a request becomes a durable decision, or is refused with nothing stored.

    1  the input fits the decision type                       else 400
       what its evidence may cost fits the request's ceiling  else 409
    2  the class has a slot, or room in its queue             else 429, most of the time within microseconds
    3  one transaction stores it under its idempotency key    known key: replay, join, or 422; no room left: 429

With a slot it is born running here; without, it is queued in the database, and any process will claim it in its turn.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import msgspec

from coordinator import telemetry
from coordinator.core.budget import DECISION, Short
from coordinator.core.canonical import JsonValue, canonical
from coordinator.core.decision import Coordinator, DecisionType
from coordinator.core.lock_names import Unnamed
from coordinator.core.money import Money, total
from coordinator.core.pointer import located
from coordinator.core.request import DecisionRequest, decode_request, fingerprint
from coordinator.engine.run import Engine, Run
from coordinator.engine.schedule import Schedule, Slot
from coordinator.engine.spending import exhausted, want_of
from coordinator.errors import (
    BudgetExhausted,
    CommitUnknown,
    IdempotencyKeyReused,
    MalformedRequest,
    Overloaded,
    UnknownDecisionType,
)
from coordinator.failpoints import failpoint
from coordinator.store import reading
from coordinator.store.admit import Admission, Admitted, Known, NoRoom
from coordinator.store.keys import Key
from coordinator.store.queue import Claimed
from coordinator.store.records import Locked, read_records
from coordinator.store.reserve import QUEUED, AdmissionResult, AdmittedPaid, Exhausted, Paid, Secured

ROUTE = ("POST", "/v1/decisions")


def check_request(
    coordinator: Coordinator, request: DecisionRequest
) -> tuple[DecisionType[Any, Any], object]:
    """The decision type and its typed input. Raises `UnknownDecisionType`, `MalformedRequest`."""
    declared = coordinator.types.get(request.type)
    if declared is None:
        raise UnknownDecisionType(
            f"there is no decision type {request.type!r} here; there are {', '.join(coordinator.types)}"
        )
    if declared.record is not None and request.record is None:
        raise MalformedRequest("this decision type needs a record", [("/record", "is missing")])
    if (
        declared.record is not None
        and request.record is not None
        and request.record.kind != declared.record.name
    ):
        raise MalformedRequest(
            "wrong kind of record", [("/record/kind", f"must be {declared.record.name!r}")]
        )
    _check_ceiling(declared, request.ceiling)
    try:
        input = msgspec.convert(request.input, declared.request)
        if declared.locks:
            declared.locks.of(input, request.record)
        return declared, input
    except msgspec.ValidationError as error:
        pointer, what = located(str(error))
        raise MalformedRequest(
            f"the input does not fit {request.type}: {what}", [("/input" + pointer, what)]
        ) from None
    except Unnamed as error:
        raise MalformedRequest(
            f"{request.type} cannot tell which lock this needs: {error.what}", [(error.pointer, error.what)]
        ) from None


def _check_ceiling(declared: DecisionType[Any, Any], ceiling: Money | None) -> None:
    """What is reserved, or with `reduce` what has to be, must fit under the decision's own ceiling before any work begins."""
    if ceiling is not None and ceiling.amount_minor < 0:
        raise MalformedRequest(
            "a ceiling is nothing or more", [("/ceiling/amount_minor", "must not be negative")]
        )
    reduces = declared.on_exhausted == "reduce"
    needed = total([need.amount for need in declared.needs if not (reduces and need.optional)])
    if ceiling is None or needed is None:
        return
    if needed.currency != ceiling.currency:
        raise MalformedRequest(
            "wrong currency", [("/ceiling/currency", f"{declared.name} costs {needed.currency}")]
        )
    if needed.amount_minor > ceiling.amount_minor:
        detail = f"{declared.name} reserves {needed}; the ceiling is {ceiling}"
        raise BudgetExhausted(detail, budget=DECISION, needed=needed, available=ceiling)


class Queued(msgspec.Struct, frozen=True):
    """The decision waits in the database, at this place among the tenant's of its class."""

    row: reading.DecisionRow
    position: int
    estimated_ms: int

    @property
    def id(self) -> UUID:
        return self.row.id


async def admit(
    engine: Engine,
    schedule: Schedule,
    caller: Key,
    key: str,
    declared: DecisionType[Any, Any],
    input: object,
    request: DecisionRequest,
    body: JsonValue,
    traceparent: str,
    slot: Slot | None,
    session: str | None,
) -> Run | Queued | Known:
    """Store the decision: a `Run` if it is new and has a slot, `Queued` if it is new and has none, what is `Known` if its key was
    used before with the same request. Raises `IdempotencyKeyReused`, `QueueFull`, `BudgetExhausted`, or `Overloaded` if the
    database is away."""
    time_limit_ms = min(request.time_limit_ms or declared.time_limit_ms, declared.time_limit_ms)
    position = schedule.position(request.class_, caller.tenant)
    admission = Admission(
        id=engine.new_id(),
        key=key,
        fingerprint=fingerprint(*ROUTE, body),
        type=declared.name,
        class_=request.class_,
        request=canonical(body, checked=True),
        record_kind=request.record.kind if request.record else None,
        record_id=request.record.id if request.record else None,
        requested_by=caller.id,
        traceparent=traceparent,
        time_limit_ms=time_limit_ms,
        lease_owner=engine.owner if slot else None,
        lease_ms=engine.settings.lease_ms,
        estimated_ms=None if slot else schedule.estimate_ms(request.class_, caller.tenant, position),
        session=session,
        queue_depth=schedule.limits(request.class_).queue_depth,
    )
    began = time.monotonic()
    with telemetry.span(
        "coordinator.admit", traceparent, decision_id=str(admission.id), decision_type=declared.name
    ):
        result, held = await _store(engine, caller.tenant, admission, declared, request.ceiling)
    if isinstance(result, NoRoom):
        raise schedule.full(request.class_, caller.tenant)
    if isinstance(result, Known):
        if result.fingerprint != admission.fingerprint:
            raise IdempotencyKeyReused(
                "this Idempotency-Key stands for another request", decision=str(result.id)
            )
        return result
    elapsed = time.monotonic() - began
    telemetry.STAGE_SECONDS.labels("admit").observe(elapsed)
    if slot is None:
        return Queued(_row(admission, result), position, admission.estimated_ms or 0)
    run = Run(
        tenant=caller.tenant,
        id=admission.id,
        token=1,
        type=declared,
        request=request,
        input=input,
        traceparent=traceparent,
        created_at=result.created_at,
        ends_at=began + time_limit_ms / 1000,
        record=result.record,
        requested_by=caller.id,
        held=None if isinstance(held, Short) else held,
        short=held if isinstance(held, Short) else None,
    )
    run.stages.append(run.stage_now("admit", round(elapsed * 1000)))
    return run


def _row(admission: Admission, admitted: Admitted) -> reading.DecisionRow:
    """The row as it was stored."""
    return reading.DecisionRow(
        id=admission.id,
        type=admission.type,
        class_=admission.class_,
        status=admission.status,
        request=admission.request,
        fingerprint=admission.fingerprint,
        traceparent=admission.traceparent,
        created_at=admitted.created_at,
        answer=None,
        answer_status=None,
        view=None,
        fencing_token=0,
        held=False,
        now=admitted.created_at,
    )


async def _store(
    engine: Engine,
    tenant: UUID,
    admission: Admission,
    declared: DecisionType[Any, Any],
    ceiling: Money | None,
) -> tuple[Admitted | Known | NoRoom, Secured | Short | None]:
    """With what it reserves, where it reserves: what it holds, or why it holds nothing; None if that has to be looked up. If
    nobody knows whether COMMIT happened, the key is read back; if that cannot be done either, the caller is told to come back with
    the same key: it will find its decision, or make it then."""
    item: Admission | Paid = admission
    if declared.needs:
        seconds = admission.time_limit_ms / 1000
        token = QUEUED if admission.lease_owner is None else 1
        item = Paid(admission, want_of(engine, declared, admission.id, token, seconds, ceiling))
    try:
        result: AdmissionResult = await engine.boundary.admit.submit(tenant, item, must=False)
        await failpoint("admit.after")
    except CommitUnknown as unknown:
        return await _read_back(engine, tenant, admission, unknown), None
    match result:
        case Exhausted(short):
            raise exhausted(short)
        case AdmittedPaid(admitted, held):
            return admitted, held
        case _:
            return result, None


async def _read_back(
    engine: Engine, tenant: UUID, admission: Admission, unknown: CommitUnknown
) -> Admitted | Known:
    try:
        async with engine.boundary.database.transaction(tenant) as connection:
            row = await reading.decision_by_key(connection, tenant, admission.key)
            if row is not None and row.id == admission.id and row.answer is None:
                key = (admission.record_kind or "", admission.record_id or "")
                record = (await read_records(connection, tenant, {key})).get(key, Locked(0, None))
                return Admitted(
                    row.created_at, record
                )  # ours, and still ours to walk: its token is checked at the end
    except CommitUnknown:
        row = None
    if row is None:
        raise Overloaded(
            "the database went away during the commit; repeat with the same key", retry_after_ms=1000
        ) from unknown
    return Known(row.id, row.fingerprint, row.answer, row.answer_status)


def resume(coordinator: Coordinator, tenant: UUID, claimed: Claimed) -> Run:
    """A claimed decision, to be walked from the beginning. Its input is typed anew: raises `RequestRefused` if the type has
    changed so that it no longer fits."""
    request = decode_request(claimed.request)
    declared, input = check_request(coordinator, request)
    return run_of(declared, input, request, tenant, claimed)


def run_of(
    declared: DecisionType[Any, Any], input: object, request: DecisionRequest, tenant: UUID, claimed: Claimed
) -> Run:
    run = Run(
        tenant=tenant,
        id=claimed.id,
        token=claimed.token,
        type=declared,
        request=request,
        input=input,
        traceparent=claimed.traceparent,
        created_at=claimed.created_at,
        ends_at=time.monotonic() + claimed.remaining_ms / 1000,
        requested_by=claimed.requested_by,
        record=claimed.record,
        begun_before=claimed.requeues > 0,
    )
    run.stages.append(run.stage_now("queue", claimed.waited_ms))
    return run
