"""Cancelling takes the whole tree along: nothing that a decision has begun outlives it (I15)."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import asyncpg
import msgspec
import pytest

from adapters.function import FunctionSource
from adapters.http import HttpSource
from coordinator import Coordinator, Decisive, Evidence, decision_type
from coordinator.core.canonical import JsonValue
from coordinator.core.decision import DecisionType
from coordinator.core.evidence import Answer, Failed, Found, ReadRequest
from coordinator.core.fairness import ClassLimits
from coordinator.demo.launch import Providers
from tests.engine.harness import Ask, Fact, Number, Running, Sent, running, sending, sum_up
from tests.support import eventually
from tests.support.census import Census, census, connections_to

CANCELLED, ASKED = 1_000, 1_100
"""Some are done before they can be cancelled."""
AT_ONCE = 50
ROOM = {"interactive": ClassLimits(weight=1, reserved=0, queue_depth=ASKED)}


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


class Asks(HttpSource[Capacity]):
    """Tells when it begins."""

    def __init__(self, name: str, url: str, inside: set[int]) -> None:
        super().__init__(name, url, returns=Capacity)
        self._inside = inside

    async def read(self, request: ReadRequest) -> Answer[Capacity]:
        self._inside.add(request.input.value)  # type: ignore[attr-defined]  # the input is an Ask
        return await super().read(request)


class World:
    """Decision types that never end by themselves, one for each thing that a decision may be doing when it is cancelled."""

    def __init__(self, providers: str) -> None:
        self.providers = providers
        self.inside: set[int] = set()
        self.release = threading.Event()
        self.to_clean = 0
        self.cleaned = 0
        planner, *costs = (
            Asks(name, f"{providers}/{name}/{{input.value}}", self.inside)
            for name in ("capacity", "costs", "customers")
        )
        self.thread = FunctionSource("thread", self._blocks, returns=Number, max_threads=AT_ONCE)
        self.types = [
            _type("http", planner),
            _type("many", *costs),
            _type("thread", self.thread),
            _type("function", FunctionSource("function", self._waits, returns=Number)),
            _type("backoff", Fact("backoff", self._fails)),
            _type("cleanup", Fact("cleanup", self._registers)),
            _type("locked", Fact("locked", self._sleeps), locks=["one", "{input.value}"]),
            _type("fence", Fact("fence", self._sleeps_the_second_time)),
        ]
        self.rare = [
            _type("quick", Fact("quick"), effects=[Sent()], policy=sending),
            _type("child", Fact("child", self._has_a_child)),
        ]

    def coordinator(self) -> Coordinator:
        return Coordinator([*self.types, *self.rare])

    def _blocks(self, input: Ask, evidence: Mapping[str, JsonValue]) -> Number:
        self.inside.add(input.value)
        self.release.wait(1)
        return Number(1)

    async def _waits(self, input: Ask, evidence: Mapping[str, JsonValue]) -> Number:
        self.inside.add(input.value)
        await anyio.sleep_forever()
        return Number(1)

    async def _sleeps(self, request: ReadRequest, _: int = 0) -> Found[Number]:
        self.inside.add(request.input.value)  # type: ignore[attr-defined]  # the input is an Ask
        await anyio.sleep_forever()
        return Found(Number(1))

    async def _sleeps_the_second_time(self, request: ReadRequest, _: int) -> Answer[Number]:
        return Found(Number(1), "1") if request.if_revision is None else await self._sleeps(request)

    async def _fails(self, request: ReadRequest, _: int) -> Answer[Number]:
        self.inside.add(request.input.value)  # type: ignore[attr-defined]  # the input is an Ask
        return Failed("busy", "come back", retryable=True, retry_after_ms=20_000)

    async def _registers(self, request: ReadRequest, _: int) -> Found[Number]:
        async def clean_up() -> None:
            await anyio.lowlevel.checkpoint()
            self.cleaned += 1

        request.on_cancel(clean_up)
        self.to_clean += 1
        return await self._sleeps(request)

    async def _has_a_child(self, request: ReadRequest, _: int) -> Found[Number]:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
        )

        async def end() -> None:
            child.kill()
            await child.wait()

        request.on_cancel(end)
        return await self._sleeps(request)


def _type(name: str, *sources: Any, policy: Any = sum_up, **more: Any) -> DecisionType[Ask, Any]:
    evidence = [
        Evidence(source.name, source, deadline_ms=60_000, freshness=Decisive(), attempts=3)
        for source in sources
    ]
    return decision_type(
        name,
        request=Ask,
        policy=policy,
        policy_version="1",
        evidence=evidence,
        time_limit_ms=120_000,
        **more,
    )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """With the demo's providers, which take every question and answer none."""
    async with Providers(tmp_path) as process:
        everything = {"/": {"hang": True}}
        async with aiohttp.request("PUT", f"{process.url}/control", json=everything) as answer:
            assert answer.status == 200
        yield World(process.url)


async def begun_and_cancelled(service: Running, world: World, n: int, chance: random.Random) -> str:
    """At once, after a few steps of everything else, or when it reads, or waits for a lock; what became of it."""
    declared = world.rare[n % 2] if n % 15 == 0 else world.types[n % len(world.types)]
    pending = await service.post(f"k-{n}", n, wait=0, type=declared.name)
    match chance.choice(["at-once", "a-few-steps", "under-way"]):
        case "a-few-steps":
            for _ in range(chance.randrange(60)):
                await anyio.lowlevel.checkpoint()
        case "under-way":
            runs = service.service._holdings.runs

            def well_under_way() -> bool:
                return n in world.inside or pending.id not in runs or runs[pending.id].waits_for is not None

            await eventually(well_under_way, interval=0.002)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
    said = json.loads(await service.service.cancel(service.caller, pending.id))
    return str(said["status"])


async def all_cancelled(service: Running, world: World, numbers: range) -> Counter[str]:
    chance, few = random.Random(7), anyio.CapacityLimiter(AT_ONCE)
    became: Counter[str] = Counter()

    async def one(n: int) -> None:
        async with few:
            became[await begun_and_cancelled(service, world, n, chance)] += 1

    async with anyio.create_task_group() as tasks:
        for n in numbers:
            tasks.start_soon(one, n)
    return became


def held(service: Running) -> dict[str, int]:
    """Everything that the service keeps of what runs in it."""
    holdings = service.service._holdings
    providers = holdings.engine.providers.by_name.values()
    return {
        "runs": len(holdings.runs) + len(holdings.answers) + len(holdings._decisions),
        "operations": len(holdings._operations),
        "class slots": holdings.schedule.shares.busy,
        "provider slots": sum(provider.busy + provider.waiting for provider in providers),
        "lines": len(holdings.engine.lines.by_name) + holdings.engine.lines.without_slot,
        "chains": len(holdings.engine.chains._chains),
        "waiting callers": len(holdings.awaited._waiting),
        "tasks of workers": len(holdings.engine.tasks.awaited),
    }


@pytest.mark.timeout(120)
async def test_a_thousand_cancelled_decisions_leave_nothing_behind(
    world: World, database_url: str, root: asyncpg.Connection
) -> None:
    outside = census()
    limits: dict[str, Any] = {"max_running": 30, "classes": ROOM, "provider_concurrency": 8}
    async with running(world.coordinator(), database_url, **limits) as service:
        await all_cancelled(service, world, range(-AT_ONCE, 0))
        await eventually(lambda: not any(held(service).values()), what="it has come to rest after warming up")
        await eventually(lambda: connections_to(world.providers) == 0)
        idle = census()
        became = await all_cancelled(service, world, range(ASKED))
        await eventually(lambda: not any(held(service).values()), what=f"nothing is held: {held(service)}")
        await eventually(lambda: connections_to(world.providers) == 0)
        await eventually(lambda: no_more(census(), idle))
        assert became["cancelled"] >= CANCELLED, became
        assert await root.fetchval("SELECT count(*) FROM locks WHERE decision_id IS NOT NULL") == 0
        assert (
            await root.fetchval("SELECT count(*) FROM decisions WHERE status IN ('queued', 'running')") == 0
        )
    world.release.set()
    await eventually(lambda: no_more(census(), outside))
    assert world.cleaned == world.to_clean
    assert world.thread.busy_threads == 0


@pytest.mark.timeout(120)
async def test_a_process_that_stops_takes_everything_along_that_still_runs(
    world: World, database_url: str
) -> None:
    outside = census()
    async with running(world.coordinator(), database_url, drain_s=0, classes=ROOM) as service:
        types = [*world.types, *world.rare]
        for n in range(60):
            await service.post(f"k-{n}", n, wait=0, type=types[n % len(types)].name)
        await eventually(lambda: len(world.inside) > 30)
    world.release.set()
    await eventually(lambda: no_more(census(), outside))
    assert world.cleaned == world.to_clean
    assert connections_to(world.providers) == 0


def no_more(now: Census, before: Census) -> bool:
    """A connection to the database may have been closed meanwhile, and something of the service's own may just have been going on."""
    assert now.tasks - before.tasks == Counter()
    assert now.threads - before.threads == Counter()
    assert now.children <= before.children
    assert now.files <= before.files
    assert now.sockets <= before.sockets
    return True
