"""Calls inside their provider's pool: slots and turns are claimed and released in pairs (I15), and shared by whoever uses the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import asyncpg
import pytest

from coordinator import Coordinator, Evidence, Failed, Found, Pool, ReadRequest
from coordinator.core.rate import burst
from coordinator.engine.pools import Grant, Provider
from coordinator.errors import RateLimited
from tests.engine.harness import Fact, Gate, Number, Running, evidence_of, running, service_of
from tests.support import eventually
from tests.support.postgres import Databases, with_database

SYNCING = {"lease_ms": 3_000, "pool_poll_ms": 20}


@pytest.fixture
async def root(postgres: Databases, database_url: str) -> AsyncIterator[asyncpg.Connection]:
    name = database_url.rpartition("/")[2]
    connection = await asyncpg.connect(with_database(postgres.superuser_url, name))
    yield connection
    await connection.close()


def planned(source: Fact, *pools: Pool, units: int = 0, deadline_ms: int = 20_000) -> Coordinator:
    evidence = Evidence("a", source, deadline_ms=deadline_ms, units=units, attempts=1, required=False)
    coordinator = service_of(evidence)
    return Coordinator(list(coordinator.types.values()), pools=pools)


def provider_of(service: Running) -> Provider:
    return service.service._holdings.engine.providers.of("planner")


@asynccontextmanager
async def two(coordinator: Coordinator, url: str, **settings: Any) -> AsyncIterator[tuple[Running, Running]]:
    """Two services on one database, as two processes would be."""
    limits = {**SYNCING, "processes": 2, **settings}
    async with running(coordinator, url, **limits) as one, running(coordinator, url, **limits) as other:
        yield one, other


# Slots --------------------------------------------------------------------------------------------------------------------------


async def test_two_services_together_have_the_slots_of_the_pool_and_each_begins_with_half(
    database_url: str,
) -> None:
    gate = Gate()
    coordinator = planned(Fact("planner", gate.answering()), Pool("planner", concurrency=4))
    async with two(coordinator, database_url) as (one, other):
        await eventually(lambda: (provider_of(one).total, provider_of(other).total) == (2, 2))
        async with anyio.create_task_group() as tasks:
            for n in range(3):
                tasks.start_soon(one.post, f"one-{n}", n)
                tasks.start_soon(other.post, f"other-{n}", n)
            await eventually(lambda: gate.inside == 4)
            await eventually(lambda: provider_of(one).waiting + provider_of(other).waiting == 2)
            gate.open()


async def test_a_busy_service_uses_what_an_idle_one_leaves_and_gives_it_back_when_that_one_needs_it(
    database_url: str, root: asyncpg.Connection
) -> None:
    first, second = Gate(), Gate()

    async def read(request: ReadRequest, _: int) -> Found[Number]:
        await (first if request.input.value < 100 else second)()  # type: ignore[attr-defined]  # the input is an Ask
        return Found(Number(1))

    coordinator = planned(Fact("planner", read), Pool("planner", concurrency=6))
    async with two(coordinator, database_url) as (one, other), anyio.create_task_group() as tasks:
        await eventually(lambda: (provider_of(one).total, provider_of(other).total) == (3, 3))
        for n in range(8):
            tasks.start_soon(one.post, f"one-{n}", n)
        await eventually(lambda: first.inside == 5, what="all but the one that the idle service keeps ready")
        for n in range(8):
            tasks.start_soon(other.post, f"other-{n}", 100 + n)
        await eventually(lambda: second.inside == 1)
        first.open()
        await eventually(lambda: second.inside >= 3, what="its half came back")
        assert await root.fetchval("SELECT sum(slots) FROM pool_shares") <= 6
        second.open()


async def test_a_service_that_stops_leaves_its_slots_to_the_others_at_once(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    coordinator = planned(Fact("planner", gate.answering()), Pool("planner", concurrency=2))
    async with running(coordinator, database_url, processes=1, lease_ms=60_000) as stopping:
        await eventually(lambda: provider_of(stopping).total == 2)
    assert await root.fetchval("SELECT count(*) FROM pool_shares") == 0


async def test_slots_come_back_after_cancels_while_waiting_and_while_calling(database_url: str) -> None:
    provider = Provider("planner", 1)
    entered = asyncio.Event()

    async def call() -> None:
        async with provider.slot():
            entered.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await entered.wait()
        tasks.start_soon(call)
        await eventually(lambda: provider.waiting == 1)
        tasks.cancel_scope.cancel()
    assert (provider.busy, provider.waiting) == (0, 0)
    async with provider.slot():
        assert provider.busy == 1


async def test_a_call_that_is_cancelled_in_the_moment_of_its_turn_gives_it_on(database_url: str) -> None:
    provider = Provider("planner", 1)
    went: list[str] = []

    async def call(name: str) -> None:
        async with provider.slot():
            went.append(name)

    async with provider.slot():
        cancelled, next_ = asyncio.ensure_future(call("cancelled")), asyncio.ensure_future(call("next"))
        await eventually(lambda: provider.waiting == 2)
    cancelled.cancel()
    await asyncio.wait([cancelled, next_])
    assert (went, provider.busy, provider.waiting) == (["next"], 0, 0)


async def test_a_call_that_was_given_up_keeps_its_slot_for_as_long_as_it_may_linger() -> None:
    provider = Provider("planner", 1, lingers_ms=50)
    began = time.monotonic()
    with anyio.move_on_after(0.001):
        async with provider.slot():
            await anyio.sleep_forever()
    assert provider.busy == 1
    async with provider.slot():
        assert time.monotonic() - began >= 0.05


async def test_no_call_begins_once_the_lease_is_over() -> None:
    provider = Provider("planner", 1)
    provider.until = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02), provider.slot():
            raise AssertionError("it has no slot")
    assert (provider.busy, provider.waiting) == (0, 0)


async def test_without_a_declared_pool_the_database_knows_of_none(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with running(planned(Fact("planner")), database_url, **SYNCING) as service:
        assert (await service.decided())["status"] == "committed"
        assert provider_of(service).total == service.service.settings.provider_concurrency
    assert await root.fetchval("SELECT count(*) FROM pools") == 0


async def test_the_latest_declaration_of_a_pool_is_the_one_that_holds(
    database_url: str, root: asyncpg.Connection
) -> None:
    for limit in (4, 9):
        async with running(
            planned(Fact("planner"), Pool("planner", concurrency=limit)), database_url, **SYNCING
        ) as service:
            await eventually(lambda limit=limit: provider_of(service).total == limit)  # type: ignore[misc]  # bound now
    assert await root.fetchval("SELECT concurrency FROM pools") == 9


# Rates --------------------------------------------------------------------------------------------------------------------------


async def used(root: asyncpg.Connection) -> dict[str, int]:
    row = await root.fetchrow(
        "SELECT (SELECT sum(n::int) FROM json_array_elements_text(rates->'requests'->'used') AS n) AS requests,"
        " (SELECT sum(n::int) FROM json_array_elements_text(rates->'units'->'used') AS n) AS units FROM pools"
    )
    return dict(row)


async def test_a_reading_whose_turn_would_come_after_its_deadline_fails_at_once_and_is_not_made(
    database_url: str,
) -> None:
    source = Fact("planner")
    coordinator = planned(source, Pool("planner", requests_per_min=1), deadline_ms=10_000)
    async with running(coordinator, database_url, **SYNCING) as service:
        assert evidence_of(await service.decided("first"), "a")["state"] == "found"
        late = evidence_of(await service.decided("second"), "a")
    assert (late["state"], late["error"]["code"]) == ("failed", "rate-limited")
    assert late["elapsed_ms"] < 5_000
    assert source.reads == 1


async def test_readings_wait_for_the_rate_in_their_order_and_hold_no_slot_meanwhile(
    database_url: str,
) -> None:
    """A quarter of the minute goes at once; the next has to wait two seconds."""
    source = Fact("planner")
    coordinator = planned(source, Pool("planner", concurrency=9, requests_per_min=30))
    async with running(coordinator, database_url, **SYNCING) as service:
        async with anyio.create_task_group() as tasks:
            for n in range(burst(30) + 1):
                tasks.start_soon(service.post, f"k-{n}", n)
            await eventually(lambda: source.reads == burst(30))
            await eventually(lambda: (provider_of(service).waiting, provider_of(service).busy) == (1, 0))
        assert source.reads == burst(30) + 1


async def test_what_a_reading_really_used_corrects_its_estimate(
    database_url: str, root: asyncpg.Connection
) -> None:
    answers = [
        Found(Number(1), units=1),
        Found(Number(1), units=40),
        Found(Number(1)),
        Failed("no", "no", units=7),
    ]

    async def read(_: ReadRequest, n: int) -> Any:
        return answers[n - 1]

    coordinator = planned(Fact("planner", read), Pool("planner", units_per_min=1_000), units=10)
    async with running(coordinator, database_url, **SYNCING) as service:
        for n, so_far in enumerate((1, 41, 51, 58)):
            await service.decided(f"k-{n}")
            await eventually(lambda total=so_far: is_used(root, total))  # type: ignore[misc]  # bound now


async def is_used(root: asyncpg.Connection, units: int) -> bool:
    return (await used(root))["units"] == units


async def test_a_turn_that_comes_too_late_is_given_back_and_asked_for_again() -> None:
    """As when the process was paused between the grant and the call."""

    class Late:
        exhausted = False

        def __init__(self) -> None:
            self.given_back: list[Grant] = []

        def wanted(self) -> None:
            for waiting in provider.first():
                late = not self.given_back
                until = time.monotonic() + (-1 if late else 60)
                provider.begin(waiting, Grant(until, 7, waiting.units))

        def give_back(self, grant: Grant) -> None:
            self.given_back.append(grant)

        def correct(self, grant: Grant, units: int) -> None:
            raise AssertionError("as estimated")

    provider = Provider("planner", 1)
    provider.turns = turns = Late()
    async with provider.slot(units=3):
        assert provider.busy == 1
    assert [(grant.second, grant.units) for grant in turns.given_back] == [(7, 3)]
    assert (provider.busy, provider.waiting) == (0, 0)


async def test_a_turn_of_a_call_that_was_cancelled_meanwhile_is_not_used_up(
    database_url: str, root: asyncpg.Connection
) -> None:
    """The claim waits for a lock; by the time it has it, nobody wants the turn."""
    source = Fact("planner")
    coordinator = planned(source, Pool("planner", requests_per_min=100), deadline_ms=300)
    async with running(coordinator, database_url, **SYNCING) as service:
        await service.decided("first")
        async with root.transaction():
            await root.execute("SELECT FROM pools FOR UPDATE")
            assert evidence_of(await service.decided("second"), "a")["state"] == "timed_out"
        await eventually(lambda: is_requested(root, 1))
    assert source.reads == 1


async def is_requested(root: asyncpg.Connection, calls: int) -> bool:
    claims = await root.fetchval("SELECT claims FROM pools")
    return claims >= 3 and (await used(root))["requests"] == calls


async def test_the_error_names_the_provider() -> None:
    provider = Provider("planner", 1)
    provider.until = time.monotonic()

    async def call() -> None:
        with anyio.fail_after(5):
            async with provider.slot():
                raise AssertionError("it has no slot")

    task = asyncio.ensure_future(call())
    await eventually(lambda: provider.waiting == 1)
    provider.refuse_late(time.monotonic() + 60)
    with pytest.raises(RateLimited, match="planner"):
        await task
