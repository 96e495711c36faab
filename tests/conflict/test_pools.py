"""Eight processes and one provider that counts for itself: never above its limits, whoever is killed or paused (I15)."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import pytest

from coordinator.core.rate import Rates, Window
from coordinator.demo.launch import Process, Providers, package_environment, python_module
from coordinator.store.database import NIL_TENANT
from tests.support import eventually
from tests.support.postgres import Databases, with_database

LIMIT = 12


class Counted:
    """The provider, and what it counted."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def load(self) -> Any:
        async with self._session.get(f"{self.url}/load") as answer:
            items = (await answer.json())["items"]
        return next((item for item in items if item["route"] == "capacity"), None)

    async def forget(self) -> None:
        async with self._session.delete(f"{self.url}/load") as answer:
            assert answer.status == 200

    async def takes(self, ms: int) -> None:
        """So long for each call."""
        async with self._session.put(f"{self.url}/control", json={"/capacity": {"delay_ms": ms}}) as answer:
            assert answer.status == 200

    async def is_used_up(self, *, by: int = LIMIT) -> None:
        """From now on, all of its slots are in use at some moment, and never more of them, and so many calls have come."""
        await self.forget()

        async def now() -> bool:
            load = await self.load()
            assert load is not None
            return bool(load["concurrent_max"] >= LIMIT and load["calls"] >= by)

        await eventually(now, 15)
        assert (await self.load())["concurrent_max"] == LIMIT


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[Counted]:
    async with Providers(tmp_path) as running, aiohttp.ClientSession() as session:
        yield Counted(session, running.url)


@pytest.fixture
def root_url(postgres: Databases, database_url: str) -> str:
    """The test's database for a superuser."""
    return with_database(postgres.superuser_url, database_url.rpartition("/")[2])


@pytest.fixture
async def root(root_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(root_url)
    yield connection
    await connection.close()


@pytest.fixture
async def barrier(root_url: str) -> AsyncIterator[Barrier]:
    connection = await asyncpg.connect(root_url)
    yield Barrier(connection)
    await connection.close()


class Barrier:
    """Holds the pool's row, in a session of its own, until others wait for it."""

    def __init__(self, session: asyncpg.Connection) -> None:
        self._session = session
        self._transaction = session.transaction()

    async def close(self) -> None:
        await self._transaction.start()
        await self._session.execute("SELECT FROM pools FOR UPDATE")

    async def open(self) -> None:
        await self._transaction.commit()


@contextmanager
def processes(database_url: str, provider: Counted, **options: Any) -> Iterator[list[int]]:
    """Eight of them; their pids."""
    given = {"database_url": database_url, "providers_url": provider.url, **options}
    command = python_module("tests.conflict.pool_processes", msgspec.json.encode(given).decode())
    with Process(command, env=package_environment()) as parent:
        pids: list[int] = parent.ready["pids"]
        try:
            yield pids
        finally:
            for pid in pids:
                signalled(pid, signal.SIGCONT)


def signalled(pid: int, number: signal.Signals) -> None:
    """It may be gone; its parent waits for it, so its pid is nobody else's yet."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


async def held(root: asyncpg.Connection) -> dict[str, int]:
    """Slots by process, of those that count."""
    rows = await root.fetch("SELECT process_id, slots FROM pool_shares WHERE frees_at > clock_timestamp()")
    return {str(row["process_id"]): row["slots"] for row in rows}


async def test_the_provider_never_sees_more_calls_than_it_permits_while_processes_die_pause_and_come_back(
    database_url: str, provider: Counted, root: asyncpg.Connection
) -> None:
    await provider.takes(100)
    with processes(database_url, provider, concurrency=LIMIT, deadline_ms=2_000, lingers_ms=0) as pids:
        await provider.is_used_up()
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        await eventually(
            lambda: gone(root, 2), 15, what="the shares of the dead and of the paused one were freed"
        )
        await provider.is_used_up()
        os.kill(pids[1], signal.SIGCONT)
        await eventually(lambda: holding(root, 7), what="the paused one holds slots again")
        assert (await provider.load())["concurrent_max"] == LIMIT
        await provider.is_used_up()
    assert (await provider.load())["concurrent_max"] == LIMIT


async def gone(root: asyncpg.Connection, count: int) -> bool:
    return len(await held(root)) == 8 - count


async def holding(root: asyncpg.Connection, count: int) -> bool:
    shares = await held(root)
    assert sum(shares.values()) <= LIMIT
    return len(shares) == count and min(shares.values()) > 0


async def test_the_slots_of_a_killed_process_come_back_only_when_its_calls_have_ended(
    database_url: str, provider: Counted, root: asyncpg.Connection
) -> None:
    """A call takes six leases, and the provider goes on with it though its caller is gone."""
    await provider.takes(100)
    with processes(
        database_url, provider, concurrency=LIMIT, lease_ms=300, deadline_ms=2_000, lingers_ms=2_000
    ) as pids:
        await provider.is_used_up()
        await provider.takes(1_900)
        await provider.is_used_up(by=2 * LIMIT)
        before = await held(root)
        os.kill(pids[0], signal.SIGKILL)
        await eventually(lambda: gone(root, 1), 15)
        await provider.is_used_up()
        assert sum((await held(root)).values()) == LIMIT == sum(before.values())
    assert (await provider.load())["concurrent_max"] == LIMIT


async def test_processes_that_claim_at_the_same_moment_do_not_claim_the_same_slots(
    database_url: str, provider: Counted, root: asyncpg.Connection, barrier: Barrier
) -> None:
    """The pool's row is locked until all eight wait for it."""
    await provider.takes(100)
    await declare(root, concurrency=LIMIT)
    await barrier.close()
    with processes(database_url, provider, concurrency=LIMIT):
        await eventually(lambda: waiting_for_a_lock(root, 8), 15)
        await barrier.open()
        await provider.is_used_up()
        assert sum((await held(root)).values()) <= LIMIT
    assert (await provider.load())["concurrent_max"] == LIMIT


async def test_a_process_that_is_stopped_with_the_pools_lock_in_its_hands_does_not_stop_the_others(
    database_url: str, provider: Counted, root: asyncpg.Connection, barrier: Barrier
) -> None:
    """It waits for the lock, is stopped, and gets it."""
    await provider.takes(100)
    with processes(database_url, provider, concurrency=LIMIT) as pids:
        await provider.is_used_up()
        await barrier.close()
        await eventually(lambda: waiting_for_a_lock(root, 8))
        os.kill(pids[0], signal.SIGSTOP)
        await barrier.open()
        await eventually(lambda: gone(root, 1))
        await provider.is_used_up()
    assert (await provider.load())["concurrent_max"] == LIMIT


async def test_with_fewer_slots_than_processes_each_of_them_gets_its_turn(
    database_url: str, provider: Counted, root: asyncpg.Connection
) -> None:
    await provider.takes(100)
    had: set[str] = set()

    async def everybody() -> bool:
        had.update(process for process, slots in (await held(root)).items() if slots)
        return len(had) == 8

    with processes(database_url, provider, concurrency=2, lease_ms=5_000):
        await eventually(everybody, 15)
    assert (await provider.load())["concurrent_max"] == 2


async def test_eight_processes_together_begin_no_more_calls_than_a_minute_has_left(
    database_url: str, provider: Counted, root: asyncpg.Connection, barrier: Barrier
) -> None:
    """Of a hundred, 88 have gone in this second; and all eight ask at the same moment."""
    await declare(root, requests_per_min=100)
    await root.execute("UPDATE pools SET rates = $1", await used(root, 88))
    await barrier.close()
    versions: set[str] = set()

    async def asked_again() -> bool:
        row = await root.fetchrow("SELECT rates, xmin::text FROM pools")
        versions.add(row["xmin"])
        return msgspec.json.decode(row["rates"], type=Rates).requests.left(100) == 0 and len(versions) > 12

    with processes(database_url, provider, requests_per_min=100):
        await eventually(lambda: waiting_for_a_lock(root, 8), 15)
        await barrier.open()
        await eventually(asked_again)
    assert (await provider.load())["per_minute_max"] == 12


async def used(root: asyncpg.Connection, count: int) -> str:
    """The window of a minute, of which so many have gone just now."""
    now = await root.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    window = Window(second=int(now), at=now, used=[count], level=100.0)
    return msgspec.json.encode(Rates(requests=window)).decode()


async def declare(root: asyncpg.Connection, **limits: int) -> None:
    """As the processes would."""
    names = ", ".join(limits)
    values = ", ".join(map(str, limits.values()))
    await root.execute(
        f"INSERT INTO pools (tenant_id, provider, {names}) VALUES ('{NIL_TENANT}', 'planner', {values})"
    )


async def waiting_for_a_lock(root: asyncpg.Connection, count: int) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    return int(await root.fetchval(query)) == count
