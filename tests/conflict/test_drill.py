"""The conflict and crash suite, scenario by scenario: the same that `coordinator drill` runs, on a database with fsync on.

Checks I1, I2, I3, I5, I7, I8, I11 and I12 from outside, over client answers, the provider's ledger and what the service shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from coordinator.testing.conflicts import CONFLICTS, Scenario
from coordinator.testing.crashes import POINTS_TO_DIE_AT, killed_at
from coordinator.testing.world import World, own_world
from tests.support.postgres import Databases


@pytest.fixture(scope="module")
def shared_url(durable_postgres: Databases) -> Iterator[str]:
    url = durable_postgres.create()
    yield url
    durable_postgres.drop(url)


@pytest.fixture(scope="module")
async def world(shared_url: str) -> AsyncIterator[World]:
    async with own_world(shared_url) as entered:
        yield entered


@pytest.mark.parametrize("scenario", CONFLICTS, ids=lambda scenario: scenario.__name__)
async def test_conflict_is_decided_once(scenario: Scenario, world: World) -> None:
    verdict = await scenario(world)
    assert verdict.ok, (verdict.wrong, verdict.notes)


@pytest.mark.parametrize("point", POINTS_TO_DIE_AT)
async def test_killed_server_leaves_one_decision_and_one_effect(point: str, world: World) -> None:
    verdict = await killed_at(world, point)
    assert verdict.ok, (verdict.wrong, verdict.notes)
