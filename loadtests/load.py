"""Load on one function, closed or open loop, and what came of it. Runs in the driver's process; see `worker` for its protocol.

    closed   N clients, each asks again as soon as it was answered
    open     one request is due every 1/rate seconds, whatever became of those before; latency counts from when it was due

In both, what was begun within the time is waited for, and the clock stops at the last answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One case. ``rate`` (per second) makes it an open loop. ``prefix`` makes its keys and subjects unlike all others.
    ``hot``: all ask about one record. ``detail``: report each decision's own timings."""

    type: str
    prefix: str
    clients: int
    seconds: float
    warmup_s: float = 1.0
    rate: float | None = None
    hot: bool = False
    detail: bool = False


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: what its client waited, its slowest source, and its own timeline; all in ms."""

    latency_ms: float
    slowest_source_ms: float
    timeline: list[tuple[str, float]]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """``committed`` decisions were answered with 201; the percentiles, in ms, are theirs. ``others`` counts the other answers.
    ``warmed_up``: the 201s of the warm-up."""

    committed: int
    warmed_up: int = 0
    elapsed_s: float
    p50: float
    p95: float
    p99: float
    others: dict[str, int]
    details: list[Detail]


class Answer(msgspec.Struct, frozen=True):
    status: str
    body: bytes


Ask: TypeAlias = "Callable[[int], Awaitable[Answer]]"


class Log:
    """What was answered so far."""

    def __init__(self, *, detail: bool) -> None:
        self._detail = detail
        self._statuses: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._details: list[Detail] = []

    async def ask(self, ask: Ask, number: int, due: float) -> None:
        answer = await ask(number)
        latency_ms = (time.perf_counter() - due) * 1000
        self._statuses[answer.status] += 1
        if answer.status != "201":
            return
        self._latencies.append(latency_ms)
        if self._detail:
            self._details.append(_detail(answer.body, latency_ms))

    def measured(self, elapsed_s: float) -> Measured:
        ordered = sorted(self._latencies)
        committed = self._statuses.pop("201", 0)
        return Measured(
            committed=committed,
            elapsed_s=elapsed_s,
            p50=percentile(ordered, 50),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
            others=dict(self._statuses),
            details=self._details,
        )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """By nearest rank; nan of nothing."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else float("nan")


async def load(plan: Plan, ask: Ask, first: int, seconds: float) -> tuple[Measured, int]:
    """Ask for ``seconds``; numbers rise from ``first`` on. Also the next free number."""
    log = Log(detail=plan.detail)
    began = time.perf_counter()
    if plan.rate is None:
        after = await _closed(log, ask, plan.clients, first, began + seconds)
    else:
        after = await _open(log, ask, plan.rate, first, began, seconds)
    return log.measured(time.perf_counter() - began), after


async def _closed(log: Log, ask: Ask, clients: int, first: int, until: float) -> int:
    number = first

    async def client() -> None:
        nonlocal number
        while (now := time.perf_counter()) < until:
            number += 1
            await log.ask(ask, number, now)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return number


async def _open(log: Log, ask: Ask, rate: float, first: int, began: float, seconds: float) -> int:
    arrivals = int(rate * seconds)
    async with asyncio.TaskGroup() as tasks:
        for arrival in range(arrivals):
            due = began + arrival / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            tasks.create_task(log.ask(ask, first + arrival + 1, due))
    return first + arrivals


def _detail(body: bytes, latency_ms: float) -> Detail:
    decision: dict[str, Any] = msgspec.json.decode(body)
    return Detail(
        latency_ms=latency_ms,
        slowest_source_ms=max((item["elapsed_ms"] for item in decision["evidence"]), default=0),
        timeline=[(stage["stage"], stage["ms"]) for stage in decision["timeline"]],
    )
