"""A task graph under the clock, `python -m loadtests.graph`: how much longer than its critical path does a decision take?

Twenty sources of 50 to 100 ms each: one at the top, three rows of six, each of which needs three of the row above, one at the bottom.
The critical path is the slowest chain of what the sources themselves take, so 1.0 would be a service that costs nothing. Measured is the
whole decision, from asking to the durable answer, in the process of the service; one after the other, and then eight at a time, which
shows what the cores are short of. Ends with 1 if the median of the first is above 1.1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from uuid import UUID

import msgspec
import uvloop
from uuid_utils.compat import uuid7

from adapters.function import FunctionSource
from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Record, decision_type
from coordinator.api.problems import render
from coordinator.config import Settings
from coordinator.core.graph import Graph, graph_of
from coordinator.core.request import DecisionRequest
from coordinator.core.view import decode_view
from coordinator.engine.service import Rested, Service, run_service
from coordinator.store.keys import Key
from loadtests.machine import environment
from loadtests.world import world

ROWS, COLUMNS, NEEDS = 3, 6, 3
LIMIT = 1.1


class Ask(msgspec.Struct, frozen=True):
    number: int


class Fact(msgspec.Struct, frozen=True):
    number: int


def delays_ms() -> dict[str, int]:
    """What each source takes: 50..100 ms, the same in every run."""
    names = ["top", *(f"r{row}c{column}" for row in range(ROWS) for column in range(COLUMNS)), "bottom"]
    return {name: 50 + 37 * number % 51 for number, name in enumerate(names)}


def after() -> dict[str, list[str]]:
    made: dict[str, list[str]] = {"top": []}
    for row in range(ROWS):
        for column in range(COLUMNS):
            above = [f"r{row - 1}c{(column + step) % COLUMNS}" for step in range(NEEDS)] if row else ["top"]
            made[f"r{row}c{column}"] = above
    made["bottom"] = [f"r{ROWS - 1}c{column}" for column in range(COLUMNS)]
    return made


def source(name: str, ms: int) -> FunctionSource[Fact]:
    async def read(ask: Ask, _: Mapping[str, object]) -> Fact:
        await asyncio.sleep(ms / 1000)
        return Fact(ask.number)

    return FunctionSource(name, read, returns=Fact)


def policy(ask: Ask, packet: Packet, record: Record[object]) -> Outcome:
    return Commit({"read": len(packet.items)})


def coordinator() -> Coordinator:
    evidence = [
        Evidence(name, source(name, ms), deadline_ms=5_000, after=after()[name])
        for name, ms in delays_ms().items()
    ]
    return Coordinator(
        [decision_type("graph", request=Ask, policy=policy, policy_version="1", evidence=evidence)]
    )


async def decide(service: Service, caller: Key, number: int) -> tuple[float, Graph]:
    """How long it took in ms, and what the decision itself says of its graph."""
    body: dict[str, object] = {"type": "graph", "input": {"number": number}}
    request = msgspec.convert(body, DecisionRequest)
    began = time.perf_counter()
    answer = await service.decide(
        caller, f"graph-{number}", request, msgspec.to_builtins(body), wait_s=30, traceparent=None
    )
    took = (time.perf_counter() - began) * 1000
    if not isinstance(answer, Rested):
        raise SystemExit(f"decision {number} did not come to rest: {answer.body.decode()}")
    graph = decode_view(answer.body).graph
    assert isinstance(graph, Graph), "a decision that has read something says of its graph"
    return took, graph


async def measure(url: str, tenant: str, rounds: int, at_once: int) -> list[tuple[float, Graph]]:
    caller = Key(UUID(tenant), uuid7(), frozenset({"decide"}))
    made: list[tuple[float, Graph]] = []
    async with run_service(coordinator(), url, Settings(), render_refusal=render) as service:
        await decide(service, caller, -at_once)  # connections are open from here on
        for turn in range(rounds):
            numbers = range(turn * at_once, (turn + 1) * at_once)
            made += await asyncio.gather(*(decide(service, caller, 1_000 * at_once + n) for n in numbers))
    return made


def report(at_once: int, ideal: Graph, made: Sequence[tuple[float, Graph]]) -> float:
    took = [ms for ms, _ in made]
    ratio = median(took) / ideal.critical_path_ms
    p95 = quantiles(took, n=20)[-1]
    print(
        f"{at_once} at a time  {len(made)} decisions: median {median(took):.0f} ms, p95 {p95:.0f} ms;"
        f" critical path {ideal.critical_path_ms} ms by the sources' own time,"
        f" {median(graph.critical_path_ms for _, graph in made):.0f} ms as measured,"
        f" total work {median(graph.total_work_ms for _, graph in made):.0f} ms;"
        f" median over the path {ratio:.3f}",
        flush=True,
    )
    return ratio


def main() -> int:
    """0: one at a time, the median is within the limit."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.graph", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="of each of the two (default 8)")
    options = parser.parse_args()
    ideal = graph_of(after(), delays_ms())
    print(f"{'sources':12} {len(delays_ms())}, the slowest chain {' > '.join(ideal.critical_path)}")
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="loadtests-") as folder, world(Path(folder)) as made:
        for name, value in environment(made).items():
            print(f"{name:12} {value}")
        for at_once in (1, 8):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                measured = runner.run(measure(made.postgres.url, made.tenant, options.rounds, at_once))
            ratios.append(report(at_once, ideal, measured))
    met = ratios[0] <= LIMIT
    print(f"{'verdict':12} one at a time, {ratios[0]:.3f} of at most {LIMIT}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
