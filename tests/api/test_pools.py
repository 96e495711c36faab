"""`/v1/pools` over real HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.api.pools import Here, shown
from coordinator.core.pool import Limits
from coordinator.engine.pooled import PoolNow
from coordinator.store.pools import PoolState
from tests.api.ordering import Ordering
from tests.support.waiting import eventually_now

NAMES = ["bank", "bank-refunds", "carrier", "mail"]


def pools(ordering: Ordering) -> dict[str, dict[str, Any]]:
    return {item["provider"]: item for item in ordering.client.get("/v1/pools").json["items"]}


def test_every_declared_provider_is_there_before_it_is_called(ordering: Ordering) -> None:
    answer = ordering.client.get("/v1/pools")
    assert answer.status == 200
    assert [item["provider"] for item in answer.json["items"]] == NAMES
    assert answer.json["next_cursor"] is None
    idle = {"busy": 0, "total": 64, "waiting": 0, "oldest_wait_ms": 0}
    no_rate = {"requests_per_min": None, "rate_left": None, "units_per_min": None, "units_left": None}
    unused = {"provider": "bank", "shared": False, "breaker": "closed", "resets_at": None, "here": idle}
    assert answer.json["items"][0] == {**idle, **no_rate, **unused}


def test_a_shared_pool_shows_what_all_processes_do_and_what_is_left_of_the_rate() -> None:
    limits = Limits(concurrency=20, requests_per_min=600)
    others = PoolState(
        limits=limits, busy=5, waiting=2, waited_ms=90, requests_left=7, units_left=None, resets_in_s=30.0
    )
    pool = PoolNow(provider="bank", busy=2, total=3, waiting=1, waited_ms=40, breaker="closed", others=others)
    seen = shown(pool)
    assert (seen.shared, seen.busy, seen.total, seen.waiting, seen.oldest_wait_ms) == (True, 7, 20, 3, 90)
    assert (seen.rate_left, seen.requests_per_min, seen.units_left) == (7, 600, None)
    assert seen.here == Here(busy=2, total=3, waiting=1, oldest_wait_ms=40)
    assert seen.resets_at is not None
    rated = msgspec.structs.replace(others, limits=Limits(requests_per_min=600))
    alone = shown(msgspec.structs.replace(pool, others=rated))
    assert (alone.shared, alone.busy, alone.total, alone.rate_left) == (False, 2, 3, 7)


def test_a_call_that_is_under_way_is_counted_until_it_ends(ordering: Ordering) -> None:
    ordering.faults(mail={"hang": True, "times": 1})
    decision = ordering.order("mail")
    eventually_now(lambda: pools(ordering)["mail"]["busy"] == 1)
    ordering.faults()
    ordering.once(decision, mail="succeeded")
    eventually_now(lambda: pools(ordering)["mail"]["busy"] == 0)


def test_a_provider_that_fails_again_and_again_is_left_alone_for_a_while(ordering: Ordering) -> None:
    ordering.faults(charge={"status": 500, "times": 5})
    for _ in range(5):
        ordering.once(ordering.order("charge"), charge="uncertain")
    assert pools(ordering)["bank"]["breaker"] == "open"
    assert pools(ordering)["carrier"]["breaker"] == "closed"
    eventually_now(lambda: pools(ordering)["bank"]["breaker"] == "half-open")
    ordering.once(ordering.order("charge"), charge="succeeded")
    assert pools(ordering)["bank"]["breaker"] == "closed"


def test_pools_come_in_pages(ordering: Ordering) -> None:
    names, cursor = [], ""
    while True:
        page = ordering.client.get(f"/v1/pools?limit=2{cursor}").json
        names += [item["provider"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert names == NAMES
    assert ordering.client.get("/v1/pools?cursor=x").code == "malformed-request"
