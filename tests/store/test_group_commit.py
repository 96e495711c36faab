"""Group commit: calls ride together, fall alone, and always learn what became of them; nothing waits without bound (I1, I16)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

import anyio
import asyncpg
import pytest

from coordinator.config import Settings
from coordinator.core.receipt import Receipt, receipt
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store import admit, log
from coordinator.store.admit import Admitted
from coordinator.store.database import Connection, Database, open_database
from coordinator.store.group_commit import GroupCommit
from tests.store.given import admission, kinds_of
from tests.store.proxy import Proxy, proxy
from tests.support import eventually

IN_FLIGHT = 1
"""How many transactions of a kind a tenant has at once."""


class Notes:
    """Work for a group commit: writes each text as a receipt; keeps who rode together; the first transactions wait at a gate."""

    def __init__(self, *, gated: int = 0) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self._gated = gated

    async def __call__(self, connection: Connection, tenant: UUID, items: Sequence[str]) -> Sequence[str]:
        self.batches.append(list(items))
        if len(self.batches) <= self._gated:
            await self.gate.wait()
        await log.append(connection, tenant, [self._written(text) for text in items])
        return [text.upper() for text in items]

    def _written(self, text: str) -> Receipt:
        if text == "raises":
            raise ZeroDivisionError("this one item cannot be rendered")
        return receipt(text, decision_id=None)


@asynccontextmanager
async def behind_proxy(url: str, work: Notes) -> AsyncIterator[tuple[Proxy, GroupCommit[str, str]]]:
    async with (
        proxy(url) as network,
        open_database(network.url, Settings(pool_size=4)) as database,
        grouping(database, work) as group,
    ):
        yield network, group


@asynccontextmanager
async def grouping(
    database: Database, work: Notes, *, max_batch: int = 100, bound: int = 100
) -> AsyncIterator[GroupCommit[str, str]]:
    async with anyio.create_task_group() as tasks:
        yield GroupCommit("test", database, tasks, work, max_batch=max_batch, bound=bound)


def submit(group: GroupCommit[str, str], tenant: UUID, *texts: str) -> list[asyncio.Future[str]]:
    return [asyncio.ensure_future(group.submit(tenant, text)) for text in texts]


async def in_flight(notes: Notes, transactions: int) -> None:
    await eventually(lambda: len(notes.batches) == transactions, what="the transactions are in flight")


async def one_in_flight(
    group: GroupCommit[str, str], tenant: UUID, notes: Notes
) -> list[asyncio.Future[str]]:
    """As many transactions as a tenant may have at once, waiting at the gate."""
    first: list[asyncio.Future[str]] = []
    for number in range(IN_FLIGHT):
        first += submit(group, tenant, f"first{number}")
        await in_flight(notes, number + 1)
    return first


async def test_calls_that_arrive_while_one_is_in_flight_ride_the_next_together(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    notes = Notes(gated=IN_FLIGHT)
    async with grouping(database, notes) as group:
        first = await one_in_flight(group, tenant, notes)
        later = submit(group, tenant, *(f"later{n}" for n in range(20)))
        await eventually(lambda: group.depth == 20, what="all of them wait")
        assert len(notes.batches) == IN_FLIGHT
        notes.gate.set()
        assert await asyncio.gather(*first, *later) == [
            *(f"FIRST{number}" for number in range(IN_FLIGHT)),
            *(f"LATER{n}" for n in range(20)),
        ]
    assert notes.batches[IN_FLIGHT:] == [[f"later{n}" for n in range(20)]]
    assert len(await kinds_of(root, tenant)) == IN_FLIGHT + 20
    assert group.depth == 0


async def test_a_lone_call_is_committed_at_once(database: Database, tenant: UUID) -> None:
    notes = Notes()
    async with grouping(database, notes) as group:
        assert await group.submit(tenant, "alone") == "ALONE"
    assert notes.batches == [["alone"]]


async def test_no_transaction_is_larger_than_its_limit(database: Database, tenant: UUID) -> None:
    notes = Notes(gated=IN_FLIGHT)
    async with grouping(database, notes, max_batch=8) as group:
        calls = await one_in_flight(group, tenant, notes)
        calls += submit(group, tenant, *(f"later{n}" for n in range(20)))
        await eventually(lambda: group.depth == 20)
        notes.gate.set()
        await asyncio.gather(*calls)
    assert sorted(len(batch) for batch in notes.batches[IN_FLIGHT:]) == [4, 8, 8]


async def test_tenants_never_share_a_transaction_nor_wait_for_each_other(
    database: Database, tenant: UUID, stranger: UUID
) -> None:
    notes = Notes(gated=IN_FLIGHT)
    async with grouping(database, notes) as group:
        blocked = await one_in_flight(group, tenant, notes)
        assert await group.submit(stranger, "theirs") == "THEIRS"
        notes.gate.set()
        await asyncio.gather(*blocked)


@pytest.mark.parametrize(
    ("poison", "error"),
    [
        ("a NUL \x00 in it", asyncpg.CharacterNotInRepertoireError),
        ("a lone surrogate \ud800 in it", asyncpg.DataError),
        ("raises", ZeroDivisionError),
    ],
)
async def test_a_poison_row_fails_alone_and_its_neighbours_succeed(
    poison: str, error: type[Exception], database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    notes = Notes(gated=IN_FLIGHT)
    async with grouping(database, notes) as group:
        first = await one_in_flight(group, tenant, notes)
        calls = submit(group, tenant, "before", poison, "after")
        await eventually(lambda: group.depth == 3)
        notes.gate.set()
        before, fallen, after = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*first)
    assert (before, after) == ("BEFORE", "AFTER")
    assert isinstance(fallen, error)
    assert sorted(await kinds_of(root, tenant)) == ["after", "before", "first0"]


async def test_a_row_that_a_check_refuses_fails_alone(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    """Through the real admission: a fingerprint that is too short, and an idempotency key with a space."""
    good, bad, worse = admission("good"), admission("bad", fingerprint=b"f"), admission("not one word")
    async with anyio.create_task_group() as tasks:
        group = GroupCommit("admit", database, tasks, admit.admit, max_batch=10, bound=100)
        futures = [asyncio.ensure_future(group.submit(tenant, item)) for item in (good, bad, worse)]
        stored, *refused = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(stored, Admitted)
    assert [type(error) for error in refused] == [asyncpg.CheckViolationError] * 2
    assert [row["id"] for row in await root.fetch("SELECT id FROM decisions")] == [good.id]
    assert await kinds_of(root, tenant) == ["decision.running"]


async def test_a_cancelled_caller_does_not_take_its_neighbours_commit_with_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    notes = Notes(gated=IN_FLIGHT + 1)
    async with grouping(database, notes) as group:
        first = await one_in_flight(group, tenant, notes)
        calls = submit(group, tenant, "impatient", "patient")
        await eventually(lambda: group.depth == 2)
        calls[0].cancel()
        notes.gate.set()
        assert await calls[1] == "PATIENT"
        await asyncio.gather(*first)
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
    assert "impatient" in await kinds_of(root, tenant), "it was promised to the transaction already"


async def test_beyond_the_bound_new_calls_are_refused_at_once_and_promised_ones_are_not(
    database: Database, tenant: UUID
) -> None:
    notes = Notes(gated=IN_FLIGHT)
    async with grouping(database, notes, bound=3) as group:
        calls = await one_in_flight(group, tenant, notes)
        calls += submit(group, tenant, "one", "two", "three")
        await eventually(lambda: group.depth == 3)
        with pytest.raises(Overloaded) as refused:
            await group.submit(tenant, "four", must=False)
        assert refused.value.extra["retry_after_ms"] == 500
        calls += submit(group, tenant, "promised")
        await eventually(lambda: group.depth == 4)
        notes.gate.set()
        assert (await asyncio.gather(*calls))[-1] == "PROMISED"
        assert await group.submit(tenant, "five", must=False) == "FIVE"


@pytest.mark.parametrize("commit", ["arrives", "is lost"])
async def test_every_caller_learns_that_a_commit_is_unknown(
    commit: str, database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    notes = Notes(gated=IN_FLIGHT)
    async with behind_proxy(database_url, notes) as (network, group):
        first = await one_in_flight(group, tenant, notes)
        calls = submit(group, tenant, *(f"later{n}" for n in range(5)))
        await eventually(lambda: group.depth == 5)
        if commit == "arrives":
            network.answers_to_lose = IN_FLIGHT + 1
        else:
            network.commits_to_lose = IN_FLIGHT + 1
        notes.gate.set()
        results = await asyncio.gather(*first, *calls, return_exceptions=True)
        assert {type(result) for result in results} == {CommitUnknown}
        assert await group.submit(tenant, "afterwards") == "AFTERWARDS"
    assert len(await kinds_of(root, tenant)) == (len(results) + 1 if commit == "arrives" else 1)
    assert len(notes.batches) == IN_FLIGHT + 2, "nothing was run a second time"


async def test_a_connection_lost_before_commit_is_a_database_that_is_away_not_a_poison_row(
    database_url: str, tenant: UUID, root: asyncpg.Connection
) -> None:
    async with behind_proxy(database_url, Notes()) as (network, group):
        network.statement_to_lose = b"UPDATE logs"
        with pytest.raises(Overloaded):
            await group.submit(tenant, "one")
        network.statement_to_lose = b"BEGIN"
        with pytest.raises(Overloaded):
            await group.submit(tenant, "two")
        assert await group.submit(tenant, "three") == "THREE"
    assert await kinds_of(root, tenant) == ["three"]


async def test_a_database_that_cannot_be_reached_is_overloaded(database_url: str, tenant: UUID) -> None:
    async with behind_proxy(database_url, Notes()) as (network, group):
        network.go_down()
        with pytest.raises(Overloaded):
            await group.submit(tenant, "one")
        network.down = False
        assert await group.submit(tenant, "two") == "TWO"
