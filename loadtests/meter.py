"""Meters that are read before and after a case: CPU per process tree, WAL, transactions. Differences are what the case used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from loadtests.world import World, fetch

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
READINGS = """
SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint, pg_snapshot_xmax(pg_current_snapshot())
"""
TRANSACTIONS = re.compile(rb"^coordinator_transactions_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


class Reading(msgspec.Struct, frozen=True):
    """``cpu_s`` by the names given to `read`; ``transactions`` as the server counts them, 0 without a server."""

    wal_bytes: int
    xids: int
    transactions: float
    cpu_s: dict[str, float]

    def since(self, before: Reading) -> Reading:
        return Reading(
            self.wal_bytes - before.wal_bytes,
            self.xids - before.xids,
            self.transactions - before.transactions,
            {name: spent - before.cpu_s[name] for name, spent in self.cpu_s.items()},
        )


def read(world: World, pids: Mapping[str, int], server_url: str | None) -> Reading:
    wal, xids = world.sql(READINGS).split("|")
    counted = TRANSACTIONS.findall(fetch(f"{server_url}/metrics")) if server_url else []
    return Reading(
        int(wal),
        int(xids),
        sum(map(float, counted)),
        {name: cpu_seconds(pid) for name, pid in pids.items()},
    )


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its children, and theirs, ended ones included."""
    ticks = sum(sum(map(int, _stat(one)[11:15])) for one in _tree(pid))
    return ticks / TICKS_PER_S


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            yield from _tree(int(child))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command; nothing if it has just ended, when its parent has its times."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 15
