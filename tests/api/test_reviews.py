"""Reviews over HTTP: who may review, which ETag, what is answered when somebody else was first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from tests.api.conftest import Running
from tests.api.serving import Client, Reply, new_key, quote
from tests.support.waiting import eventually_now


@pytest.fixture(scope="module")
def reviewer(running: Running) -> Client:
    return running.with_scopes("review")


def in_review(client: Client, *, key: str | None = None, **more: Any) -> Reply:
    made = client.decide(quote(site="reviewed") | more, key=key)
    assert (made.status, made.json["status"]) == (201, "in_review")
    return made


def review(
    client: Client,
    decision: Any,
    verdict: str = "approve",
    etag: str | None = '"1"',
    note: str = "",
    **more: Any,
) -> Reply:
    headers = [] if etag is None else [("If-Match", etag)]
    body = {"verdict": verdict, "note": note} | more
    return client.call("POST", f"/v1/decisions/{decision['id']}/review", body, headers)


def test_an_approval_on_the_etag_that_was_shown_commits_and_sends(client: Client, reviewer: Client) -> None:
    key, request = new_key(), quote(site="reviewed")
    made = client.decide(request, key=key)
    shown = reviewer.get(f"/v1/decisions/{made.json['id']}")
    assert shown.headers["etag"] == '"1"'
    assert shown.json["review"]["proposal"]["effects"][0]["payload"] == {"hours": 8}
    done = review(reviewer, made.json, etag=shown.headers["etag"], note="agreed")
    assert (done.status, done.json["status"]) == (200, "committed")
    assert "etag" not in done.headers
    assert done.json["review"]["verdict"]["note"] == "agreed"

    def sent() -> bool:
        (op,) = client.get(f"/v1/decisions/{made.json['id']}").json["operations"]
        return bool(op["state"] == "succeeded")

    eventually_now(sent, what="it was sent")
    again = client.decide(request, key=key)
    assert (again.status, again.body) == (200, made.body)
    kinds = [item["kind"] for item in client.get(f"/v1/receipts?decision={made.json['id']}").json["items"]]
    assert kinds.index("decision.approved") + 1 == kinds.index("decision.committed")


def test_a_rejection_declines_and_its_repeat_says_the_same(client: Client, reviewer: Client) -> None:
    made = in_review(client)
    first, again = (review(reviewer, made.json, "reject", note="too dear") for _ in range(2))
    assert (first.status, first.json["status"]) == (again.status, again.json["status"]) == (200, "declined")
    assert first.json["outcome"]["reason"] == "rejected in review: too dear"


def test_the_key_that_asked_is_told_that_it_may_not(client: Client) -> None:
    made = in_review(client)
    for verdict in ("approve", "reject"):
        told = review(client, made.json, verdict)
        assert (told.status, told.code) == (403, "own-request")
    assert client.get(f"/v1/decisions/{made.json['id']}").json["status"] == "in_review"


def test_a_verdict_needs_the_scope_and_a_precondition(
    running: Running, client: Client, reviewer: Client
) -> None:
    made = in_review(client)
    told = review(running.with_scopes("decide", "operate", "audit", "admin"), made.json)
    assert (told.status, told.code) == (403, "missing-scope")
    told = review(reviewer, made.json, etag=None)
    assert (told.status, told.code) == (428, "precondition-required")
    assert running.with_scopes("decide").get("/v1/reviews").code == "missing-scope"


@pytest.mark.parametrize("etag", ["1", "*", '"1", "2"', '"1', ""])
def test_an_if_match_that_is_not_one_entity_tag_is_malformed(
    client: Client, reviewer: Client, etag: str
) -> None:
    told = review(reviewer, in_review(client).json, etag=etag)
    assert (told.status, told.code) == (400, "malformed-request")


@pytest.mark.parametrize("etag", ['"0"', '"2"', '"abc"', 'W/"1"', '""'])
def test_another_etag_is_stale_and_the_present_one_is_told(
    client: Client, reviewer: Client, etag: str
) -> None:
    told = review(reviewer, in_review(client).json, etag=etag)
    assert (told.status, told.code, told.headers["etag"]) == (412, "stale-review", '"1"')
    assert told.json["etag"] == "1"


@pytest.mark.parametrize(
    "body",
    [{"verdict": "maybe"}, {"verdict": "approve", "extra": 1}, {"verdict": "reject", "note": "n" * 501}],
)
def test_a_verdict_that_is_none_is_malformed(client: Client, reviewer: Client, body: dict[str, Any]) -> None:
    id = in_review(client).json["id"]
    told = reviewer.call("POST", f"/v1/decisions/{id}/review", body, [("If-Match", '"1"')])
    assert (told.status, told.code) == (400, "malformed-request")


def test_another_tenants_review_and_none_at_all_look_alike(client: Client, stranger: Client) -> None:
    made = in_review(client).json
    absent = {"id": made["id"][:-12] + "0" * 12}
    for verdict in ("approve", "reject"):
        foreign, none = review(stranger, made, verdict), review(stranger, absent, verdict)
        assert (foreign.status, foreign.body) == (none.status, none.body)
        assert foreign.code == "not-found"
    assert stranger.get("/v1/reviews").json["items"] == []


def test_of_many_reviewers_at_once_one_wins(running: Running, client: Client) -> None:
    reviewers = [running.with_scopes("review") for _ in range(4)]
    made = in_review(client).json
    barrier = Barrier(4)

    def at_once(each: Client) -> Reply:
        barrier.wait(10)
        return review(each, made)

    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(at_once, reviewers))
    assert sorted(reply.status for reply in told) == [200, 412, 412, 412]
    assert {reply.code for reply in told if reply.status == 412} == {"stale-review"}
    kinds = [item["kind"] for item in client.get(f"/v1/receipts?decision={made['id']}").json["items"]]
    assert kinds.count("decision.committed") == kinds.count("decision.approved") == 1


def test_what_waits_is_listed_most_urgent_first_page_by_page(client: Client, reviewer: Client) -> None:
    made = {
        in_review(client, **{"class": class_}).json["id"]: class_
        for class_ in ("bulk", "urgent", "interactive")
    }
    listed: list[Any] = []
    cursor = ""
    while True:
        page = reviewer.get(f"/v1/reviews?limit=1{cursor}").json
        listed += page["items"]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    ours = [item for item in listed if item["id"] in made]
    assert [item["class"] for item in ours] == ["urgent", "interactive", "bulk"]
    order = [["urgent", "interactive", "bulk"].index(item["class"]) for item in listed]
    assert order == sorted(order)
    first = ours[0]
    assert (first["type"], first["reason"], first["approvable"]) == ("quote", "a site of its own", True)
    assert (first["terms"], first["etag"]) == ({"hours": 8}, "1")
    assert 0 <= first["age_ms"] < first["expires_in_ms"]
    assert reviewer.get("/v1/reviews?cursor=nonsense").code == "malformed-request"


def test_the_reviews_are_in_the_metrics(client: Client, reviewer: Client) -> None:
    review(reviewer, in_review(client).json, "reject")
    text = client.get("/metrics").body.decode()
    assert 'coordinator_reviews_total{type="quote",verdict="rejected"}' in text
    assert "coordinator_review_age_seconds_count" in text
    assert 'coordinator_reviews_open{type="quote"}' in text
