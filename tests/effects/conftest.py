"""The demo providers as a process of their own, without faults at the beginning of each test; and the database for a superuser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coordinator.demo.launch import Providers
from tests.effects.given import Outside
from tests.store.conftest import root, root_url
from tests.support.postgres import data_folder

__all__ = ["root", "root_url"]


@pytest.fixture(scope="module")
async def provider_process() -> AsyncIterator[Providers]:
    with data_folder() as folder:
        async with Providers(folder) as process:
            yield process


@pytest.fixture
async def outside(provider_process: Providers) -> AsyncIterator[Outside]:
    async with Outside.at(provider_process.url) as made:
        yield made
        await made.faults({})
