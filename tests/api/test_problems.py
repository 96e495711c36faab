"""Problem documents: one table, one shape, and nothing told of what nobody expected."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import asyncpg
import pytest
from litestar.types import Scope

from coordinator.api.problems import TABLE, answer_to, refused, render
from coordinator.errors import (
    CommitUnknown,
    DecisionInFlight,
    MalformedRequest,
    MissingScope,
    QueueFull,
    RequestRefused,
    SchemaOutdated,
    StaleVersion,
    Unauthenticated,
)

SCOPE = cast(Scope, cast(Any, {"type": "http", "method": "GET", "path": "/v1/x", "headers": []}))


def leaves(kind: type[RequestRefused]) -> Iterator[type[RequestRefused]]:
    below = kind.__subclasses__()
    yield from [leaf for child in below for leaf in leaves(child)] if below else [kind]


@pytest.mark.parametrize("leaf", list(leaves(RequestRefused)))
def test_every_refusal_has_a_status_and_a_title(leaf: type[RequestRefused]) -> None:
    status, body = render(leaf("why"))
    problem = json.loads(body)
    assert 400 <= status < 600
    assert problem["status"] == status
    assert problem["code"] == leaf.code
    assert problem["retry"] == leaf.retry
    assert problem["detail"] == "why"
    assert problem["title"] == TABLE[leaf.code][1]


def test_no_two_codes_share_a_title() -> None:
    titles = [title for _, title in TABLE.values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(("milliseconds", "seconds"), [(1, b"1"), (1000, b"1"), (1001, b"2"), (0, b"0")])
def test_retry_after_is_whole_seconds_rounded_up(milliseconds: int, seconds: bytes) -> None:
    answer = refused(QueueFull("full", retry_after_ms=milliseconds))
    assert (b"retry-after", seconds) in answer.headers
    assert json.loads(answer.body)["retry_after_ms"] == milliseconds


def test_a_problem_of_a_decision_says_where_it_is() -> None:
    answer = refused(DecisionInFlight("busy", decision="0190", retry_after_ms=1000))
    assert (b"location", b"/v1/decisions/0190") in answer.headers
    assert json.loads(answer.body)["decision"] == "0190"


def test_extra_members_are_told() -> None:
    assert json.loads(refused(StaleVersion("moved", current_version=9)).body)["current_version"] == 9
    errors = json.loads(refused(MalformedRequest("bad", [("/a", "wrong")])).body)["errors"]
    assert errors == [{"pointer": "/a", "detail": "wrong"}]


def test_who_is_not_known_or_not_allowed_is_told_how_to_authenticate() -> None:
    assert (b"www-authenticate", b"Bearer") in refused(Unauthenticated("who?")).headers
    assert any(name == b"www-authenticate" for name, _ in refused(MissingScope("no")).headers)


def test_an_endless_detail_is_not_told_whole() -> None:
    assert len(refused(StaleVersion("x" * 100_000)).body) < 5000


def test_an_unexpected_error_tells_a_trace_id_and_logs_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = answer_to(SCOPE, RuntimeError("the password is hunter2"))
    problem = json.loads(answer.body)
    assert answer.status == 500
    assert problem["code"] == "internal-error"
    assert b"hunter2" not in answer.body
    assert problem["trace_id"] in caplog.text
    assert "hunter2" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommitUnknown("who knows"), "commit-unknown"),
        (SchemaOutdated("old"), "schema-outdated"),
        (asyncpg.ConnectionDoesNotExistError("gone"), "overloaded"),
        (ConnectionResetError(), "overloaded"),
    ],
)
def test_a_lost_database_is_a_503_that_may_be_repeated(error: Exception, code: str) -> None:
    answer = answer_to(SCOPE, error)
    assert answer.status == 503
    assert json.loads(answer.body)["code"] == code
    assert json.loads(answer.body)["retry"] == "same-key"
    assert (b"retry-after", b"1") in answer.headers
