"""`/v1/pools`: the providers that this service calls, how busy it is with each, and what is left of each one's rate."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Shown, endpoint
from coordinator.api.parameters import PAGE
from coordinator.core.breaker import BreakerState
from coordinator.core.pool import Limits
from coordinator.core.view import timestamp
from coordinator.engine.pooled import PoolNow
from coordinator.errors import MalformedRequest, Overloaded


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """The process that answers: of ``total`` slots that it may use now it has ``busy`` under way."""

    busy: int
    total: int
    waiting: int
    oldest_wait_ms: int


class PoolShown(msgspec.Struct, frozen=True, kw_only=True):
    """``busy`` of ``total`` slots hold a call, and ``waiting`` calls wait for a slot or for the rate, the oldest for ``oldest_wait_ms``.

    If ``shared``, that is so over all processes (of the others, as they said at most a third of a lease ago), else in the one that
    answers: the provider has no declared limit of concurrency. ``rate_left`` of ``requests_per_min`` calls may still begin, and
    ``units_left`` of ``units_per_min`` be used, in the present minute; all of it is there again at ``resets_at``, null if it is.
    ``breaker`` of the process that answers: after failures in a row it is `open`, nothing is sent for a while, and then
    (`half-open`) one call is tried."""

    provider: str
    shared: bool
    busy: int
    total: int
    waiting: int
    oldest_wait_ms: int
    requests_per_min: int | None
    rate_left: int | None
    units_per_min: int | None
    units_left: int | None
    resets_at: str | None
    here: Here
    breaker: BreakerState


@endpoint(
    "GET",
    "/v1/pools",
    "List providers, the calls to them, and their rates",
    scopes=READERS,
    parameters=PAGE,
    answers={200: Shown("Every provider of a declared source or sink, by name.", PoolShown, page=True)},
    problems=[MalformedRequest, Overloaded],
)
async def index(call: Call) -> Answer:
    """A provider with a declared pool shows what all processes do; any other one, the process that answers."""
    pools = [shown(pool) for pool in await call.service.pools()]
    return Answer(200, paging.page_of_all(pools, call.query, "pools"))


def shown(pool: PoolNow) -> PoolShown:
    others, limits = pool.others, pool.others.limits if pool.others else Limits()
    shared = limits.concurrency is not None
    return PoolShown(
        provider=pool.provider,
        shared=shared,
        busy=pool.busy + (others.busy if others and shared else 0),
        total=limits.concurrency or pool.total,
        waiting=pool.waiting + (others.waiting if others and shared else 0),
        oldest_wait_ms=max(pool.waited_ms, others.waited_ms if others and shared else 0),
        requests_per_min=limits.requests_per_min,
        rate_left=others.requests_left if others else None,
        units_per_min=limits.units_per_min,
        units_left=others.units_left if others else None,
        resets_at=_at(others.resets_in_s) if others and others.resets_in_s else None,
        here=Here(busy=pool.busy, total=pool.total, waiting=pool.waiting, oldest_wait_ms=pool.waited_ms),
        breaker=pool.breaker,
    )


def _at(seconds: float) -> str:
    return timestamp(datetime.now(UTC) + timedelta(seconds=seconds))


ENDPOINTS = (index,)
