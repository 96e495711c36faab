"""A decision as a picture: what was read for another decision some time ago does not stretch the axis of this one."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from coordinator.cli.picture import picture


def item(name: str, observed_at: str, elapsed_ms: int, reading: str = "own") -> dict[str, Any]:
    return {
        "name": name,
        "state": "found",
        "value": {"n": 1},
        "error": None,
        "observed_at": observed_at,
        "elapsed_ms": elapsed_ms,
        "attempts": 0 if reading == "reused" else 1,
        "reading": reading,
    }


def drawn(*evidence: dict[str, Any], graph: dict[str, Any] | None = None) -> list[str]:
    stages = [
        {"stage": "gather", "at": "2026-03-01T08:00:00.000000Z", "ms": 100},
        {"stage": "decide", "at": "2026-03-01T08:00:00.100000Z", "ms": 100},
    ]
    decision = {
        "id": "d",
        "type": "quote",
        "status": "committed",
        "record": None,
        "outcome": {"kind": "commit", "terms": {}},
        "timeline": stages,
        "evidence": list(evidence),
        "fence": {"rounds": 1, "checks": []},
        "operations": [],
        "graph": graph,
    }
    console = Console(width=140, no_color=True)
    with console.capture() as captured:
        console.print(picture(decision))
    return captured.get().splitlines()


def bar(lines: list[str], name: str) -> int:
    line = next(line for line in lines if line.strip().startswith(name))
    return line.count("━")


@pytest.mark.parametrize("reading", ["own", "shared"])
def test_what_was_read_for_this_decision_is_a_bar_on_its_axis(reading: str) -> None:
    lines = drawn(item("a", "2026-03-01T08:00:00.100000Z", 100, reading))
    assert bar(lines, "a") == bar(lines, "gather") == 20
    assert any("shared" in line for line in lines) == (reading == "shared")


def test_what_was_used_again_has_no_bar_and_says_so() -> None:
    lines = drawn(item("old", "2026-03-01T02:00:00.000000Z", 0, "reused"))
    assert bar(lines, "old") == 0
    assert bar(lines, "gather") == 20
    assert any("reused" in line for line in lines)


def test_a_chain_of_readings_is_shown_as_the_critical_path() -> None:
    graph = {"critical_path": ["a", "b"], "critical_path_ms": 45, "total_work_ms": 65}
    read = item("a", "2026-03-01T08:00:00.100000Z", 100)
    assert "critical path a → b, 45 ms; all readings 65 ms" in drawn(read, graph=graph)
    alone = {**graph, "critical_path": ["a"]}
    assert not any("critical path" in line for line in drawn(read, graph=alone))
