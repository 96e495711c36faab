"""Limits of providers under load, `python -m loadtests.pools`: eight processes together, as the provider itself counts.

    crowded    20 calls at once are permitted and each takes 400 ms; 48 clients want more, over all processes
    takeover   one of the processes is killed meanwhile: how long until the others use its slots
    hurried    600 calls a minute are permitted; for two minutes, three times as many are wanted

The provider counts calls at once and calls in any 60 s; neither may ever exceed the limit. How much of the limit was used is the other
half: `at once` compares the calls that were made with those that fit the slots, `per minute` those of the second minute with the limit.
On a busy machine the first falls short because the processes do not get to ask. Ends with 1 if a limit was exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.demo.launch import Process, package_environment, python_module
from coordinator.engine.shares import MARGIN_MS
from loadtests import serve
from loadtests.machine import environment
from loadtests.pooled import CONCURRENCY, DEADLINE_MS, PER_MINUTE, coordinator
from loadtests.world import World, world

PROCESSES, CLIENTS = 8, 48
CALL_MS = 400
WARM_S = 5.0
OFFERED_PER_S = 3 * PER_MINUTE / 60
MINUTE_S = 60.0
DEAD = "SELECT slots FROM pool_shares WHERE provider = 'planner' AND expires_at <= clock_timestamp()"
TAKEN = f"""
SELECT FROM pool_shares WHERE provider = 'planner' AND expires_at > clock_timestamp() HAVING sum(slots) = {CONCURRENCY}
"""


class Run:
    """One server of eight processes, and its callers."""

    def __init__(self, made: World, server: Process, session: aiohttp.ClientSession) -> None:
        self.world = made
        self.server = server
        self.session = session
        self.exceeded: list[str] = []

    async def decide(self, type: str) -> None:
        """Ask for one decision; a process that is killed meanwhile gives none."""
        headers = {"Authorization": f"Bearer {self.world.key}", "Idempotency-Key": str(uuid7())}
        body = {"type": type, "input": {"subject": f"s-{uuid7()}"}}
        with suppress(aiohttp.ClientError):
            url = f"{self.server.ready['url']}/v1/decisions"
            async with self.session.post(url, json=body, headers=headers) as response:
                await response.read()

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[None]:
        """Each asks again as soon as it was answered."""

        async def client() -> None:
            while True:
                await self.decide("crowded")

        tasks = [asyncio.ensure_future(client()) for _ in range(CLIENTS)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def load(self, route: str, *, anew: bool = False) -> dict[str, int]:
        ask = self.session.delete if anew else self.session.get
        async with ask(f"{self.world.providers.url}/load") as response:
            items: list[dict[str, Any]] = (await response.json())["items"]
        return next(item for item in items if item["route"] == route)

    def children(self) -> list[int]:
        pid = self.server.pid
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def check(self, what: str, seen: int, limit: int) -> None:
        if seen > limit:
            self.exceeded.append(f"{what}: {seen} > {limit}")

    async def crowded(self, seconds: float, database: asyncpg.Connection) -> None:
        self.world.control({"/capacity": {"delay_ms": CALL_MS}})
        async with self.clients():
            await asyncio.sleep(WARM_S)
            await self.load("capacity", anew=True)
            await asyncio.sleep(seconds)
            seen = await self.load("capacity")
            fits = CONCURRENCY * seconds * 1000 / CALL_MS
            self.check("calls at once", seen["concurrent_max"], CONCURRENCY)
            print(
                f"crowded    at most {seen['concurrent_max']} of {CONCURRENCY} calls at once;"
                f" {seen['calls']} calls, {seen['calls'] / fits:.0%} of what fits in {seconds:.0f} s",
                flush=True,
            )
            await self._takeover(database)

    async def _takeover(self, database: asyncpg.Connection) -> None:
        os.kill(self.children()[0], signal.SIGKILL)
        began = time.monotonic()
        await until(database, DEAD)
        silent = time.monotonic() - began
        await until(database, TAKEN)
        took = time.monotonic() - began
        seen = await self.load("capacity")
        self.check("calls at once after a kill", seen["concurrent_max"], CONCURRENCY)
        longest = DEADLINE_MS + coordinator.pools["planner"].lingers_ms + MARGIN_MS
        print(
            f"takeover   its lease was over after {silent:.1f} s, others had its slots after {took:.1f} s;"
            f" a lease is {Settings().lease_ms} ms, the longest call {longest} ms;"
            f" at most {seen['concurrent_max']} of {CONCURRENCY} calls at once",
            flush=True,
        )

    async def hurried(self) -> None:
        self.world.control({})
        began = time.monotonic()
        asked: set[asyncio.Task[None]] = set()
        minutes: list[int] = []
        for minute in (1, 2):
            while (now := time.monotonic()) < began + minute * MINUTE_S:
                asked.add(task := asyncio.ensure_future(self.decide("hurried")))
                task.add_done_callback(asked.discard)
                await asyncio.sleep(max(0.0, now + 1 / OFFERED_PER_S - time.monotonic()))
            minutes.append((await self.load("costs"))["calls"] - sum(minutes))
        seen = await self.load("costs")
        self.check("calls per minute", seen["per_minute_max"], PER_MINUTE)
        print(
            f"hurried    at most {seen['per_minute_max']} of {PER_MINUTE} calls in any 60 s;"
            f" {minutes[0]} in the first minute, {minutes[1]} in the second: {minutes[1] / PER_MINUTE:.0%} of the limit",
            flush=True,
        )
        await asyncio.wait(asked)


async def until(database: asyncpg.Connection, query: str) -> None:
    """It finds something."""
    while not await database.fetch(query):  # noqa: ASYNC110 - other processes write it
        await asyncio.sleep(0.02)


async def measure(made: World, server: Process, only: Sequence[str], seconds: float) -> list[str]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # so that all processes get their part
    async with aiohttp.ClientSession(connector=connector) as session:
        run = Run(made, server, session)
        database = await asyncpg.connect(made.postgres.superuser_url, database=made.database)
        if "crowded" in only:
            await run.crowded(seconds, database)
        if "hurried" in only:
            await run.hurried()
        await database.close()
    return run.exceeded


def main() -> int:
    """0: no limit was exceeded."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.pools", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the first case (default 15)")
    parser.add_argument("--only", choices=("crowded", "hurried"), help="one of the cases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loadtests-") as folder, world(Path(folder)) as made:
        env = {
            serve.DATABASE: made.postgres.url,
            serve.PROVIDERS: made.providers.url,
            serve.COORDINATOR: "loadtests.pooled:coordinator",
            "COORDINATOR_POOL_SIZE": "4",
        }
        for name, value in environment(made).items():
            print(f"{name:12} {value}")
        command = python_module("loadtests.serve", str(PROCESSES))
        log = made.folder / "server.log"
        with Process(command, env={**package_environment(), **env}, log=log) as server:
            only = [options.only] if options.only else ["crowded", "hurried"]
            exceeded = asyncio.run(measure(made, server, only, options.seconds))
    for what in exceeded:
        print(f"EXCEEDED   {what}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
