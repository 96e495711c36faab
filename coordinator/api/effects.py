"""`/v1/operations/{id}/...`: what a person knows or wants of an operation, and asking the providers again now.

Each of these guards itself by the operation's state: what was done already is refused with `state-conflict`, so that a caller
who got no answer looks, or repeats, without harm.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from coordinator.api import examples
from coordinator.api.answer import Answer
from coordinator.api.body import Nothing, check_cost, typed
from coordinator.api.endpoint import Call, Sent, Shown, endpoint
from coordinator.api.operations import as_it_is_now
from coordinator.api.parameters import ID
from coordinator.api.views import OperationShown, encode
from coordinator.core.money import Money
from coordinator.errors import MalformedRequest, NotFound, StateConflict

OPERATORS = frozenset({"operate"})
Text = Annotated[str, msgspec.Meta(max_length=500)]


class Resolution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``reference`` is the provider's own name for what happened, ``cost`` what it cost; ``note`` goes into the receipt."""

    verdict: Literal["happened", "did-not-happen"]
    reference: Text = ""
    note: Text = ""
    cost: Money | None = None


class Remark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``note`` goes into the receipt."""

    note: Text = ""


class Asked(msgspec.Struct, frozen=True):
    """How many uncertain operations their providers are being asked about."""

    asked: int


@endpoint(
    "POST",
    "/v1/operations/{id}/resolve",
    "Say what became of an uncertain operation",
    scopes=OPERATORS,
    parameters=[ID],
    body=Sent(Resolution, examples.RESOLUTION),
    answers={200: Shown("The operation as it is now.", OperationShown)},
    problems=[MalformedRequest, NotFound, StateConflict],
)
async def resolve(call: Call) -> Answer:
    """For one that is `uncertain`, and nothing else: a person has looked at the provider's side and knows whether it `happened`
    (it becomes `succeeded`) or `did-not-happen` (`failed`, and may be retried). What depends on it goes on from there. Who said so
    is in the receipt."""
    id, sent = call.id(), typed(await call.body(), Resolution)
    check_cost(sent.cost)
    await call.service.operations.resolve(call.caller, id, sent.verdict, sent.reference, sent.note, sent.cost)
    return await as_it_is_now(call, id)


@endpoint(
    "POST",
    "/v1/operations/{id}/retry",
    "Send a failed operation again",
    scopes=OPERATORS,
    parameters=[ID],
    body=Sent(Remark, examples.NOTE),
    answers={200: Shown("The operation as it is now.", OperationShown)},
    problems=[MalformedRequest, NotFound, StateConflict],
)
async def retry(call: Call) -> Answer:
    """For one that has `failed`: the provider did not act, and may now. It is sent under the key it always had."""
    id, sent = call.id(), typed(await call.body(), Remark)
    await call.service.operations.retry(call.caller, id, sent.note)
    return await as_it_is_now(call, id)


@endpoint(
    "POST",
    "/v1/operations/{id}/compensate",
    "Undo an operation that succeeded",
    scopes=OPERATORS,
    parameters=[ID],
    body=Sent(Remark, examples.NOTE),
    answers={200: Shown("The operation as it is now: `compensating`, or further.", OperationShown)},
    problems=[MalformedRequest, NotFound, StateConflict],
)
async def compensate(call: Call) -> Answer:
    """By the compensation that the policy declared with it, which is an operation of its own: the one whose `compensates` is this
    one's `ordinal`. An operation without one (`has_compensation` is false) cannot be undone from here."""
    id, sent = call.id(), typed(await call.body(), Remark)
    await call.service.operations.compensate(call.caller, id, sent.note)
    return await as_it_is_now(call, id)


@endpoint(
    "POST",
    "/v1/operations/reconcile",
    "Ask providers about all uncertain operations now",
    scopes=OPERATORS,
    body=Sent(Nothing, examples.NOTHING),
    answers={200: Shown("How many are being asked about.", Asked)},
    problems=[MalformedRequest],
)
async def reconcile(call: Call) -> Answer:
    """Those whose provider can be asked by key are asked at once, not only when it is their turn. The answer does not wait for
    theirs: look at `/v1/operations?state=uncertain`."""
    typed(await call.body(), Nothing)
    return Answer(200, encode(Asked(await call.service.operations.ask_now(call.tenant))))


ENDPOINTS = (resolve, retry, compensate, reconcile)
