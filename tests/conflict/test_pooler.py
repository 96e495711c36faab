"""The conflict scenarios behind PgBouncer in transaction mode: nothing may lean on what a session remembers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from coordinator.testing.conflicts import CONFLICTS, Scenario
from coordinator.testing.world import World, own_world
from tests.support.pgbouncer import PROGRAM, pgbouncer
from tests.support.postgres import Databases

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")


@pytest.fixture(scope="module")
def direct_url(durable_postgres: Databases) -> Iterator[str]:
    url = durable_postgres.create()
    yield url
    durable_postgres.drop(url)


@pytest.fixture(scope="module")
async def world(direct_url: str) -> AsyncIterator[World]:
    with pytest.MonkeyPatch.context() as environment, pgbouncer(direct_url, pool_size=5) as pooled:
        environment.setenv("COORDINATOR_STATEMENT_CACHE_SIZE", "0")
        async with own_world(direct_url, served_through=pooled) as entered:
            yield entered


@pytest.mark.parametrize("scenario", CONFLICTS, ids=lambda scenario: scenario.__name__)
async def test_conflict_is_decided_once_behind_a_pooler(scenario: Scenario, world: World) -> None:
    verdict = await scenario(world)
    assert verdict.ok, (verdict.wrong, verdict.notes)


async def test_no_transaction_is_left_open_behind_a_pooler(world: World, direct_url: str) -> None:
    """The servers are at work in the background: what is open for a moment is not left open."""
    connection = await asyncpg.connect(direct_url)
    left = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        " AND xact_start < clock_timestamp() - interval '2 s'"
    )
    try:
        assert await connection.fetchval(left) == 0
    finally:
        await connection.close()
