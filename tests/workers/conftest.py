"""One server for each module of these tests, on a database of its own; its workers' leases are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres import Databases
from tests.workers.asking import Service, serving


@pytest.fixture(scope="module")
def service(postgres: Databases) -> Iterator[Service]:
    with serving(postgres) as made:
        yield made
