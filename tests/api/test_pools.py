"""`/v1/pools` over real HTTP."""

from __future__ import annotations

from typing import Any

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
