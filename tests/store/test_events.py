"""Stored events: written by whoever holds the decision, once, and by nobody else."""

from __future__ import annotations

from uuid import UUID

import pytest
from uuid_utils.compat import uuid7

from coordinator.core.events import Event
from coordinator.store import events
from coordinator.store.database import Database
from tests.store.given import admitted, commit_all, proposal


def some(*numbers: int) -> list[Event]:
    return [Event(number, "stage", b"{}") for number in numbers]


async def numbers(database: Database, tenant: UUID, decision: UUID, after: int = 0) -> list[int]:
    async with database.transaction(tenant) as connection:
        found = await events.events(connection, tenant, decision, after=after, limit=100)
    return [event.number for event in found]


async def write(database: Database, tenant: UUID, decision: UUID, token: int, *numbers: int) -> None:
    async with database.transaction(tenant) as connection:
        await events.append_if_held(connection, tenant, [(decision, token, some(*numbers))])


async def test_the_holder_writes_each_number_once(database: Database, tenant: UUID) -> None:
    decision = await admitted(database, tenant)
    await write(database, tenant, decision, 1, 2, 3)
    await write(database, tenant, decision, 1, 3, 4)
    assert await numbers(database, tenant, decision) == [2, 3, 4]
    assert await numbers(database, tenant, decision, after=3) == [4]


@pytest.mark.parametrize("token", [0, 2])
async def test_another_token_writes_nothing(database: Database, tenant: UUID, token: int) -> None:
    decision = await admitted(database, tenant)
    await write(database, tenant, decision, token, 2)
    assert await numbers(database, tenant, decision) == []


async def test_nothing_is_written_of_a_decision_that_rests(database: Database, tenant: UUID) -> None:
    decision = await admitted(database, tenant)
    await commit_all(database, tenant, proposal(decision))
    await write(database, tenant, decision, 1, 2)
    assert await numbers(database, tenant, decision) == []


async def test_a_note_is_taken_once_and_only_sent_to_where_somebody_follows(
    database: Database, tenant: UUID
) -> None:
    followed, other = await admitted(database, tenant), await admitted(database, tenant)
    async with database.transaction(tenant) as connection:
        await events.follow(connection, tenant, followed)
        await events.follow(connection, tenant, followed)
        for decision in (followed, other):
            await events.note_if_followed(connection, tenant, uuid7(), events.Note(decision, "e", ["half"]))
        assert await events.followed(connection, tenant, [followed, other]) == {followed}
        taken = await events.take_notes(connection, tenant, [followed, other])
        assert taken == [events.Note(followed, "e", ["half"])]
        assert await events.take_notes(connection, tenant, [followed, other]) == []
