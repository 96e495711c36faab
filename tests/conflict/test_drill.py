"""The conflict and crash suite: the same that `coordinator drill` runs, on a database with fsync on.

Checks I1, I2, I3, I5, I6, I7, I8, I11 and I12 from outside, over client answers, the provider's ledger and what the service shows.
The crash sweep is played once, every point and every way to fail, at the first passing (the drill plays the second as well); each
test then judges one point.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from coordinator.failpoints import POINTS
from coordinator.testing.audit import Verdict
from coordinator.testing.conflicts import CONFLICTS, Scenario
from coordinator.testing.crashes import cases, sweep
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


@pytest.fixture(scope="module")
async def swept(world: World) -> list[Verdict]:
    return await sweep(world, cases(hits=[1]))


@pytest.mark.parametrize("scenario", CONFLICTS, ids=lambda scenario: scenario.__name__)
async def test_conflict_is_decided_once(scenario: Scenario, world: World) -> None:
    verdict = await scenario(world)
    assert verdict.ok, (verdict.wrong, verdict.notes)


@pytest.mark.timeout(300)  # the first of these waits for the whole sweep
@pytest.mark.parametrize("point", POINTS)
async def test_a_server_that_fails_anywhere_loses_doubles_and_leaves_open_nothing(
    point: str, swept: list[Verdict]
) -> None:
    (verdict,) = [verdict for verdict in swept if f" at {point}," in verdict.scenario]
    assert verdict.ok, (verdict.wrong, verdict.notes)
