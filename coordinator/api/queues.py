"""`/v1/queues`: per class, what waits and runs, and when the next one would start."""

from __future__ import annotations

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Shown, endpoint
from coordinator.api.parameters import PAGE
from coordinator.api.views import encode
from coordinator.engine.queues import QueueView
from coordinator.errors import MalformedRequest


@endpoint(
    "GET",
    "/v1/queues",
    "List classes and what waits in them",
    scopes=READERS,
    parameters=PAGE,
    answers={200: Shown("Every class, in the order of configuration.", QueueView, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """The caller's own decisions, over all processes of the service. What waits of all tenants together is in the metrics."""
    limit, after = paging.limit_of(call.query), paging.index_after(call.query, "queues")
    first = 0 if after is None else after + 1
    queues = await call.service.queues(call.tenant)
    page = queues[first : first + limit]
    following = paging.cursor("queues", first + limit - 1) if len(queues) > first + limit else None
    return Answer(200, paging.page(map(encode, page), following))


ENDPOINTS = (index,)
