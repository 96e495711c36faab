"""`/v1/decisions`: ask for a decision, see it, list them, cancel one."""

from __future__ import annotations

from typing import get_args
from uuid import UUID

import msgspec

from coordinator.api import examples, paging
from coordinator.api.answer import PROBLEM, Answer, location
from coordinator.api.body import typed
from coordinator.api.endpoint import READERS, Call, Parameter, Sent, Shown, endpoint, nothing_here
from coordinator.api.headers import Preference, idempotency_key, preference, session, traceparent
from coordinator.api.parameters import ID, PAGE
from coordinator.core.decision import Status
from coordinator.core.request import DecisionRequest
from coordinator.core.view import DecisionView
from coordinator.engine.service import Pending, Rested
from coordinator.engine.show import PendingView
from coordinator.errors import (
    ClassNotAllowed,
    DecisionInFlight,
    Draining,
    IdempotencyKeyInvalid,
    IdempotencyKeyMissing,
    IdempotencyKeyReused,
    MalformedRequest,
    NotFound,
    Overloaded,
    QueueFull,
    StaleVersion,
    UnknownDecisionType,
)

DECIDERS = frozenset({"decide"})
STATUSES: tuple[str, ...] = get_args(Status)


class Cancelled(msgspec.Struct, kw_only=True):
    """``operations`` is what had been promised or had happened outside by then."""

    id: str
    status: str
    stopped: bool
    operations: list[CancelledOperation]


class CancelledOperation(msgspec.Struct, kw_only=True):
    id: str
    effect: str
    state: str


LOCATION = {"Location": "Where the decision is shown."}


@endpoint(
    "POST",
    "/v1/decisions",
    "Ask for a decision",
    scopes=DECIDERS,
    parameters=[
        Parameter(
            "Idempotency-Key",
            "header",
            "1 to 255 visible ASCII characters, quoted or bare; new for each request. The same key with the same "
            "request gives the same answer, byte for byte.",
            {"type": "string", "minLength": 1},
            required=True,
            example="order-4711-attempt-1",
        ),
        Parameter(
            "Prefer",
            "header",
            "`wait=N`: wait at most N seconds for the decision to rest (default 10, at most 60). `respond-async`: do not wait.",
            example="wait=10",
        ),
        Parameter("traceparent", "header", "W3C trace context, passed on to sources and sinks."),
        Parameter(
            "Coordinator-Session",
            "header",
            "1 to 255 visible ASCII characters: your own name for what you may want to cancel together.",
            {"type": "string", "minLength": 1, "maxLength": 255},
            example="agent-run-17",
        ),
    ],
    body=Sent(DecisionRequest, examples.DECISION),
    answers={
        201: Shown("The decision rests.", DecisionView, headers=LOCATION),
        200: Shown(
            "This key was used for this request before: the answer it got then.",
            DecisionView,
            headers=LOCATION | {"Idempotent-Replayed": "`true`"},
        ),
        202: Shown("Accepted; it does not rest yet.", PendingView, headers=LOCATION),
    },
    problems=[
        MalformedRequest,
        IdempotencyKeyMissing,
        IdempotencyKeyInvalid,
        UnknownDecisionType,
        ClassNotAllowed,
        StaleVersion,
        DecisionInFlight,
        IdempotencyKeyReused,
        QueueFull,
        Draining,
        Overloaded,
    ],
)
async def create(call: Call) -> Answer:
    """Gathers the evidence that the decision type declares, lets its policy decide, checks that what the policy relied on still
    holds, and commits. A decision that was accepted comes to rest, whether or not the caller waits."""
    service, scope = call.service, call.scope
    key = idempotency_key(scope)
    prefer = preference(
        scope, default_wait_s=service.settings.default_wait_s, max_wait_s=service.settings.max_wait_s
    )
    body = await call.body()
    request = typed(body, DecisionRequest)
    result = await service.decide(
        call.caller,
        key,
        request,
        body,
        wait_s=prefer.wait_s,
        traceparent=traceparent(scope),
        session=session(scope),
    )
    return _answer(result, prefer)


def _answer(result: Rested | Pending, prefer: Preference) -> Answer:
    headers = [location(result.id)]
    if prefer.applied is not None:
        headers.append((b"preference-applied", prefer.applied))
    match result:
        case Pending(body=body):
            return Answer(202, body, headers)
        case Rested(status=status, body=body, replayed=replayed):
            if replayed:
                headers.append((b"idempotent-replayed", b"true"))
            return (
                Answer(status, body, headers, content_type=PROBLEM)
                if status >= 400
                else Answer(status, body, headers)
            )


@endpoint(
    "GET",
    "/v1/decisions/{id}",
    "Show a decision",
    scopes=READERS,
    parameters=[ID],
    answers={
        200: Shown(
            "The decision with its operations' present states.",
            DecisionView,
            headers={"ETag": "If it is in review: for the If-Match of a verdict."},
        )
    },
    problems=[NotFound],
)
async def show(call: Call) -> Answer:
    """The decision as it is now."""
    return await as_it_is_now(call, call.id())


async def as_it_is_now(call: Call, id: UUID) -> Answer:
    """A decision of the caller's tenant. Raises `NotFound`."""
    found = await call.service.look(call.tenant, id)
    if found is None:
        raise nothing_here()
    return Answer(200, found.body, [] if found.etag is None else [(b"etag", b'"%d"' % found.etag)])


@endpoint(
    "GET",
    "/v1/decisions",
    "List decisions",
    scopes=READERS,
    parameters=[
        Parameter(
            "status", "query", "Only those in this status.", {"type": "string", "enum": list(STATUSES)}
        ),
        Parameter("type", "query", "Only those of this decision type."),
        Parameter("record", "query", "Only those about this record: `kind/id`.", example="proposal/p-1"),
        Parameter("class", "query", "Only those of this priority class."),
        *PAGE,
    ],
    answers={200: Shown("A page of decisions, the newest first.", DecisionView, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """Newest first; pages stay the same whatever is added meanwhile."""
    items, before = await call.service.list(
        call.tenant,
        status=paging.choice_of(call.query, "status", STATUSES),
        type=call.query.get("type"),
        record=_record(call.query),
        class_=call.query.get("class"),
        before=paging.id_before(call.query, "decisions"),
        limit=paging.limit_of(call.query),
    )
    return Answer(200, paging.page(items, paging.cursor("decisions", before)))


def _record(query: paging.Query) -> tuple[str, str] | None:
    text = query.get("record")
    if text is None:
        return None
    kind, slash, id = text.partition("/")
    if not slash or not kind or not id:
        raise MalformedRequest("record must be kind/id, such as proposal/p-1.")
    return kind, id


@endpoint(
    "POST",
    "/v1/decisions/{id}/cancel",
    "Cancel a decision",
    scopes=DECIDERS,
    parameters=[ID],
    answers={200: Shown("Whether it was stopped, and what had already happened outside.", Cancelled)},
    problems=[MalformedRequest, NotFound],
)
async def cancel(call: Call) -> Answer:
    """Stops what can still be stopped. Cancelling is not a rollback: what was committed stays, what was sent stays sent."""
    return Answer(200, await call.service.cancel(call.caller, call.id()))


ENDPOINTS = (create, index, show, cancel)
