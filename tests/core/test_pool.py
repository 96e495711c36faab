"""A wrong pool is an error when the module loads, and names the user's line to mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator import Coordinator, Evidence, Pool, decision_type
from coordinator.core.pool import Limits
from coordinator.errors import DeclarationError
from tests.core.declaring import Capacity, FixedSink, FixedSource, Request, promise_nothing

HERE = Path(__file__).name


class Busy(FixedSink):
    provider = "sender"
    timeout_ms = 7_000


class Planner(FixedSource[Capacity]):
    provider = "planner"


def served(*pools: Pool, units: int = 0) -> Coordinator:
    planned = [
        Evidence("a", Planner(Capacity), deadline_ms=500, units=units),
        Evidence("b", Planner(Capacity), deadline_ms=900),
    ]
    quote = decision_type(
        "quote",
        request=Request,
        policy=promise_nothing,
        policy_version="1",
        evidence=planned,
        effects=[Busy("send")],
    )
    return Coordinator([quote], pools=pools)


def test_a_pool_limits_what_it_names_and_nothing_else() -> None:
    pool = Pool("planner", concurrency=20, requests_per_min=600)
    assert pool.limits == Limits(concurrency=20, requests_per_min=600)
    assert served(pool).pools == {"planner": pool}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "it limits nothing"),
        ({"concurrency": 0}, "concurrency must be within 1..10000, not 0"),
        ({"concurrency": True}, "concurrency must be within"),
        ({"requests_per_min": 0}, "requests_per_min must be within"),
        ({"units_per_min": -1}, "units_per_min must be within"),
        ({"concurrency": 1, "lingers_ms": -1}, "lingers_ms must be within"),
    ],
)
def test_a_limit_out_of_range_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(DeclarationError, match=f"pool 'planner': {why}") as error:
        Pool("planner", **wrong)
    assert error.value.where.startswith(HERE)


def test_a_pool_of_a_provider_that_nobody_calls_is_refused_at_its_own_line() -> None:
    pool = Pool("planer", concurrency=1)
    with pytest.raises(
        DeclarationError, match="nothing here calls a provider of this name, only planner, sender"
    ) as wrong:
        served(pool)
    assert wrong.value.where == pool.where


def test_a_provider_has_one_pool() -> None:
    with pytest.raises(DeclarationError, match="pool 'planner': it is declared twice"):
        served(Pool("planner", concurrency=1), Pool("planner", concurrency=1))


def test_a_reading_that_needs_more_units_than_a_minute_has_could_never_begin() -> None:
    with pytest.raises(DeclarationError, match="evidence 'a' is estimated at 101 units"):
        served(Pool("planner", units_per_min=100), units=101)
    served(Pool("planner", units_per_min=100), units=100)


def test_the_longest_call_of_a_provider_is_the_longest_of_its_sources_and_sinks() -> None:
    coordinator = served()
    assert coordinator.longest_call_ms("planner") == 900
    assert coordinator.longest_call_ms("sender") == 7_000
