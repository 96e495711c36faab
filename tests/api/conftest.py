"""One server for each module of these tests, on a database of its own, with two tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.api.ordering import Ordering, serving_orders
from tests.api.serving import Client, server, tenant
from tests.support.postgres import Databases


@dataclass(frozen=True)
class Running:
    """``client`` has every scope; ``stranger`` too, in another tenant."""

    url: str
    address: str
    client: Client
    stranger: Client

    def with_scopes(self, *scopes: str) -> Client:
        """A client of the first tenant with a key of its own."""
        _, key = asyncio.run(tenant(self.url, "first", *scopes))
        return Client(self.address, key)


@pytest.fixture(scope="module")
def running(postgres: Databases) -> Iterator[Running]:
    url = postgres.create()
    keys = [asyncio.run(tenant(url, name))[1] for name in ("first", "second")]
    with server(url) as (address, _):
        yield Running(url, address, *(Client(address, key) for key in keys))
    postgres.drop(url)


@pytest.fixture(scope="module")
def client(running: Running) -> Client:
    return running.client


@pytest.fixture(scope="module")
def stranger(running: Running) -> Client:
    return running.stranger


@pytest.fixture(scope="module")
def ordering(postgres: Databases) -> Iterator[Ordering]:
    """Another server, whose decisions have effects at providers that misbehave on demand."""
    url = postgres.create()
    with serving_orders(url) as made:
        yield made
    postgres.drop(url)
