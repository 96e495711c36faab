"""What users' policies, sources and sinks do wrong ends one decision or one operation, within its time, and never the service.

Checks I17.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator import Commit, Decline, Effect, Evidence, Outcome, Packet, Record, Review
from coordinator.core.evidence import ReadRequest
from tests.engine.harness import Ask, Fact, Sent, running, service_of


class Undescribable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even its own text can be had")


def leaves(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    raise SystemExit(3)


def undescribable(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    raise Undescribable


def without_a_reason(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    return Review(None) if ask.value else Decline(None)  # type: ignore[arg-type]  # what a user may do all the same


def huge(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    return Commit({"text": "x" * 2_000_000})


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (leaves, "policy-raised"),
        (undescribable, "policy-raised"),
        (without_a_reason, "policy-returned-junk"),
        (huge, "outcome-too-large"),
    ],
)
async def test_a_policy_that_misbehaves_fails_its_decision_and_the_service_goes_on(
    policy: Any, code: str, database_url: str
) -> None:
    async with running(service_of(policy=policy), database_url) as service:
        first, second = await service.decided("a"), await service.decided("b", 1)
    assert [first["outcome"]["code"], second["outcome"]["code"]] == [code, code]


async def test_what_a_policy_raised_is_found_in_the_users_file(database_url: str) -> None:
    async with running(service_of(policy=leaves), database_url) as service:
        decision = await service.decided()
    assert "leaves, test_misbehaviour.py:" in decision["outcome"]["reason"]


@pytest.mark.parametrize("error", [SystemExit(3), Undescribable()])
async def test_a_source_that_wants_to_end_the_process_is_a_failed_reading(
    error: BaseException, database_url: str
) -> None:
    async def raises(request: ReadRequest, n: int) -> Any:
        raise error

    optional = Evidence("fact", Fact("fact", raises), deadline_ms=1_000, required=False, attempts=1)
    async with running(service_of(optional, policy=lambda *_: Commit({})), database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed"
    assert decision["evidence"][0]["error"]["code"] == "source-raised"


async def test_the_time_limit_holds_where_nothing_awaits(database_url: str) -> None:
    """A policy computes; no cancellation reaches it, and what it concludes comes too late."""

    def slow(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        over = time.monotonic() + 0.3
        while time.monotonic() < over:
            pass
        return Commit({}, effects=[Effect("send", {})])

    sink = Sent()
    async with running(service_of(policy=slow, effects=[sink]), database_url) as service:
        decision = await service.decided(time_limit_ms=200)
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "time-limit")
    assert (decision["operations"], sink.sends) == ([], [])
