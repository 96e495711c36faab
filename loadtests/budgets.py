"""Budgets under load, `python -m loadtests.budgets`: exactly what fits, at every moment, whoever is killed, and what it costs.

    last dollars   100 concurrent requests, each reserving S$0.30, for the last S$4.00: 13 are admitted, 87 are refused
    killed         20 clients spend erratically; the server is killed with SIGKILL and started again, several times
    hot            one budget that all decisions of a tenant draw on: decisions/s and transactions per decision, against the same
                   decisions without money

Meanwhile a sampler reads all periods again and again on a connection of its own. In each snapshot `held + uncertain + settled <=
ceiling + overage` has to hold, and what the periods say has to be what their reservations and overages add up to: the two are read
by one statement, so from one committed state. Ends with 1 if anything of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import aiohttp
import asyncpg
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.core.money import Money
from coordinator.demo.launch import Process, package_environment, python_module
from coordinator.store.budgets import NewBudget, set_budget
from coordinator.store.database import open_database
from loadtests import serve
from loadtests.cases import Row, http_row, plan_for
from loadtests.machine import environment
from loadtests.paid import RESERVED
from loadtests.world import World, world

REQUESTS, LAST_MINOR = 100, 400
CLIENTS = 20
KILLS, ALIVE_S = 3, 1.5
LEASE_MS = 1_000
PATIENCE_S = 30.0
SNAPSHOT = """
SELECT p.name, p.ceiling_minor, p.held, p.uncertain, p.settled, p.overage,
       coalesce(r.held, 0) AS r_held, coalesce(r.uncertain, 0) AS r_uncertain, coalesce(r.settled, 0) AS r_settled,
       (SELECT coalesce(sum(o.amount_minor), 0) FROM overages o
        WHERE o.tenant_id = p.tenant_id AND o.budget = p.name AND o.starts_at = p.starts_at) AS r_overage
FROM budget_periods p
LEFT JOIN LATERAL (
    SELECT sum(r.drawn_minor) FILTER (WHERE r.state = 'held') AS held,
           sum(r.drawn_minor) FILTER (WHERE r.state = 'uncertain') AS uncertain,
           sum(r.drawn_minor) FILTER (WHERE r.state IN ('settled', 'released')) AS settled
    FROM draws d JOIN reservations r ON r.tenant_id = d.tenant_id AND r.id = d.reservation_id
    WHERE d.tenant_id = p.tenant_id AND d.budget = p.name AND d.starts_at = p.starts_at
) r ON true
"""


class Sampler:
    """What was seen of the periods, and what of it may not be."""

    def __init__(self) -> None:
        self.snapshots = 0
        self.faults: list[str] = []
        self.latest: dict[str, asyncpg.Record] = {}

    async def look(self, connection: asyncpg.Connection) -> None:
        for row in await connection.fetch(SNAPSHOT):
            self.latest[row["name"]] = row
            if row["held"] + row["uncertain"] + row["settled"] > row["ceiling_minor"] + row["overage"]:
                self.faults.append(f"beyond its ceiling: {dict(row)}")
            parts = ("held", "uncertain", "settled", "overage")
            if any(row[part] != row[f"r_{part}"] for part in parts):
                self.faults.append(f"not what its reservations add up to: {dict(row)}")
        self.snapshots += 1

    def said(self, name: str) -> str:
        row = self.latest[name]
        parts = ("ceiling_minor", "held", "uncertain", "settled", "overage")
        return ", ".join(f"{part.removesuffix('_minor')} {row[part]}" for part in parts)


@asynccontextmanager
async def sampling(world: World, *, pause_s: float = 0) -> AsyncIterator[Sampler]:
    """Looks as often as it can, or after a pause, while the block lasts; and once more at its end."""
    url = urlunsplit(urlsplit(world.postgres.superuser_url)._replace(path=f"/{world.database}"))
    connection = await asyncpg.connect(url)
    sampler, over = Sampler(), asyncio.Event()

    async def forever() -> None:
        while not over.is_set():
            await sampler.look(connection)
            await asyncio.sleep(pause_s)

    looking = asyncio.create_task(forever())
    try:
        yield sampler
    finally:
        over.set()
        await looking
        await sampler.look(connection)
        await connection.close()


async def ceiling(world: World, name: str, amount_minor: int, provider: str) -> None:
    """A budget of its own for each case, by the provider that it pays."""
    tenant = UUID(world.tenant)
    budget = NewBudget(
        name=name,
        ceiling=Money(amount_minor, "SGD"),
        period="day",
        timezone="Asia/Singapore",
        provider=provider,
    )
    async with open_database(world.postgres.url, Settings(pool_size=1)) as database:
        await database.run(tenant, lambda connection: set_budget(connection, tenant, budget, uuid7()))


@contextmanager
def server(world: World) -> Iterator[Process]:
    env = {
        serve.DATABASE: world.postgres.url,
        serve.COORDINATOR: "loadtests.paid:coordinator",
        "COORDINATOR_LEASE_MS": str(LEASE_MS),
    }
    process = Process(
        python_module("loadtests.serve", "1"),
        env={**package_environment(), **env},
        log=world.folder / "paid.log",
    )
    with process as started:
        yield started


async def post(session: aiohttp.ClientSession, world: World, url: str, type: str, key: str) -> str:
    """The answer's status, or the error that came instead; with the code of a refusal."""
    headers = {"Authorization": f"Bearer {world.key}", "Idempotency-Key": key}
    body = {"type": type, "input": {"subject": key}}
    try:
        async with session.post(f"{url}/v1/decisions", json=body, headers=headers) as response:
            answer = json.loads(await response.read())
            return f"{response.status} {answer['code']}" if response.status >= 400 else str(response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type_name(error)


def type_name(error: Exception) -> str:
    return type(error).__name__


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE_S)
    ) as session:
        yield session


async def last_dollars(world: World) -> list[str]:
    await ceiling(world, "last-dollars", LAST_MINOR, "slow")
    with server(world) as process:
        async with sampling(world) as sampler, client() as session:
            url = str(process.ready["url"])
            answers = Counter(
                await asyncio.gather(
                    *(post(session, world, url, "slow", f"last-{n}") for n in range(REQUESTS))
                )
            )
    fits = LAST_MINOR // RESERVED
    expected = {"201": fits, "409 budget-exhausted": REQUESTS - fits}
    print(
        f"last dollars  {dict(answers)}; {sampler.said('last-dollars')}; {sampler.snapshots} snapshots",
        flush=True,
    )
    return sampler.faults + ([] if answers == expected else [f"last dollars: {answers}, not {expected}"])


async def killed(world: World) -> list[str]:
    await ceiling(world, "killed", 40_000, "erratic")
    answers: Counter[str] = Counter()
    async with sampling(world) as sampler, client() as session:
        for life in range(KILLS + 1):
            with server(world) as process:
                url = str(process.ready["url"])
                ending = asyncio.get_running_loop().time() + ALIVE_S
                spending = [
                    asyncio.create_task(_spend(session, world, url, f"{life}-{n}", ending, answers))
                    for n in range(CLIENTS)
                ]
                await asyncio.sleep(ALIVE_S * 0.8 if life < KILLS else 0)
                if life < KILLS:
                    await asyncio.to_thread(process.kill)
                await asyncio.gather(*spending)
                if life == KILLS:
                    await _all_at_rest(world)
        await asyncio.sleep(0)
    print(
        f"killed        {dict(answers)}; {sampler.said('killed')}; {sampler.snapshots} snapshots", flush=True
    )
    faults = sampler.faults
    if world.number("SELECT count(*) FROM reservations WHERE state = 'held'"):
        faults.append("killed: something is held although everything rests")
    if not world.number("SELECT count(*) FROM reservations WHERE reason = 'lease-expired'"):
        faults.append("killed: nothing was under way when the server was killed; the case shows nothing")
    return faults


async def _spend(
    session: aiohttp.ClientSession, world: World, url: str, prefix: str, until: float, answers: Counter[str]
) -> None:
    number = 0
    while asyncio.get_running_loop().time() < until:
        answer = await post(session, world, url, "erratic", f"killed-{prefix}-{number}")
        answers[answer] += 1
        number += 1
        if not answer[0].isdigit():
            return


async def _all_at_rest(world: World) -> None:
    """What the killed servers left is queued again and brought to rest by the last one."""
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(  # noqa: ASYNC110 - another process's rows: there is no event to wait for
            world.number, "SELECT count(*) FROM decisions WHERE status IN ('queued', 'running')"
        ):
            await asyncio.sleep(0.1)


async def hot(world: World, seconds: float, clients: int) -> list[str]:
    await ceiling(world, "hot", 2**50, "paid")
    rows: dict[str, list[Row]] = {"unpaid": [], "paid": []}
    with server(world) as process:
        async with sampling(world, pause_s=0.2) as sampler:  # it must not compete with what is measured
            for type in ("unpaid", "paid", "unpaid", "paid"):
                plan = plan_for(type, clients, seconds)
                row, _ = await asyncio.to_thread(http_row, world, process, "closed", plan)
                rows[type].append(row)
                print(_line(row), flush=True)
    rate = {type: sum(row.per_s for row in found) / len(found) for type, found in rows.items()}
    print(
        f"hot           paid/unpaid {rate['paid'] / rate['unpaid']:.2f}; {sampler.snapshots} snapshots",
        flush=True,
    )
    bad = [f"hot: {row.errors}" for found in rows.values() for row in found if row.errors]
    return sampler.faults + bad


def _line(row: Row) -> str:
    cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in row.cpu_ms.items() if name != "providers")
    return (
        f"hot           {row.type:6} {row.clients} clients: {row.per_s:.0f} decisions/s, p50 {row.p50:.0f} ms, p99 {row.p99:.0f} ms, "
        f"{row.tx:.3f} transactions and {row.wal_kb:.1f} kB WAL per decision; CPU ms per decision: {cpu}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.budgets", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement (default 5)")
    parser.add_argument("--clients", type=int, default=64, help="of the hot budget (default 64)")
    parser.add_argument(
        "--data", type=Path, help="a folder on the disk to measure (default: a temporary one)"
    )
    return parser.parse_args()


async def run(world: World, options: argparse.Namespace) -> list[str]:
    for name, value in environment(world).items():
        print(f"{name:13} {value}", flush=True)
    faults = await last_dollars(world)
    faults += await killed(world)
    faults += await hot(world, options.seconds, options.clients)
    return faults


def main() -> None:
    options = parse()
    with (
        tempfile.TemporaryDirectory(dir=options.data, ignore_cleanup_errors=True) as folder,
        world(Path(folder)) as made,
    ):
        faults = asyncio.run(run(made, options))
    for fault in faults[:10]:
        print(f"FAULT         {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
