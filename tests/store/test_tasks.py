"""Tasks in the store: two claims never share a task or exceed a worker's capacity, and a decision that changes hands keeps its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

import asyncpg
import pytest

from coordinator.core.evidence import Failed
from coordinator.errors import MalformedRequest, RequestRefused
from coordinator.store.claims import (
    Accepted,
    Beat,
    Claim,
    Claimed,
    ClaimedTask,
    Held,
    Kept,
    NotYours,
    Report,
    Superseded,
    claim,
    end,
    heartbeat,
)
from coordinator.store.database import Database
from coordinator.store.handback import hand_back_lost
from coordinator.store.tasks import Asked, Ended, GivenUp, GiveUp, NewTask, Waiting, ask, fetch
from coordinator.store.workers import register
from tests.store.given import admitted, blocked, kinds_of, new_task, only_row, registration

LEASE_MS = 30_000


async def asked(database: Database, tenant: UUID, *items: NewTask | GiveUp) -> Sequence[Asked]:
    return await database.run(tenant, lambda connection: ask(connection, tenant, items, lease_ms=LEASE_MS))


async def registered(database: Database, tenant: UUID, name: str = "w1", max_tasks: int = 3) -> UUID:
    wanted = registration(name, max_tasks=max_tasks)
    return (await database.run(tenant, lambda connection: register(connection, tenant, wanted))).id


async def claimed(database: Database, tenant: UUID, worker: UUID, limit: int = 20) -> list[ClaimedTask]:
    wanted = Claim(worker=worker, limit=limit, incarnation=None, lease_ms=LEASE_MS)
    result = await database.run(tenant, lambda connection: claim(connection, tenant, wanted))
    assert isinstance(result, Claimed)
    return result.tasks


async def ended(
    database: Database, tenant: UUID, task: ClaimedTask, answer: bytes = b'{"result":1}'
) -> Accepted | Superseded | object:
    report = Report(task=task.id, token=task.fencing_token, state="completed", encoded=answer)
    (result,) = await database.run(tenant, lambda connection: end(connection, tenant, [report], no_objection))
    return result


def no_objection(held: Held, report: Report) -> None:
    """What this process does not know it lets pass."""


async def test_reports_of_one_batch_are_judged_each_by_itself_and_only_while_the_task_is_held(
    database: Database, tenant: UUID
) -> None:
    worker = await registered(database, tenant)
    await asked(database, tenant, new_task(await admitted(database, tenant)))
    (task,) = await claimed(database, tenant, worker)
    seen: list[Held] = []

    def judge(held: Held, report: Report) -> RequestRefused | None:
        seen.append(held)
        return MalformedRequest("wrong") if report.encoded == b'{"result":"wrong"}' else None

    reports = [
        Report(task=task.id, token=task.fencing_token, state="completed", encoded=b'{"result":"%s"}' % said)
        for said in (b"wrong", b"right", b"wrong")
    ]
    results = await database.run(tenant, lambda connection: end(connection, tenant, reports, judge))
    assert [type(result) for result in results] == [MalformedRequest, Accepted, Superseded]
    assert [(held.evidence, held.ceiling_currency) for held in seen] == [(task.evidence, None)] * 2
    again = await database.run(tenant, lambda connection: end(connection, tenant, reports[:1], judge))
    assert again == [Superseded(state="completed", late=False)], "kept before"
    assert len(seen) == 2


async def test_a_claim_that_waits_for_another_of_its_worker_counts_what_that_one_took(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant, max_tasks=2)
    await asked(database, tenant, *(new_task(decision) for _ in range(6)))
    wanted = Claim(worker=worker, limit=20, incarnation=None, lease_ms=LEASE_MS)
    async with database.transaction(tenant) as connection:
        first = await claim(connection, tenant, wanted)
        second = asyncio.ensure_future(claimed(database, tenant, worker))
        await blocked(root)
    assert isinstance(first, Claimed)
    assert len(first.tasks) == 2
    assert await second == []


async def test_two_workers_never_get_the_same_task(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    one, two = await registered(database, tenant, "one"), await registered(database, tenant, "two")
    await asked(database, tenant, *(new_task(decision) for _ in range(4)))
    wanted = Claim(worker=one, limit=20, incarnation=None, lease_ms=LEASE_MS)
    async with database.transaction(tenant) as connection:
        first = await claim(connection, tenant, wanted)
        assert isinstance(first, Claimed)
        other = asyncio.ensure_future(claimed(database, tenant, two))
        await blocked(root)  # at the log alone: it has passed over what the first has locked
    second = await other
    assert (len(first.tasks), len(second)) == (3, 1)
    assert not {task.id for task in first.tasks} & {task.id for task in second}


async def test_whoever_takes_a_decision_over_goes_on_with_the_same_task(
    database: Database, tenant: UUID
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    task = new_task(decision)
    await asked(database, tenant, task)
    (given,) = await claimed(database, tenant, worker)
    (again,) = await asked(database, tenant, new_task(decision, decision_token=2))
    assert isinstance(again, Waiting)
    assert again.id == task.id
    assert isinstance(await ended(database, tenant, given), Accepted)
    (third,) = await asked(database, tenant, new_task(decision, decision_token=3))
    assert isinstance(third, Ended)
    assert (third.id, third.answer) == (task.id, b'{"result":1}')
    assert third.older_ms >= 0


async def test_a_confirmation_by_the_same_holder_is_a_task_of_its_own(
    database: Database, tenant: UUID
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    await asked(database, tenant, new_task(decision))
    (given,) = await claimed(database, tenant, worker)
    await ended(database, tenant, given)
    adopted = new_task(decision, decision_token=2)
    confirming = new_task(decision, decision_token=2)
    assert isinstance((await asked(database, tenant, adopted))[0], Ended)
    assert await asked(database, tenant, confirming) == [Waiting(confirming.id)]


async def test_another_request_is_another_task_and_the_one_before_is_given_up(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision = await admitted(database, tenant)
    first, second = new_task(decision), new_task(decision, decision_token=2, request=b'{"input":{"a":1}}')
    await asked(database, tenant, first)
    assert await asked(database, tenant, second) == [Waiting(second.id)]
    row = await only_row(root, "SELECT state FROM tasks WHERE id = $1", first.id)
    assert row["state"] == "cancelled"


async def test_giving_up_in_the_same_breath_leaves_nothing_to_claim(database: Database, tenant: UUID) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    task = new_task(decision)
    await asked(database, tenant, task, GiveUp(task.id, task.decision_token))
    assert await claimed(database, tenant, worker) == []


async def test_a_task_that_a_later_holder_has_adopted_is_not_the_earlier_ones_to_give_up(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    task = new_task(decision)
    await asked(database, tenant, task)
    await claimed(database, tenant, worker)
    (adopted,) = await asked(database, tenant, new_task(decision, decision_token=2))
    assert isinstance(adopted, Waiting)
    assert adopted.id == task.id
    await asked(database, tenant, GiveUp(task.id, 1))
    assert (await only_row(root, "SELECT state FROM tasks"))["state"] == "in_progress"
    await asked(database, tenant, GiveUp(task.id, 2))
    assert (await only_row(root, "SELECT state FROM tasks"))["state"] == "cancelled"


async def test_whoever_gives_up_learns_whether_a_worker_had_it(database: Database, tenant: UUID) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    had, never = new_task(decision), new_task(decision)
    await asked(database, tenant, had)
    assert len(await claimed(database, tenant, worker)) == 1
    await asked(database, tenant, never)
    assert await asked(
        database, tenant, GiveUp(had.id, had.decision_token), GiveUp(never.id, never.decision_token)
    ) == [GivenUp(1), GivenUp(0)]
    assert await asked(database, tenant, GiveUp(never.id, never.decision_token)) == [GivenUp(0)], (
        "it had ended before"
    )
    assert await asked(database, tenant, GiveUp(new_task(decision).id, 1)) == [GivenUp(None)]


async def test_every_step_of_a_task_has_one_receipt(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    await asked(database, tenant, new_task(decision, max_attempts=2))
    (first,) = await claimed(database, tenant, worker)
    await let_run_out(root)
    await database.run(tenant, lambda connection: hand_back_lost(connection, tenant))
    (second,) = await claimed(database, tenant, worker)
    assert isinstance(await ended(database, tenant, first), Superseded)
    assert isinstance(await ended(database, tenant, second), Accepted)
    assert (await kinds_of(root, tenant, decision=decision))[1:] == [
        "task.waiting",
        "task.in-progress",
        "task.requeued",
        "task.in-progress",
        "task.late-answer",
        "task.completed",
    ]


async def let_run_out(root: asyncpg.Connection) -> None:
    """The leases of all tasks, and the waiting for them."""
    await root.execute(
        "UPDATE tasks SET lease_expires_at = clock_timestamp() - interval '1 s', awaited_at = '-infinity'"
        " WHERE state = 'in_progress'"
    )


async def test_a_task_of_a_decision_at_rest_is_neither_given_out_nor_kept_unless_another_waits_for_it(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    await asked(database, tenant, new_task(decision), new_task(decision))
    (given,) = await claimed(database, tenant, worker, limit=1)
    await root.execute(
        "UPDATE decisions SET status = 'cancelled', answer = '{}', answer_status = 201, finished_at = now(),"
        " lease_owner = NULL, lease_expires_at = NULL WHERE id = $1",
        decision,
    )
    beat = [Beat(given.id, given.fencing_token)]

    async def beaten() -> object:
        return (
            await database.run(
                tenant, lambda connection: heartbeat(connection, tenant, beat, lease_ms=LEASE_MS)
            )
        )[0]

    assert isinstance(await beaten(), Kept), "somebody said a moment ago that it waits"
    await root.execute("UPDATE tasks SET awaited_at = '-infinity'")
    assert isinstance(await beaten(), Superseded)
    assert await claimed(database, tenant, worker) == []


async def test_a_superseded_worker_does_not_prolong_the_lease_of_the_next(
    database: Database, tenant: UUID, root: asyncpg.Connection
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    await asked(database, tenant, new_task(decision, deadline_ms=3_600_000))
    (lost,) = await claimed(database, tenant, worker)
    await let_run_out(root)
    await database.run(tenant, lambda connection: hand_back_lost(connection, tenant))
    assert len(await claimed(database, tenant, worker)) == 1
    until = "SELECT lease_expires_at FROM tasks"
    before = await only_row(root, until)
    stale = [Beat(lost.id, lost.fencing_token)]
    (answer,) = await database.run(
        tenant, lambda connection: heartbeat(connection, tenant, stale, lease_ms=10 * LEASE_MS)
    )
    assert isinstance(answer, Superseded)
    assert await only_row(root, until) == before


async def test_a_pinned_task_counts_those_that_wait_for_its_worker_too(
    database: Database, tenant: UUID
) -> None:
    decision = await admitted(database, tenant)
    await registered(database, tenant, max_tasks=2)
    pinned = [new_task(decision, pinned="w1") for _ in range(3)]
    first, second, third = await asked(database, tenant, *pinned)
    assert (first, second) == (Waiting(pinned[0].id, "w1"), Waiting(pinned[1].id, "w1"))
    assert isinstance(third, Failed)
    assert (third.code, third.message) == (
        "worker-at-capacity",
        "worker w1 has 0 of 2 tasks in progress, 2 more wait for it",
    )


async def test_an_incarnation_that_was_replaced_gets_nothing(database: Database, tenant: UUID) -> None:
    one = registration(incarnation="one")
    worker = (await database.run(tenant, lambda connection: register(connection, tenant, one))).id
    wanted = Claim(worker=worker, limit=1, incarnation="zero", lease_ms=LEASE_MS)
    assert await database.run(tenant, lambda c: claim(c, tenant, wanted)) == NotYours()


@pytest.mark.parametrize("state", ["waiting", "in_progress"])
async def test_what_is_past_its_deadline_expires_whoever_had_it(
    database: Database, tenant: UUID, root: asyncpg.Connection, state: str
) -> None:
    decision, worker = await admitted(database, tenant), await registered(database, tenant)
    task = new_task(decision)
    await asked(database, tenant, task)
    if state == "in_progress":
        assert len(await claimed(database, tenant, worker)) == 1
    past = "clock_timestamp() - interval '1 s'"
    await root.execute(
        f"UPDATE tasks SET deadline_at = {past}, lease_expires_at = CASE WHEN state = 'in_progress' THEN {past} END"
    )
    await database.run(tenant, lambda connection: hand_back_lost(connection, tenant))
    (end_of_it,) = await database.run(tenant, lambda connection: fetch(connection, tenant, [task.id]))
    assert (end_of_it.state, end_of_it.answer) == ("expired", None)
