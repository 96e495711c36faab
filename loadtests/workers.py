"""`python -m loadtests.workers`: what remote workers cost while they wait, and how soon a task is in their hands.

    idle       a hundred workers poll, and there is nothing to do: CPU of the server and of PostgreSQL with all its backends together,
               as a share of one core, and the same without any worker (target: the difference is below 5 %)
    one task   a task at a time and workers that wait: from the request for the decision to the worker having its task
    load       as many callers as there are places, each asking again as soon as it is answered: decisions/s, and from the task's
               being stored to its being claimed, on the database's clock

With one server process and with two, where half of what is asked for is found by another process than the one that the worker polls.
Embedded PostgreSQL with fsync on; callers and workers in this process, which do nothing but ask and answer. Exit code 1 if a target
is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.demo.launch import Process, package_environment, python_module
from coordinator.store.database import open_database
from coordinator.store.keys import create_key, tenant_named
from loadtests import meter, serve
from loadtests.load import percentile
from loadtests.machine import environment
from loadtests.world import World, world

IDLE_WORKERS = 100
IDLE_TARGET = 0.05
LOAD_WORKERS, PLACES = 16, 4
WAIT_S = 20
CLAIMED = """
SELECT extract(epoch FROM heartbeat_at - created_at) * 1000 FROM tasks WHERE state = 'completed' AND created_at > '{since}'
"""


class Service:
    """One server, called with one key by callers and workers of this process."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def post(self, path: str, body: object, **headers: str) -> Any:
        async with self._session.post(self._url + path, json=body, headers=headers) as response:
            return await response.json()

    async def decide(self, topic: int) -> Any:
        body = {"type": "research", "input": {"topic": topic}}
        return await self.post(
            "/v1/decisions", body, **{"Idempotency-Key": str(uuid7()), "Prefer": "wait=60"}
        )

    async def work(self, name: str, places: int, claimed: asyncio.Queue[float] | None = None) -> None:
        """A worker for ever: whatever it is given, it answers at once."""
        body = {"name": name, "capabilities": ["research"], "max_tasks": places}
        worker = await self.post("/v1/workers", body)
        while True:
            answer = await self.post(f"/v1/workers/{worker['id']}/claim?wait={WAIT_S}", {})
            if claimed is not None and answer["tasks"]:
                claimed.put_nowait(time.monotonic())
            for task in answer["tasks"]:
                found = {"fencing_token": task["fencing_token"], "result": task["request"]["input"]}
                await self.post(f"/v1/tasks/{task['id']}/complete", found)


@asynccontextmanager
async def working(
    service: Service, count: int, places: int, claimed: asyncio.Queue[float] | None = None
) -> AsyncIterator[None]:
    """So many workers, which have all begun to poll."""
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(service.work(f"w{n}", places, claimed)) for n in range(count)]
        await asyncio.sleep(1.0)
        yield
        for worker in workers:
            worker.cancel()


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of one core."""

    server: float
    postgres: float
    workers: int


async def idle(world: World, server: Process, service: Service, workers: int, seconds: float) -> Idle:
    async with working(service, workers, 3):
        pids = {"server": server.pid, "postgres": world.postgres.pid}
        before = {name: meter.cpu_seconds(pid) for name, pid in pids.items()}
        began = time.monotonic()
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - began
        used = {name: (meter.cpu_seconds(pid) - before[name]) / elapsed for name, pid in pids.items()}
    return Idle(**used, workers=workers)


async def one_at_a_time(service: Service, count: int) -> list[float]:
    """Milliseconds from each request to its worker's having the task."""
    claimed: asyncio.Queue[float] = asyncio.Queue()
    latencies = []
    async with working(service, 4, 1, claimed):
        for topic in range(count):
            asked = time.monotonic()
            decided = asyncio.ensure_future(service.decide(topic))
            latencies.append((await claimed.get() - asked) * 1000)
            await decided
    return latencies


async def load(world: World, service: Service, seconds: float) -> tuple[float, list[float], int]:
    """Decisions a second, claim latencies in ms, answers that are not commits."""
    [since] = world.sql("SELECT clock_timestamp()").splitlines()
    until = time.monotonic() + seconds
    done = errors = 0

    async def ask(number: int) -> None:
        nonlocal done, errors
        while time.monotonic() < until:
            answer = await service.decide(number)
            done += answer.get("status") == "committed"
            errors += answer.get("status") != "committed"

    async with working(service, LOAD_WORKERS, PLACES):
        began = time.monotonic()
        until = began + seconds
        await asyncio.gather(*(ask(n) for n in range(LOAD_WORKERS * PLACES)))
        elapsed = time.monotonic() - began
    latencies = [float(line) for line in world.sql(CLAIMED.format(since=since)).splitlines()]
    return done / elapsed, latencies, errors


@contextmanager
def served(world: World, processes: int) -> Iterator[Process]:
    env = {serve.DATABASE: world.postgres.url, serve.COORDINATOR: "loadtests.researched:coordinator"}
    command = python_module("loadtests.serve", str(processes))
    with Process(command, env={**package_environment(), **env}, log=world.folder / "workers.log") as server:
        yield server


async def working_key(url: str) -> str:
    connection = await asyncpg.connect(url)
    tenant = await tenant_named(connection, "workers", uuid7())
    await connection.close()
    async with open_database(url, Settings(pool_size=1)) as database, database.transaction(tenant) as inside:
        return await create_key(inside, tenant, uuid7(), "workers", ["decide", "work"])


async def measure(world: World, seconds: float) -> bool:
    key = await working_key(world.postgres.url)
    met = True
    for processes in (1, 2):
        with served(world, processes) as server:
            headers = {"Authorization": f"Bearer {key}"}
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
                service = Service(session, str(server.ready["url"]))
                nothing = 0.0
                for workers in (0, IDLE_WORKERS):
                    found = await idle(world, server, service, workers, seconds)
                    total = found.server + found.postgres
                    print(
                        f"{processes} processes, {workers:3} idle workers: {total:.1%} of a core "
                        f"(server {found.server:.1%}, PostgreSQL {found.postgres:.1%})"
                    )
                    met &= total - nothing < IDLE_TARGET
                    nothing = total
                alone = await one_at_a_time(service, 100)
                print(f"{processes} processes, one task: " + spread(alone))
                rate, latencies, errors = await load(world, service, seconds)
                print(
                    f"{processes} processes, {LOAD_WORKERS} workers with {PLACES} places: {rate:.0f} decisions/s, "
                    f"stored to claimed: {spread(latencies)}, errors {errors}"
                )
                met &= errors == 0
    return met


def spread(milliseconds: list[float]) -> str:
    p50, p95, p99 = (percentile(sorted(milliseconds), share) for share in (50, 95, 99))
    return f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    options.add_argument(
        "--data", type=Path, help="a folder on the disk that is meant; a temporary one if not given"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.data) as folder, world(Path(folder)) as made:
        print(environment(made))
        sys.exit(0 if asyncio.run(measure(made, given.seconds)) else 1)


if __name__ == "__main__":
    main()
