"""`python -m loadtests.admission`: what a flood does to others, and what overload does to everyone.

    flood      one tenant queues thousands of bulk decisions, then another one some hundreds; urgent ones of a third keep coming.
               Urgent decisions start as they do on an idle service (target: p99 at most twice that); the second tenant gets half of
               the class from then on (target: within 5 %); all of it is done as fast as first come first served would do it, which
               is measured by giving the service one tenant's queue after the other (target: at least 95 %)
    overload   three times as many requests a second as the slots can carry. Goodput is what was committed (target: at least 90 % of
               capacity), refusals are answered at once (target: p99 under 50 ms), memory stays flat, and what waited is compared
               with what it was told when it was queued

Slots are few and each decision holds one for a fixed time, so that slots, not this machine's cores, are what there is too little of.
One server process, embedded PostgreSQL with fsync on, callers in this process. Start is from sending the request to the beginning of
its gathering, as the decision's own timeline has it. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
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
from loadtests import serve
from loadtests.load import percentile
from loadtests.machine import environment
from loadtests.paced import GATE
from loadtests.world import World, fetch, world

SLOTS = 16
CLASSES = {
    "urgent": {"weight": 8, "reserved": 4, "queue_depth": 200},
    "interactive": {"weight": 4, "reserved": 0, "queue_depth": 64},
    "bulk": {"weight": 1, "reserved": 0, "queue_depth": 100_000},
}
TASK_MS = 100
URGENT_PER_S = 10.0
SENDERS = 32
ERROR_BUCKET = re.compile(
    rb'^coordinator_start_estimate_error_seconds_bucket\{class="interactive",le="([^"]+)"\} ([0-9.e+]+)$',
    re.MULTILINE,
)


class Caller:
    """A tenant's key, and what came of its requests."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tenant: str, key: str) -> None:
        self.tenant = tenant
        self._session = session
        self._url = f"{url}/v1/decisions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    async def ask(
        self, class_: str, ms: int, *, type: str = "paced", wait: bool = False
    ) -> tuple[int, float, Any]:
        """Status, seconds until the answer, and the answer."""
        body = {"type": type, "input": {"ms": ms}, "class": class_}
        headers = self._headers | {
            "Idempotency-Key": str(uuid7()),
            "Prefer": "wait=60" if wait else "respond-async",
        }
        began = time.perf_counter()
        async with self._session.post(self._url, data=msgspec.json.encode(body), headers=headers) as response:
            answer = msgspec.json.decode(await response.read())
            return response.status, time.perf_counter() - began, answer

    async def start_ms(self, class_: str) -> float:
        """How long one decision took from sending the request to its start."""
        sent = time.time()
        status, _, decision = await self.ask(class_, 1, wait=True)
        if status != 201:
            raise RuntimeError(f"an urgent decision was answered with {status}: {decision}")
        gather = next(stage for stage in decision["timeline"] if stage["stage"] == "gather")
        return (datetime.fromisoformat(gather["at"]).timestamp() - sent) * 1000


async def tenant_of(world: World, name: str) -> tuple[str, str]:
    connection = await asyncpg.connect(world.postgres.url)
    tenant = await tenant_named(connection, name, uuid7())
    await connection.close()
    async with (
        open_database(world.postgres.url, Settings()) as database,
        database.transaction(tenant) as inside,
    ):
        return str(tenant), await create_key(inside, tenant, uuid7(), name, ["decide"])


def server(world: World, gate: Path) -> AbstractContextManager[Process]:
    env = {
        serve.DATABASE: world.postgres.url,
        serve.COORDINATOR: "loadtests.paced:coordinator",
        GATE: str(gate),
        "COORDINATOR_MAX_RUNNING": str(SLOTS),
        "COORDINATOR_CLASSES": msgspec.json.encode(CLASSES).decode(),
    }
    return Process(
        python_module("loadtests.serve", "1"),
        env={**package_environment(), **env},
        log=world.folder / "server.log",
    )


class Verdicts:
    """Prints each figure with its target."""

    def __init__(self) -> None:
        self.missed = 0

    def say(self, what: str, figure: float, unit: str, met: bool, target: str) -> None:
        self.missed += not met
        print(f"  {what:<58} {figure:10.2f} {unit:<4} {target}: {'met' if met else 'MISSED'}", flush=True)


async def queue_up(caller: Caller, count: int) -> None:
    left = iter(range(count))

    async def sender() -> None:
        for _ in left:
            status, _, answer = await caller.ask("bulk", TASK_MS)
            if status != 202:
                raise RuntimeError(f"a bulk decision was answered with {status}: {answer}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(SENDERS):
            tasks.create_task(sender())


def committed(world: World, tenant: str = "") -> int:
    mine = f" AND tenant_id = '{tenant}'" if tenant else ""
    return world.number(
        f"SELECT count(*) FROM decisions WHERE type = 'paced' AND class = 'bulk' AND status = 'committed'{mine}"
    )


async def until(condition: Callable[[], bool], every_s: float = 0.2) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - another process makes it true
        await asyncio.sleep(every_s)


async def behind_the_gate(
    world: World, gate: Path, caller: Caller, counts: Sequence[tuple[Caller, int]]
) -> None:
    """Fill all slots with decisions that wait for the gate, and queue these behind them."""
    gate.unlink(missing_ok=True)
    for _ in range(SLOTS):
        await caller.ask("bulk", 0, type="holding")
    await until(
        lambda: (
            world.number("SELECT count(*) FROM decisions WHERE type = 'holding' AND status = 'running'")
            == SLOTS
        )
    )
    for one, count in counts:
        await queue_up(one, count)


async def drain_s(world: World, gate: Path, tenants: Sequence[tuple[str, int]]) -> float:
    """Seconds from opening the gate to the last one's rest."""
    before = committed(world)
    total = before + sum(count for _, count in tenants)
    began = time.perf_counter()
    gate.touch()
    await until(lambda: committed(world) >= total)
    return time.perf_counter() - began


async def urgent_starts(caller: Caller, until_done: asyncio.Event) -> list[float]:
    """One urgent decision every so often; an open loop, each counted."""
    starts: list[asyncio.Task[float]] = []
    due = time.perf_counter()
    while not until_done.is_set():
        starts.append(asyncio.create_task(caller.start_ms("urgent")))
        due += 1 / URGENT_PER_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return [await start for start in starts]


async def flood(world: World, url: str, gate: Path, size: int, verdicts: Verdicts) -> None:
    small = size // 5
    print(
        f"flood: {size} bulk decisions of one tenant, then {small} of another, {SLOTS} slots, {TASK_MS} ms each"
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        first, second, third = [
            Caller(session, url, *await tenant_of(world, name)) for name in ("flood", "modest", "urgent")
        ]
        idle = await idle_starts(third)
        await behind_the_gate(world, gate, third, [(first, size)])
        alone_first = await drain_s(world, gate, [(first.tenant, size)])
        await behind_the_gate(world, gate, third, [(second, small)])
        alone_second = await drain_s(world, gate, [(second.tenant, small)])

        await behind_the_gate(world, gate, third, [(first, size), (second, small)])
        before = {one.tenant: committed(world, one.tenant) for one in (first, second)}
        over = asyncio.Event()
        urgent = asyncio.create_task(urgent_starts(third, over))
        shares = asyncio.create_task(share_while_both_wait(world, second.tenant, first.tenant, before, small))
        together = await drain_s(world, gate, [(first.tenant, size), (second.tenant, small)])
        over.set()
        under_load, share = sorted(await urgent), await shares
    report_flood(verdicts, idle, under_load, share, (alone_first + alone_second) / together)
    print(
        f"  one queue after the other {alone_first:.1f} + {alone_second:.1f} s, both at once with urgent ones {together:.1f} s"
    )


async def idle_starts(caller: Caller) -> list[float]:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(15.0, over.set)
    return sorted(await urgent_starts(caller, over))


async def share_while_both_wait(
    world: World, small: str, flood: str, before: dict[str, int], count: int
) -> float:
    """The smaller tenant's part of what was done when nine tenths of its queue were through."""
    goal = before[small] + count * 9 // 10
    await until(lambda: committed(world, small) >= goal, 0.02)
    done = {tenant: committed(world, tenant) - before[tenant] for tenant in (small, flood)}
    return done[small] / sum(done.values())


def report_flood(
    verdicts: Verdicts, idle: Sequence[float], loaded: Sequence[float], share: float, throughput: float
) -> None:
    for name, starts in (("idle", idle), ("in the flood", loaded)):
        figures = ", ".join(f"p{p} {percentile(starts, p):.1f}" for p in (50, 95, 99))
        print(f"  urgent start {name:<14} {figures} ms (of {len(starts)})")
    ratio = percentile(loaded, 99) / percentile(idle, 99)
    verdicts.say("urgent p99 start, in the flood over idle", ratio, "x", ratio <= 2, "at most 2")
    verdicts.say(
        "part of the class of the tenant that came second",
        100 * share,
        "%",
        abs(share - 0.5) <= 0.025,
        "50 +- 2.5",
    )
    verdicts.say(
        "throughput over first come first served", 100 * throughput, "%", throughput >= 0.95, "at least 95"
    )


async def overload(world: World, url: str, pid: int, seconds: float, verdicts: Verdicts) -> None:
    capacity = SLOTS / (TASK_MS / 1000)
    rate = 3 * capacity
    print(
        f"overload: {rate:.0f} requests/s for {seconds:.0f} s; {SLOTS} slots of {TASK_MS} ms carry {capacity:.0f}/s at most"
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        caller = Caller(session, url, *await tenant_of(world, "overload"))
        reached = await closed_loop(caller, min(10.0, seconds))
        print(f"  capacity in a closed loop of {2 * SLOTS} callers: {reached:.0f}/s")
        memory = [resident_mb(pid)]
        asked: list[asyncio.Task[tuple[int, float, Any]]] = []
        began = due = time.perf_counter()
        while due < began + seconds:
            asked.append(asyncio.create_task(caller.ask("interactive", TASK_MS, wait=True)))
            due += 1 / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            if len(asked) % int(rate) == 0:
                memory.append(resident_mb(pid))
        answers = [await one for one in asked]
        elapsed = time.perf_counter() - began
    statuses = Counter(status for status, _, _ in answers)
    refusals = sorted(took * 1000 for status, took, _ in answers if status == 429)
    goodput = statuses[201] / elapsed
    print(
        f"  answers {dict(statuses)}; refusals p50 {percentile(refusals, 50):.1f}, p99 {percentile(refusals, 99):.1f} ms"
    )
    print(f"  memory of the server: {', '.join(f'{mb:.0f}' for mb in memory)} MB")
    verdicts.say(
        "goodput over capacity", 100 * goodput / reached, "%", goodput >= 0.9 * reached, "at least 90"
    )
    verdicts.say("refusals, p99", percentile(refusals, 99), "ms", percentile(refusals, 99) < 50, "under 50")
    half = len(memory) // 2
    growth = max(memory[half:]) - max(memory[:half])
    verdicts.say("growth of memory in the second half", growth, "MB", growth < 10, "under 10")
    others = len(answers) - statuses[201] - statuses[429]
    verdicts.say("answers that are neither a decision nor a refusal", others, "", others == 0, "none")
    print("  by how much the estimated start was wrong, of what had to wait: " + errors(url))


async def closed_loop(caller: Caller, seconds: float) -> float:
    done = 0
    over = time.perf_counter() + seconds

    async def one() -> None:
        nonlocal done
        while time.perf_counter() < over:
            status, _, _ = await caller.ask("interactive", TASK_MS, wait=True)
            done += status == 201

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2 * SLOTS):
            tasks.create_task(one())
    return done / (time.perf_counter() - began)


def errors(url: str) -> str:
    buckets = [(le.decode(), float(count)) for le, count in ERROR_BUCKET.findall(fetch(f"{url}/metrics"))]
    total = buckets[-1][1] if buckets else 0.0
    told = [
        f"{100 * count / total:.0f} % within {le} s"
        for le, count in buckets
        if le in ("0.025", "0.1", "0.25", "0.5", "1.0", "2.5")
    ]
    return ", ".join(told) + f" (of {total:.0f})" if total else "nothing waited"


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.admission", description=__doc__)
    parser.add_argument(
        "--size", type=int, default=10_000, help="bulk decisions in the flood (default 10000)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the overload (default 20)")
    options = parser.parse_args()
    verdicts = Verdicts()
    with tempfile.TemporaryDirectory(prefix="loadtests-") as folder, world(Path(folder)) as made:
        for name, value in environment(made).items():
            print(f"{name}: {value}")
        gate = Path(folder) / "gate"
        with server(made, gate) as process:
            url = process.ready["url"]
            asyncio.run(flood(made, url, gate, options.size, verdicts))
            asyncio.run(overload(made, url, process.pid, options.seconds, verdicts))
    return 1 if verdicts.missed else 0


if __name__ == "__main__":
    sys.exit(main())
