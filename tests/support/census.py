"""What this process has open: asyncio tasks, threads, files, sockets, children. Taken before and after, it shows what was left behind."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]  # a tool of the tests alone

US = psutil.Process()


@dataclass(frozen=True)
class Census:
    """Counts by name, so that two of them that differ say what it is that one has and the other has not."""

    tasks: Counter[str]
    threads: Counter[str]
    files: int
    sockets: int
    children: frozenset[int]


def census() -> Census:
    """Of this moment; the task that asks is not counted."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return Census(
        tasks=Counter(getattr(task.get_coro(), "__qualname__", "?") for task in tasks),
        threads=Counter(thread.name for thread in threading.enumerate()),
        files=US.num_fds(),
        sockets=len(US.net_connections("all")),
        children=frozenset(child.pid for child in US.children(recursive=True)),
    )


def connections_to(url: str) -> int:
    """How many connections of this process to that address are established."""
    port = urlsplit(url).port
    return sum(
        bool(each.raddr) and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in US.net_connections("tcp")
    )
