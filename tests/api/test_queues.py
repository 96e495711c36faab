"""`/v1/queues`: a class a line, of the caller's own (I14), in the order of configuration."""

from __future__ import annotations

from coordinator.config import DEFAULT_CLASSES
from tests.api.ordering import Ordering


def test_every_class_is_listed_with_its_limits(ordering: Ordering) -> None:
    page = ordering.client.get("/v1/queues").json
    assert [item["class"] for item in page["items"]] == list(DEFAULT_CLASSES)
    assert page["next_cursor"] is None
    for item in page["items"]:
        limits = DEFAULT_CLASSES[item["class"]]
        assert (item["weight"], item["queue_depth"]) == (limits.weight, limits.queue_depth)
        assert item["start_objective_ms"] == limits.start_objective_ms
        assert item["reserved"] >= limits.reserved
        assert (item["depth"], item["oldest_age_ms"], item["estimated_start_ms"]) == (0, 0, 0)


def test_queues_come_in_pages(ordering: Ordering) -> None:
    first = ordering.client.get("/v1/queues?limit=2").json
    rest = ordering.client.get(f"/v1/queues?limit=2&cursor={first['next_cursor']}").json
    names = [item["class"] for page in (first, rest) for item in page["items"]]
    assert (names, rest["next_cursor"]) == (list(DEFAULT_CLASSES), None)
    assert ordering.client.get("/v1/queues?cursor=x").code == "malformed-request"
