"""Processes that call one provider as fast as they may, inside its pool: forked from one, so that they start together and quickly.

    python -m tests.conflict.pool_processes '{"database_url": ..., "providers_url": ..., "count": 8, ...}'

prints one line `{"pids": [...]}` and ends, with its children, at SIGTERM. Each child is a service's pools without the rest of the service:
the same `Providers`, the same shares and rates, the same HTTP source, and a deadline around each call.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

import anyio
import click
import msgspec
from uuid_utils.compat import uuid7

from adapters.http import HttpSource
from coordinator import Coordinator, Evidence, Outcome, Packet, Pool, Record, decision_type
from coordinator.config import Settings
from coordinator.core.evidence import ReadRequest
from coordinator.core.outcome import Commit
from coordinator.demo.launch import die_with_parent
from coordinator.engine.pooled import Pooled
from coordinator.engine.pools import Provider, Providers
from coordinator.store.database import open_database


class Options(msgspec.Struct, kw_only=True):
    """``callers`` of each process; each gives up a call after ``deadline_ms``, and the provider goes on with it."""

    database_url: str
    providers_url: str
    count: int = 8
    callers: int = 4
    deadline_ms: int = 1_000
    lease_ms: int = 1_200
    lingers_ms: int = 600
    concurrency: int | None = None
    requests_per_min: int | None = None


class Nothing(msgspec.Struct, frozen=True):
    pass


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


def nothing(request: Nothing, packet: Packet, record: Record[object]) -> Outcome:
    return Commit({})


def served(options: Options) -> tuple[Coordinator, HttpSource[Capacity]]:
    source = HttpSource(
        "planner", f"{options.providers_url}/capacity/x", returns=Capacity, provider="planner"
    )
    evidence = Evidence("capacity", source, deadline_ms=options.deadline_ms)
    declared = decision_type(
        "quote", request=Nothing, policy=nothing, policy_version="1", evidence=[evidence]
    )
    limits = {"concurrency": options.concurrency, "requests_per_min": options.requests_per_min}
    return Coordinator([declared], pools=[Pool("planner", lingers_ms=options.lingers_ms, **limits)]), source


def asked() -> ReadRequest:
    return ReadRequest(
        tenant="",
        input=Nothing(),
        evidence={},
        record_kind="",
        record_id="",
        if_revision=None,
        timeout_s=30,
        traceparent="",
        on_cancel=lambda _: None,
    )


async def call_forever(source: HttpSource[Capacity], provider: Provider, deadline_ms: int) -> None:
    while True:
        async with provider.slot() as call:
            with anyio.move_on_after(deadline_ms / 1000) as scope:
                await source.read(asked())
            if scope.cancelled_caught:
                call.give_up()


async def run(options: Options) -> None:
    """Until SIGTERM; then what is held goes back."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    coordinator, source = served(options)
    settings = Settings(pool_size=2, lease_ms=options.lease_ms, processes=options.count, pool_poll_ms=50)
    async with open_database(options.database_url, settings) as database, anyio.create_task_group() as tasks:
        providers = Providers(64, coordinator.pools)
        pooled = Pooled(coordinator, database, providers, uuid7())
        tasks.start_soon(pooled.run)
        async with anyio.create_task_group() as calls:
            for _ in range(options.callers):
                calls.start_soon(call_forever, source, providers.of("planner"), options.deadline_ms)
            await stopped.wait()
            calls.cancel_scope.cancel()
        await pooled.release()
        await source.aclose()
        tasks.cancel_scope.cancel()


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    die_with_parent()
    parent, pids = os.getpid(), []
    for _ in range(options.count):
        pid = os.fork()
        if not pid:
            die_with_parent(parent)
            asyncio.run(run(options))
            os._exit(0)
        pids.append(pid)
    signal.signal(signal.SIGTERM, lambda *_: _terminate(pids))
    click.echo(json.dumps({"pids": pids}))
    for pid in pids:
        os.waitpid(pid, 0)


def _terminate(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
