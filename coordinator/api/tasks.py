"""`/v1/tasks`: what workers report of the tasks they have claimed, under the fencing token they were given."""

from __future__ import annotations

from typing import Annotated

import msgspec

from coordinator.api import examples
from coordinator.api.answer import Answer
from coordinator.api.body import typed
from coordinator.api.endpoint import Call, Sent, Shown, endpoint, nothing_here
from coordinator.api.parameters import ID
from coordinator.api.views import encode
from coordinator.api.workers import WORKERS
from coordinator.core.canonical import MAX_INTEGER
from coordinator.core.evidence import MAX_UNITS
from coordinator.core.money import Money
from coordinator.core.task import (
    CODE,
    MAX_PROGRESS_LINES,
    Completed,
    NotCompleted,
    clean_lines,
    encode_answer,
)
from coordinator.core.view import timestamp
from coordinator.errors import BodyTooLarge, MalformedRequest, NotFound, Overloaded, Supplanted
from coordinator.store.claims import Kept, Report, Superseded, Unknown

Token = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Units = Annotated[int, msgspec.Meta(ge=0, le=MAX_UNITS)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=3_600_000)]


class HeartbeatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``progress``: lines for whoever follows the decision's events; those longer than 2,000 characters are cut."""

    fencing_token: Token
    progress: Annotated[list[str], msgspec.Meta(max_length=MAX_PROGRESS_LINES)] = []


class CompleteBody(Completed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``result`` is the value, an object as the source declares it; null if the worker looked and there is no such thing."""

    fencing_token: Token
    age_ms: Milliseconds = 0
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    units: Units | None = None


class FailBody(NotCompleted, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``code`` and ``message`` become the evidence's error. ``retryable``: asking again may help, which the evidence's own
    ``attempts`` bound. ``cost`` is what the failure cost all the same."""

    fencing_token: Token
    code: Annotated[str, msgspec.Meta(pattern=CODE)] = "worker-failed"
    message: Annotated[str, msgspec.Meta(max_length=2_000)] = ""
    retry_after_ms: Milliseconds | None = None
    units: Units | None = None


class KeptShown(msgspec.Struct, frozen=True, kw_only=True):
    """The task is still this worker's. ``deadline`` may have moved; ``draining``: no further task will come, and what is left at
    the lease's end is handed back."""

    lease_expires_at: str
    lease_ms: int
    deadline: str
    remaining_ms: int
    draining: bool


class EndShown(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: str


@endpoint(
    "POST",
    "/v1/tasks/{id}/heartbeat",
    "Keep a task",
    scopes=WORKERS,
    parameters=[ID],
    body=Sent(HeartbeatBody, examples.HEARTBEAT),
    answers={200: Shown("The lease is prolonged.", KeptShown)},
    problems=[MalformedRequest, NotFound, Supplanted, Overloaded],
)
async def heartbeat(call: Call) -> Answer:
    """The worker lives and goes on with the task. ``superseded``: it should stop, since another has the task or nobody waits for it
    any more."""
    id, body = call.id(), typed(await call.body(), HeartbeatBody)
    lines = clean_lines(body.progress)
    result = await call.service.workers.heartbeat(call.tenant, id, body.fencing_token, lines)
    if not isinstance(result, Kept):
        raise _refusal(result)
    shown = KeptShown(
        lease_expires_at=timestamp(result.lease_expires_at),
        lease_ms=call.service.settings.worker_lease_ms,
        deadline=timestamp(result.deadline_at),
        remaining_ms=result.remaining_ms,
        draining=result.draining,
    )
    return Answer(200, encode(shown))


@endpoint(
    "POST",
    "/v1/tasks/{id}/complete",
    "Complete a task",
    scopes=WORKERS,
    parameters=[ID],
    body=Sent(CompleteBody, examples.COMPLETE),
    answers={200: Shown("The task has ended with this result; so it did if this was said before.", EndShown)},
    problems=[MalformedRequest, BodyTooLarge, NotFound, Supplanted, Overloaded],
)
async def complete(call: Call) -> Answer:
    """What the worker found becomes the evidence. A result that the source does not return, or a cost that the decision cannot
    count, is refused with where it is wrong; the task goes on, and may be completed correctly. An answer that comes too late changes
    nothing and is ``superseded``; it is kept as a receipt, with its cost."""
    body = typed(await call.body(), CompleteBody)
    answer = Completed(
        result=body.result,
        revision=body.revision,
        age_ms=body.age_ms,
        cost=_cost(body.cost),
        confidence=body.confidence,
        interval=body.interval,
        units=body.units,
    )
    return await _end(call, body.fencing_token, answer)


@endpoint(
    "POST",
    "/v1/tasks/{id}/fail",
    "Fail a task",
    scopes=WORKERS,
    parameters=[ID],
    body=Sent(FailBody, examples.FAIL),
    answers={200: Shown("The task has failed for this reason; so it did if this was said before.", EndShown)},
    problems=[MalformedRequest, NotFound, Supplanted, Overloaded],
)
async def fail(call: Call) -> Answer:
    """The worker could not tell; why becomes the evidence's error."""
    body = typed(await call.body(), FailBody)
    answer = NotCompleted(
        code=body.code,
        message=body.message,
        retryable=body.retryable,
        retry_after_ms=body.retry_after_ms,
        cost=_cost(body.cost),
        units=body.units,
    )
    return await _end(call, body.fencing_token, answer)


def _cost(cost: Money | None) -> Money | None:
    if cost is not None and cost.amount_minor < 0:
        raise MalformedRequest("A cost is not negative.", [("/cost/amount_minor", "must be 0 or more")])
    return cost


async def _end(call: Call, token: int, answer: Completed | NotCompleted) -> Answer:
    id = call.id()
    state = "completed" if isinstance(answer, Completed) else "failed"
    report = Report(task=id, token=token, state=state, encoded=encode_answer(answer))
    result = await call.service.workers.end(call.tenant, report)
    if isinstance(result, Superseded | Unknown):
        raise _refusal(result)
    return Answer(200, encode(EndShown(id=str(id), state=result.state)))


def _refusal(result: Superseded | Unknown) -> NotFound | Supplanted:
    if isinstance(result, Unknown):
        return nothing_here()
    if result.state == "in_progress":
        return Supplanted("Another worker has the task now.", state=result.state)
    return Supplanted(
        f"This token does not hold the task any more; it is {result.state}.", state=result.state
    )


ENDPOINTS = (heartbeat, complete, fail)
