"""`/healthz`, `/readyz`, `/metrics`: for the orchestrator and for Prometheus. None asks for a key; none shows a tenant's data."""

from __future__ import annotations

import asyncio
import os
import time
from weakref import WeakKeyDictionary

import anyio.to_thread
import asyncpg
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from coordinator.api.answer import Answer
from coordinator.api.endpoint import Call, Shown, endpoint
from coordinator.errors import Draining, Overloaded
from coordinator.store.database import UNREACHABLE, Database
from coordinator.store.migrate import schema_current

CHECK_TIMEOUT_S = 2.0
REMEMBER_S = 1.0
METRICS_TYPE = (b"content-type", CONTENT_TYPE_LATEST.encode())

_checked: WeakKeyDictionary[Database, tuple[float, str | None]] = WeakKeyDictionary()


@endpoint("GET", "/healthz", "Is the process alive?", answers={200: Shown("It is.")})
async def alive(call: Call) -> Answer:
    """Answers as long as the process does."""
    return Answer(200, b'{"status":"ok"}')


@endpoint(
    "GET",
    "/readyz",
    "Can the service decide?",
    answers={200: Shown("It can.")},
    problems=[Draining, Overloaded],
)
async def ready(call: Call) -> Answer:
    """The database is reachable, its schema is current, and the service is not stopping."""
    if call.service.draining:
        raise Draining("The service is stopping.", retry_after_ms=1000)
    trouble = await _trouble(call.service.database)
    if trouble is not None:
        raise Overloaded(trouble, retry_after_ms=1000)
    return Answer(200, b'{"status":"ready"}')


async def _trouble(database: Database) -> str | None:
    """What keeps the database from being used; asked at most once a second, whoever calls."""
    remembered = _checked.get(database)
    if remembered is not None and remembered[0] > time.monotonic():
        return remembered[1]
    trouble: str | None
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S), database.pool.acquire() as connection:
            current = await schema_current(connection)
        trouble = None if current else "The database schema is not current; run coordinator migrate."
    except (*UNREACHABLE, asyncpg.PostgresError) as error:
        trouble = f"The database cannot be used: {type(error).__name__}."
    _checked[database] = (time.monotonic() + REMEMBER_S, trouble)
    return trouble


@endpoint(
    "GET",
    "/metrics",
    "Metrics",
    answers={
        200: Shown("The metrics of all processes that share this address.", media_type=CONTENT_TYPE_LATEST)
    },
)
async def metrics(call: Call) -> Answer:
    """Prometheus text. No label carries anything of a tenant."""
    return Answer(200, await anyio.to_thread.run_sync(_collected), content_type=METRICS_TYPE)


def _collected() -> bytes:
    """Of this process; of all its siblings too where they share a folder (PROMETHEUS_MULTIPROC_DIR)."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the package leaves this one untyped
    return generate_latest(registry)


ENDPOINTS = (alive, ready, metrics)
