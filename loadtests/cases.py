"""Running one case and reading the meters around it: a row of the table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

import msgspec

from coordinator.demo.launch import Process
from loadtests import driver, inproc, meter
from loadtests.floor import Floor, Logs
from loadtests.load import Measured, Plan
from loadtests.worker import started
from loadtests.world import World

SETTLE_WITHIN_S = 30.0
POLL_S = 0.05
UNSETTLED = "SELECT count(*) FROM operations WHERE settled_at IS NULL"

STATES = "SELECT state, reason, sends, count(*) FROM operations GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"

_numbers = itertools.count()


class NotSettled(Exception):
    """Effects are stuck; the message says in which states."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of figures. ``cpu_ms``, ``tx``, ``xid`` and ``wal_kb`` are per decision; times in ms."""

    case: str
    type: str
    clients: int
    per_s: float
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    tx: float | None = None
    xid: float
    wal_kb: float
    cpu_ms: dict[str, float]
    errors: dict[str, int] = {}
    left: int = 0
    committed: int = 0


def floor_row(world: World, floor: Floor, clients: int, seconds: float, logs: Logs) -> Row:
    pids = {"postgres": world.postgres.pid}
    world.sql("CHECKPOINT")
    before = meter.read(world, pids, None)
    bench = floor.run(clients, seconds, logs)
    used = meter.read(world, pids, None).since(before)
    return _row(
        used,
        bench.decisions,
        case="floor, log each" if logs == "each" else "floor, one log",
        type="",
        clients=clients,
        per_s=bench.per_s,
        p50=bench.latency_ms if clients == 1 else None,
    )


def http_row(world: World, server: Process, case: str, plan: Plan) -> tuple[Row, Measured]:
    """A case against the server."""
    pids = {"server": server.pid, "providers": world.providers.pid, "postgres": world.postgres.pid}
    url = str(server.ready["url"])
    return _driven(world, case, plan, "loadtests.driver", {driver.URL: url, driver.KEY: world.key}, pids, url)


def inproc_row(world: World, case: str, plan: Plan) -> tuple[Row, Measured]:
    """A case inside the driver's process, whose CPU is then server and driver in one."""
    env = {inproc.DATABASE: world.postgres.url, inproc.TENANT: world.tenant}
    return _driven(world, case, plan, "loadtests.inproc", env, {"postgres": world.postgres.pid}, None)


def plan_for(type: str, clients: int, seconds: float, **more: object) -> Plan:
    """With a prefix that no other case of this run has."""
    return msgspec.convert(
        {"type": type, "clients": clients, "seconds": seconds, "prefix": f"c{next(_numbers)}", **more}, Plan
    )


def _driven(
    world: World,
    case: str,
    plan: Plan,
    module: str,
    env: Mapping[str, str],
    pids: Mapping[str, int],
    url: str | None,
) -> tuple[Row, Measured]:
    world.sql("CHECKPOINT")
    with started(module, env) as child:
        watched = {**pids, "driver": child.pid}
        child.warm_up(plan)
        before = meter.read(world, watched, url)
        measured = child.measure()
        left = world.number(UNSETTLED)
        used = meter.read(world, watched, url).since(before)
        _all_settled(world)
    row = _row(
        used,
        max(1, measured.committed),
        case=case,
        type=plan.type,
        clients=plan.clients,
        per_s=measured.committed / measured.elapsed_s,
        p50=measured.p50,
        p95=measured.p95,
        p99=measured.p99,
        tx=used.transactions / max(1, measured.committed) if url else None,
        errors=measured.others,
        left=left,
        committed=measured.committed,
    )
    return row, measured


def _row(used: meter.Reading, decisions: int, **more: object) -> Row:
    figures = {
        "xid": used.xids / decisions,
        "wal_kb": used.wal_bytes / decisions / 1000,
        "cpu_ms": {name: spent * 1000 / decisions for name, spent in used.cpu_s.items()},
    }
    return msgspec.convert({**figures, **more}, Row)


def _all_settled(world: World) -> None:
    """Until no effect is under way: the next case begins with an idle service."""
    until = time.monotonic() + SETTLE_WITHIN_S
    while world.number(UNSETTLED):
        if time.monotonic() > until:
            said = world.sql(STATES).replace("\n", "; ")
            raise NotSettled(
                f"operations are still not settled {SETTLE_WITHIN_S:.0f} s after the load ended: {said}"
            )
        time.sleep(POLL_S)
