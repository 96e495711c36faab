"""Dispatch: one attempt at one operation that this process holds, and what follows from it.

The claim is durable before the provider is called: either the commit that created the operation, or a claim that took it over.
The provider is called outside any transaction, with the operation's fixed key. What it said goes into `core.effect.next_step`,
and the step becomes the operation's state with its receipt. If this process dies in between, the lease runs out, and whoever
takes the operation over treats the attempt as ambiguous: it may have reached the provider.
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar
from uuid import UUID

import anyio
import msgspec
import tenacity

from coordinator import telemetry
from coordinator.core.effect import (
    MAX_SENDS,
    Accepted,
    Ambiguous,
    AskProvider,
    Fail,
    LookupResult,
    NotFound,
    NotSent,
    Operation,
    Park,
    Rejected,
    Resend,
    SendResult,
    Sink,
    Step,
    Succeed,
    after_lookup,
    before_send,
    next_step,
)
from coordinator.core.evidence import clean_text
from coordinator.engine.pools import Provider
from coordinator.engine.run import Engine
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.failpoints import failpoint
from coordinator.logs import THEIR_FAULTS, description_of, traceback_of
from coordinator.store.bills import Bill
from coordinator.store.lease import ClaimedOperation
from coordinator.store.settle import Settlement

log = logging.getLogger(__name__)
T = TypeVar("T", SendResult, LookupResult)
SEND_RESULTS = (Accepted, Rejected, NotSent, Ambiguous)
LOOKUP_RESULTS = (Accepted, NotFound, Ambiguous)
_JITTER = tenacity.AsyncRetrying(wait=tenacity.wait_random_exponential(multiplier=0.2, max=60))
SETTLE_PAUSE_S = 0.2
MAX_SENDS_PER_DECISION = 32
GRACE_S = 1.0
"""A sink keeps its own time; we cut it off only when it does not."""


async def dispatch(engine: Engine, tenant: UUID, sink: Sink | None, claimed: ClaimedOperation) -> None:
    """Do the next thing for an operation that this process has just claimed: send it, or ask the provider about it."""
    if sink is None:
        step: Step = Park(
            f"no effect {claimed.effect!r} is declared by {claimed.decision_type!r} in this service"
        )
        await _settle(engine, tenant, claimed, step, sent=False, asked=False, in_doubt=claimed.in_doubt)
    elif claimed.was == "uncertain":
        await _ask(engine, tenant, sink, claimed)
    elif claimed.was == "dispatching" and not isinstance(step := _after_lost_holder(sink, claimed), Resend):
        await _settle(engine, tenant, claimed, step, sent=True, asked=False, in_doubt=True)
    elif claimed.was == "dispatching":
        await _send(engine, tenant, sink, msgspec.structs.replace(claimed, in_doubt=True))
    else:
        await _send(engine, tenant, sink, claimed)


async def _send(engine: Engine, tenant: UUID, sink: Sink, claimed: ClaimedOperation) -> None:
    provider = engine.providers.of(sink.provider)
    began = time.monotonic()
    instead = before_send(
        sink.guarantee, age_ms=claimed.age_ms, in_doubt=claimed.in_doubt, timeout_ms=sink.timeout_ms
    )
    if instead is not None:
        await _settle(engine, tenant, claimed, instead, sent=False, asked=False, in_doubt=True)
        return
    async with provider.slot() as call:
        pause_ms = provider.breaker.wait_ms(_now_ms())
        if pause_ms:
            step: Step = Resend(
                pause_ms + _backoff_ms(1),
                f"provider {sink.provider} has failed again and again; it is left alone",
            )
            await _settle(engine, tenant, claimed, step, sent=False, asked=False, in_doubt=claimed.in_doubt)
            return
        if not engine.still_holds(claimed.id, claimed.token):
            provider.breaker.dropped()
            log.warning("operation %s was held too long before it was sent; its next holder will", claimed.id)
            return
        with telemetry.span(
            "coordinator.dispatch", claimed.traceparent, operation_id=str(claimed.id)
        ) as inside:
            result = await _perform(provider, sink, _operation(tenant, claimed, inside))
        if isinstance(result, Ambiguous):
            call.give_up()
    await failpoint("dispatch.after")
    sends = claimed.sends + 1
    step = next_step(
        sink.guarantee,
        result,
        age_ms=claimed.age_ms + round((time.monotonic() - began) * 1000),
        sends=MAX_SENDS if claimed.decision_sends + 1 >= MAX_SENDS_PER_DECISION else sends,
        in_doubt=claimed.in_doubt,
        timeout_ms=sink.timeout_ms,
        backoff_ms=_backoff_ms(sends),
    )
    in_doubt = claimed.in_doubt or isinstance(result, Ambiguous)
    bill = _bill(engine, sink, result)
    await _settle(engine, tenant, claimed, step, sent=True, asked=False, in_doubt=in_doubt, bill=bill)


async def _perform(provider: Provider, sink: Sink, operation: Operation) -> SendResult:
    result: SendResult = Ambiguous("timed-out", f"no answer within {sink.timeout_ms} ms")
    try:
        with anyio.move_on_after(sink.timeout_ms / 1000 + GRACE_S):
            await failpoint("dispatch.before")
            said = await sink.perform(operation)
            await failpoint("dispatch.sent")
            result = _well_formed(said, SEND_RESULTS)
    except THEIR_FAULTS as error:  # the boundary to adapters: it may have raised after sending; logged
        log.error("sink %s raised: %s", sink.name, traceback_of(error))
        result = Ambiguous("sink-raised", description_of(error))
    except BaseException:
        provider.breaker.dropped()
        raise
    if isinstance(result, Accepted | Rejected):
        provider.breaker.succeeded()
    else:
        provider.breaker.failed(_now_ms())
    return result


def _well_formed(said: T, allowed: tuple[type, ...]) -> T:
    """What a sink said, if it is one of these with fields of their declared types. Raises `TypeError` or `msgspec.ValidationError`:
    what it was meant to say is as unknown as if it had raised."""
    if not isinstance(said, allowed):
        raise TypeError(f"it returned {said!r:.100}, which is no result")
    msgspec.convert(msgspec.to_builtins(said), type(said))
    if isinstance(said, Accepted | Rejected) and said.cost is not None and said.cost.amount_minor < 0:
        raise TypeError("it says that the effect cost less than nothing")
    return said


def _now_ms() -> int:
    return round(time.monotonic() * 1000)


async def _ask(engine: Engine, tenant: UUID, sink: Sink, claimed: ClaimedOperation) -> None:
    with telemetry.span("coordinator.dispatch", claimed.traceparent, operation_id=str(claimed.id)) as inside:
        result = await _lookup(engine, sink, _operation(tenant, claimed, inside))
    step = after_lookup(
        sink.guarantee,
        result,
        age_ms=claimed.last_sent_age_ms or 0,
        committed_ms=claimed.age_ms,
        sends=MAX_SENDS if claimed.decision_sends >= MAX_SENDS_PER_DECISION else claimed.sends,
        lookups=claimed.lookups + 1,
        timeout_ms=sink.timeout_ms,
        backoff_ms=_backoff_ms(claimed.lookups + 1),
    )
    in_doubt = claimed.in_doubt and not isinstance(step, Resend)  # a proven absence ends the doubt
    bill = _bill(engine, sink, result)
    await _settle(engine, tenant, claimed, step, sent=False, asked=True, in_doubt=in_doubt, bill=bill)


def _bill(engine: Engine, sink: Sink, result: SendResult | LookupResult) -> Bill | None:
    """What the provider said that it cost."""
    if not isinstance(result, Accepted | Rejected) or result.cost is None:
        return None
    return Bill(id=engine.new_id(), kind="effect", item=sink.name, provider=sink.provider, cost=result.cost)


async def _lookup(engine: Engine, sink: Sink, operation: Operation) -> LookupResult:
    async with engine.providers.of(sink.provider).slot() as call:
        with anyio.move_on_after(sink.timeout_ms / 1000 + GRACE_S):
            try:
                await failpoint("ask.before")
                found = await sink.lookup(operation)
                await failpoint("ask.sent")
                return _well_formed(found, LOOKUP_RESULTS)
            except THEIR_FAULTS as error:  # the boundary to adapters; logged
                log.error("sink %s raised in lookup: %s", sink.name, traceback_of(error))
                return Ambiguous("sink-raised", description_of(error))
        call.give_up()
        return Ambiguous("timed-out", f"no answer to the lookup within {sink.timeout_ms} ms")


def _after_lost_holder(sink: Sink, claimed: ClaimedOperation) -> Step:
    """The last holder fell silent: its attempt may have reached the provider, and is counted. So are those of earlier holders, none
    of whom lived to count its own: each claim raised the token, and an operation that kills whoever sends it must not go on so."""
    return next_step(
        sink.guarantee,
        Ambiguous("holder-lost", "the process that held this operation fell silent; it may have been sent"),
        age_ms=claimed.age_ms,
        sends=max(claimed.sends + 1, claimed.token - 1 - claimed.lookups),
        in_doubt=True,
        timeout_ms=sink.timeout_ms,
        backoff_ms=0,
    )


def _operation(tenant: UUID, claimed: ClaimedOperation, traceparent: str) -> Operation:
    return Operation(
        id=str(claimed.id),
        key=claimed.key,
        tenant=str(tenant),
        decision_id=str(claimed.decision_id),
        effect=claimed.effect,
        payload=claimed.payload,
        attempt=claimed.sends + 1,
        traceparent=traceparent,
    )


def _backoff_ms(attempts: int) -> int:
    """Exponential with full jitter, in ms."""
    state = tenacity.RetryCallState(_JITTER, None, (), {})
    state.attempt_number = attempts + 1
    return round(1000 * _JITTER.wait(state))


async def _settle(
    engine: Engine,
    tenant: UUID,
    claimed: ClaimedOperation,
    step: Step,
    *,
    sent: bool,
    asked: bool,
    in_doubt: bool,
    bill: Bill | None = None,
) -> None:
    """Store the step. If nobody knows whether that was committed, storing it again changes nothing twice: by then the token or
    the state no longer fits, and the repeat is kept as late evidence."""
    settlement = _settlement(claimed, step, sent=sent, asked=asked, in_doubt=in_doubt, bill=bill)
    while True:
        try:
            await engine.boundary.settle.submit(tenant, settlement)
            await failpoint("settle.after")
        except (CommitUnknown, Overloaded):
            if engine.stopping():
                raise
            log.warning("operation %s could not be settled yet", claimed.id)
            await anyio.sleep(SETTLE_PAUSE_S)
            continue
        if claimed.paid:
            engine.freed.tell(tenant)
        telemetry.OPERATIONS.labels(claimed.effect, settlement.state).inc()
        if settlement.due_ms is not None or claimed.linked:
            engine.wake_in((settlement.due_ms or 0) / 1000)
        return


def _settlement(
    claimed: ClaimedOperation, step: Step, *, sent: bool, asked: bool, in_doubt: bool, bill: Bill | None
) -> Settlement:
    state, reference, reason, due_ms = _as_state(step)
    return Settlement(
        operation_id=claimed.id,
        decision_id=claimed.decision_id,
        token=claimed.token,
        state=state,
        reference=reference,
        reason=reason and clean_text(reason),
        due_ms=due_ms,
        sent=sent,
        asked=asked,
        in_doubt=in_doubt,
        linked=claimed.linked,
        paid=claimed.paid,
        bill=bill,
    )


def _as_state(step: Step) -> tuple[str, str | None, str | None, int | None]:
    match step:
        case Succeed(reference):
            return "succeeded", clean_text(reference), None, None
        case Fail(reason):
            return "failed", None, reason, None
        case Resend(after_ms, reason):
            return "ready", None, reason, after_ms
        case AskProvider(after_ms, reason):
            return "uncertain", None, reason, after_ms
        case Park(reason):
            return "uncertain", None, reason, None
