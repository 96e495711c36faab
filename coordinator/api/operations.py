"""`/v1/operations`: the effects that decisions committed, and what is known of each."""

from __future__ import annotations

from typing import get_args
from uuid import UUID

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Parameter, Shown, endpoint, nothing_here
from coordinator.api.parameters import ID, PAGE
from coordinator.api.views import OperationShown, operation_shown
from coordinator.core.effect import OperationState
from coordinator.errors import MalformedRequest, NotFound
from coordinator.store import reading

STATES: tuple[str, ...] = get_args(OperationState)


@endpoint(
    "GET",
    "/v1/operations",
    "List operations",
    scopes=READERS,
    parameters=[
        Parameter("state", "query", "Only those in this state.", {"type": "string", "enum": list(STATES)}),
        *PAGE,
    ],
    answers={200: Shown("A page of operations, the newest first.", OperationShown, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """Newest first; pages stay the same whatever is added meanwhile."""
    limit, before = paging.limit_of(call.query), paging.id_before(call.query, "operations")
    state = paging.choice_of(call.query, "state", STATES)
    async with call.service.database.transaction(call.tenant) as connection:
        rows = await reading.operations(connection, call.tenant, state=state, before=before, limit=limit + 1)
    following = paging.cursor("operations", rows[limit - 1].id) if len(rows) > limit else None
    return Answer(200, paging.page(map(operation_shown, rows[:limit]), following))


@endpoint(
    "GET",
    "/v1/operations/{id}",
    "Show an operation",
    scopes=READERS,
    parameters=[ID],
    answers={200: Shown("The operation.", OperationShown)},
    problems=[NotFound],
)
async def show(call: Call) -> Answer:
    """Its attempts, the key it is sent under, what the provider guarantees, the digest of what was sent and the provider's own
    reference for it."""
    return await as_it_is_now(call, call.id())


async def as_it_is_now(call: Call, id: UUID) -> Answer:
    """An operation of the caller's tenant. Raises `NotFound`."""
    async with call.service.database.transaction(call.tenant) as connection:
        row = await reading.operation(connection, call.tenant, id)
    if row is None:
        raise nothing_here()
    return Answer(200, operation_shown(row))


ENDPOINTS = (index, show)
