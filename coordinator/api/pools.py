"""`/v1/pools`: the providers that this service calls, and how busy this process is with each."""

from __future__ import annotations

import time

import msgspec

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Shown, endpoint
from coordinator.api.parameters import PAGE
from coordinator.api.views import encode
from coordinator.core.breaker import BreakerState
from coordinator.engine.service import Service
from coordinator.errors import MalformedRequest


class PoolShown(msgspec.Struct, frozen=True, kw_only=True):
    """``busy`` of ``total`` calls are under way and ``waiting`` wait for one to end. ``breaker``: after failures in a row it is
    `open`, nothing is sent for a while, and then (`half-open`) one call is tried."""

    provider: str
    busy: int
    total: int
    waiting: int
    breaker: BreakerState


@endpoint(
    "GET",
    "/v1/pools",
    "List providers and the calls to them",
    scopes=READERS,
    parameters=PAGE,
    answers={200: Shown("Every provider of a declared source or sink, by name.", PoolShown, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """Of the process that answers, and of it alone: where several serve, each has limits and a circuit breaker of its own."""
    limit, after = paging.limit_of(call.query), paging.index_after(call.query, "pools")
    first = 0 if after is None else after + 1
    pools = _pools(call.service)
    page = pools[first : first + limit]
    following = paging.cursor("pools", first + limit - 1) if len(pools) > first + limit else None
    return Answer(200, paging.page(map(encode, page), following))


def _pools(service: Service) -> list[PoolShown]:
    called, now_ms = service.providers(), round(time.monotonic() * 1000)
    unused = [
        PoolShown(
            provider=name, busy=0, total=service.settings.provider_concurrency, waiting=0, breaker="closed"
        )
        for name in service.coordinator.providers - called.keys()
    ]
    used = [
        PoolShown(
            provider=name,
            busy=provider.busy,
            total=provider.total,
            waiting=provider.waiting,
            breaker=provider.breaker.state(now_ms),
        )
        for name, provider in called.items()
    ]
    return sorted(unused + used, key=lambda pool: pool.provider)


ENDPOINTS = (index,)
