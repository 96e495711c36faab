"""What a decision waited for: the slowest chain of readings, each of which came after the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.graph import Graph, graph_of


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, list[str]], dict[str, int]]:
    names = [f"e{n}" for n in range(draw(st.integers(0, 7)))]
    after = {
        name: draw(st.lists(st.sampled_from(names[:n]), unique=True)) if n else []
        for n, name in enumerate(names)
    }
    read = draw(st.sets(st.sampled_from(names))) if names else set()
    return after, {name: draw(st.integers(0, 50)) for name in names if name in read}


def chains(after: Mapping[str, Sequence[str]], read: set[str], end: str) -> list[list[str]]:
    before = [chain for each in after[end] if each in read for chain in chains(after, read, each)]
    return [[*chain, end] for chain in before] or [[end]]


@given(graphs())
def test_the_critical_path_is_the_slowest_of_all_chains(
    given_: tuple[dict[str, list[str]], dict[str, int]],
) -> None:
    after, elapsed = given_
    made = graph_of(after, elapsed)
    every = [chain for name in elapsed for chain in chains(after, set(elapsed), name)]
    assert made.critical_path_ms == max((sum(elapsed[each] for each in chain) for chain in every), default=0)
    assert sum(elapsed[name] for name in made.critical_path) == made.critical_path_ms
    for earlier, later in zip(made.critical_path, made.critical_path[1:], strict=False):
        assert earlier in after[later]
    assert made.total_work_ms == sum(elapsed.values()) >= made.critical_path_ms


def test_a_diamond_waits_for_its_slower_side() -> None:
    after: dict[str, list[str]] = {"top": [], "left": ["top"], "right": ["top"], "bottom": ["left", "right"]}
    made = graph_of(after, {"top": 10, "left": 30, "right": 20, "bottom": 5})
    assert made == Graph(critical_path=["top", "left", "bottom"], critical_path_ms=45, total_work_ms=65)


def test_what_was_not_read_is_no_part_of_it() -> None:
    assert graph_of({"a": [], "b": ["a"]}, {"a": 7}) == Graph(
        critical_path=["a"], critical_path_ms=7, total_work_ms=7
    )
    assert graph_of({"a": []}, {}) == Graph(critical_path=[], critical_path_ms=0, total_work_ms=0)
