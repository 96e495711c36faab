"""`/v1/queues`: per class, what waits and runs, and when the next one would start."""

from __future__ import annotations

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Shown, endpoint
from coordinator.api.parameters import PAGE
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
    return Answer(200, paging.page_of_all(await call.service.queues(call.tenant), call.query, "queues"))


ENDPOINTS = (index,)
