"""`/v1/workers`: remote workers register, claim tasks and drain; who they are and how busy."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

import msgspec
from litestar.types import Receive

from coordinator.api import examples, paging
from coordinator.api.answer import Answer
from coordinator.api.body import parsed, typed
from coordinator.api.endpoint import READERS, Call, Parameter, Sent, Shown, endpoint
from coordinator.api.parameters import ID, PAGE
from coordinator.api.views import encode
from coordinator.core.task import (
    CAPABILITY,
    MAX_CAPABILITIES,
    MAX_TASKS,
    VISIBLE,
    Capacity,
    TaskGiven,
    WorkerShown,
)
from coordinator.core.view import timestamp
from coordinator.engine.workers import Poll
from coordinator.errors import Draining, MalformedRequest, NotFound, Overloaded, Supplanted
from coordinator.store.claims import ClaimedTask
from coordinator.store.workers import WorkerRow

WORKERS = frozenset({"work"})
MAX_DRAIN_MS = 3_600_000
MAX_WAIT_S = 60
_NUMBER = re.compile(r"[0-9]{1,9}\Z")


class WorkerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``capabilities`` are the names of the sources that it can work for, or ``*`` for all. ``incarnation`` names the process, in
    any words that no other process uses: what an earlier one under this name had in progress is then handed back at once."""

    name: Annotated[str, msgspec.Meta(pattern=VISIBLE)]
    capabilities: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=CAPABILITY)]],
        msgspec.Meta(min_length=1, max_length=MAX_CAPABILITIES),
    ]
    max_tasks: Annotated[int, msgspec.Meta(ge=1, le=MAX_TASKS)] = 1
    incarnation: Annotated[str, msgspec.Meta(pattern=VISIBLE)] | None = None


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``limit_ms``: how long it may go on with what it has; 30 s unless the service is set otherwise."""

    limit_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAIN_MS)] | None = None


class ClaimShown(msgspec.Struct, frozen=True, kw_only=True):
    """``lease_ms``: send a heartbeat for each task well within that time. ``draining``: the worker will get no task any more."""

    tasks: list[TaskGiven]
    lease_ms: int
    draining: bool


@endpoint(
    "POST",
    "/v1/workers",
    "Register a worker",
    scopes=WORKERS,
    body=Sent(WorkerBody, examples.WORKER),
    answers={
        201: Shown("The name is new.", WorkerShown),
        200: Shown("The name was known: it is updated, and drains no more.", WorkerShown),
    },
    problems=[MalformedRequest, Overloaded],
)
async def register(call: Call) -> Answer:
    """By name. Registering again updates capabilities and ``max_tasks``. A worker that was started anew should say so with an
    ``incarnation`` of its own; without one, what it had in progress comes back when the leases run out."""
    body = typed(await call.body(), WorkerBody)
    row, created = await call.service.workers.register(
        call.tenant,
        name=body.name,
        capabilities=sorted(set(body.capabilities)),
        max_tasks=body.max_tasks,
        incarnation=body.incarnation,
    )
    return Answer(201 if created else 200, encode(_shown(row, call.service.settings.worker_lease_ms)))


@endpoint(
    "GET",
    "/v1/workers",
    "List workers",
    scopes=READERS | WORKERS,
    parameters=PAGE,
    answers={200: Shown("A page of workers, the newest first.", WorkerShown, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """``status`` and ``capacity`` are derived from the tasks in progress and the last sign of life, at this moment."""
    limit, before = paging.limit_of(call.query), paging.id_before(call.query, "workers")
    rows = await call.service.workers.list(call.tenant, before=before, limit=limit + 1)
    lease_ms = call.service.settings.worker_lease_ms
    following = paging.cursor("workers", rows[limit - 1].id) if len(rows) > limit else None
    return Answer(200, paging.page([encode(_shown(row, lease_ms)) for row in rows[:limit]], following))


@endpoint(
    "GET",
    "/v1/workers/{id}",
    "Show a worker",
    scopes=READERS | WORKERS,
    parameters=[ID],
    answers={200: Shown("The worker.", WorkerShown)},
    problems=[NotFound],
)
async def show(call: Call) -> Answer:
    """One worker, as it is at this moment."""
    row = await call.service.workers.show(call.tenant, call.id())
    return Answer(200, encode(_shown(row, call.service.settings.worker_lease_ms)))


@endpoint(
    "POST",
    "/v1/workers/{id}/claim",
    "Claim tasks",
    scopes=WORKERS,
    parameters=[
        ID,
        Parameter(
            "wait",
            "query",
            f"Seconds to wait for a task (default 0, at most {MAX_WAIT_S}). The service may answer sooner.",
            {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_S, "default": 0},
        ),
        Parameter(
            "limit",
            "query",
            "At most so many tasks, whatever more the worker may have.",
            {"type": "integer", "minimum": 1, "maximum": MAX_TASKS, "default": MAX_TASKS},
        ),
        Parameter("incarnation", "query", "What the process said of itself when it registered."),
    ],
    answers={200: Shown("What the worker has to do now, which may be nothing.", ClaimShown)},
    problems=[MalformedRequest, NotFound, Supplanted, Draining, Overloaded],
)
async def claim(call: Call) -> Answer:
    """A long poll. The tasks are in progress from now on, never more than the worker has free, and none is given to two. Each has
    a deadline, and a lease that its heartbeats prolong. A worker whose name belongs to another process is told so."""
    poll = Poll(call.tenant, call.id())
    wait_s = _number(call, "wait", 0, MAX_WAIT_S, default=0)
    limit = _number(call, "limit", 1, MAX_TASKS, default=MAX_TASKS)
    leaving = asyncio.ensure_future(_leave_when_gone(call.receive, poll))
    try:
        claimed = await call.service.workers.claim(
            call.tenant,
            poll,
            limit=limit,
            incarnation=call.query.get("incarnation"),
            wait_s=min(wait_s, call.service.settings.max_wait_s),
        )
    finally:
        leaving.cancel()
    shown = ClaimShown(
        tasks=[_given(task) for task in claimed.tasks],
        lease_ms=call.service.settings.worker_lease_ms,
        draining=claimed.draining,
    )
    return Answer(200, encode(shown))


@endpoint(
    "POST",
    "/v1/workers/{id}/drain",
    "Drain a worker",
    scopes=WORKERS | {"operate"},
    parameters=[ID],
    body=Sent(DrainBody, examples.DRAIN),
    answers={200: Shown("The worker, which gets no new task.", WorkerShown)},
    problems=[MalformedRequest, NotFound, Overloaded],
)
async def drain(call: Call) -> Answer:
    """It gets no new task, and has until the limit to finish what it has; the rest is then handed back. Registering it again ends
    the drain."""
    text = await call.raw_body()
    body = typed(parsed(text), DrainBody) if text else DrainBody()
    row = await call.service.workers.drain(call.tenant, call.id(), limit_ms=body.limit_ms)
    return Answer(200, encode(_shown(row, call.service.settings.worker_lease_ms)))


async def _leave_when_gone(receive: Receive, poll: Poll) -> None:
    """A task must not be given to a connection that nobody reads."""
    while (await receive())["type"] != "http.disconnect":
        pass
    poll.leave()


def _number(call: Call, name: str, least: int, most: int, *, default: int) -> int:
    text = call.query.get(name)
    if text is None:
        return default
    if not _NUMBER.match(text) or not least <= int(text) <= most:
        raise MalformedRequest(f"{name} must be a whole number within {least}..{most}.")
    return int(text)


def _given(task: ClaimedTask) -> TaskGiven:
    return TaskGiven(
        id=str(task.id),
        fencing_token=task.fencing_token,
        source=task.source,
        capability=task.capability,
        request=msgspec.Raw(task.request),
        deadline=timestamp(task.deadline_at),
        remaining_ms=task.remaining_ms,
        attempt=task.attempts,
        traceparent=task.traceparent,
    )


def _shown(row: WorkerRow, lease_ms: int) -> WorkerShown:
    draining = row.drain_until is not None
    available = 0 if draining else max(0, row.max_tasks - row.current)
    return WorkerShown(
        id=str(row.id),
        name=row.name,
        status="offline" if row.offline else "busy" if row.current else "idle",
        capacity=Capacity(current=row.current, max=row.max_tasks, available=available),
        capabilities=row.capabilities,
        draining=draining,
        drain_until=None if row.drain_until is None else timestamp(row.drain_until),
        registered_at=timestamp(row.registered_at),
        heartbeat_at=timestamp(row.heartbeat_at),
        lease_ms=lease_ms,
    )


ENDPOINTS = (register, index, show, claim, drain)
