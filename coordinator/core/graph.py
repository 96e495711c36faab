"""The task graph of a decision, after the fact: what it waited for, and how much was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """``critical_path`` names evidence each of which waited for the one before it, the slowest such chain; ``critical_path_ms`` is how
    long its readings took one after the other, ``total_work_ms`` what all readings took together. Of each evidence its latest
    reading counts; of two chains as slow as each other, the one with more links."""

    critical_path: list[str]
    critical_path_ms: int
    total_work_ms: int


def graph_of(after: Mapping[str, Sequence[str]], elapsed_ms: Mapping[str, int]) -> Graph:
    """``after`` is in an order in which each follows what it comes after. What was not read is not part of it."""
    ends: dict[str, tuple[int, int]] = {}
    through: dict[str, str | None] = {}
    for name, direct in after.items():
        if name in elapsed_ms:
            last = max((each for each in direct if each in ends), key=lambda each: ends[each], default=None)
            ms, length = ends[last] if last is not None else (0, 0)
            through[name], ends[name] = last, (ms + elapsed_ms[name], length + 1)
    path: list[str] = []
    step = max(ends, key=lambda each: ends[each], default=None)
    longest = ends[step][0] if step is not None else 0
    while step is not None:
        path.append(step)
        step = through[step]
    return Graph(critical_path=path[::-1], critical_path_ms=longest, total_work_ms=sum(elapsed_ms.values()))
