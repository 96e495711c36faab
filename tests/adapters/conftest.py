"""Every test leaves with its loop's HTTP sessions and database pools closed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from adapters.client import close_clients
from adapters.postgres import close_pools


@pytest.fixture(autouse=True)
async def closes_what_it_opened(anyio_backend: str) -> AsyncIterator[None]:
    yield
    await close_clients()
    await close_pools()
