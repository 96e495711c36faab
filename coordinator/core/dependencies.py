"""What comes after what: the evidence of a decision type as a graph, checked when it is declared.

An unknown name, a cycle, an address that is made of something that will not be there: each is a `DeclarationError` that names the
line to mend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from coordinator.core.evidence import EACH, Addressed, Evidence
from coordinator.errors import DeclarationError

NAME = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")
LIST = re.compile(r"(input|evidence\.[a-z][a-z0-9-]*)(\.[A-Za-z_][A-Za-z0-9_-]*)+\Z")
MAX_EVIDENCE = 64


def in_dependency_order(
    evidence: Sequence[Evidence[Any, Any]], request: type[Any], wrong: Callable[[str], DeclarationError]
) -> dict[str, Evidence[Any, Any]]:
    """By name, each after what it depends on. Raises `DeclarationError` for what cannot be."""
    if len(evidence) > MAX_EVIDENCE:
        raise wrong(f"{len(evidence)} pieces of evidence; at most {MAX_EVIDENCE}")
    known: dict[str, Evidence[Any, Any]] = {}
    for declared in evidence:
        if not NAME.match(declared.name):
            raise DeclarationError(
                f"evidence {declared.name!r}: a name is 1..63 of a-z, 0-9 and -", declared.where
            )
        if declared.name == EACH:
            raise DeclarationError(
                f"evidence {EACH!r}: that is what for_each calls one of its list", declared.where
            )
        if declared.name in known:
            raise DeclarationError(f"evidence {declared.name!r} is declared twice", declared.where)
        known[declared.name] = declared
    for declared in evidence:
        _check_after(declared, known)
        for path in declared.source.asks_for if isinstance(declared.source, Addressed) else ():
            _check_path(declared, path, request)
        if declared.for_each is not None:
            _check_list(declared, declared.for_each, request)
    return _topological(known)


def _check_path(declared: Evidence[Any, Any], path: str, request: type[Any]) -> None:
    """What a source's address is made of has to be there: a field of the request, or evidence that comes before."""
    fields = {field.name for field in msgspec.structs.fields(request)}
    root, first, *_ = [*path.split("."), ""]
    if root == "input" and first not in fields:
        known = ", ".join(sorted(fields))
        raise DeclarationError(
            f"evidence {declared.name!r}: {{{path}}}: the request has no {first!r}, only {known}",
            declared.where,
        )
    if root == "evidence" and first not in declared.after:
        raise DeclarationError(
            f"evidence {declared.name!r}: {{{path}}}: add after=[{first!r}], so that it is there",
            declared.where,
        )
    if root == EACH and declared.for_each is None:
        raise DeclarationError(
            f"evidence {declared.name!r}: {{{path}}}: say which list with for_each=...", declared.where
        )


def _check_list(declared: Evidence[Any, Any], path: str, request: type[Any]) -> None:
    if not LIST.match(path):
        raise DeclarationError(
            f"evidence {declared.name!r}: for_each must be a path such as input.sites or evidence.order.lines, "
            f"not {path!r}",
            declared.where,
        )
    _check_path(declared, path, request)


def _check_after(declared: Evidence[Any, Any], known: Mapping[str, Evidence[Any, Any]]) -> None:
    for name in declared.after:
        if name not in known:
            raise DeclarationError(
                f"evidence {declared.name!r} comes after {name!r}, which is not declared here", declared.where
            )
        if known[name].on_demand and not declared.on_demand:
            raise DeclarationError(
                f"evidence {declared.name!r} comes after {name!r}, which is on_demand: make both on_demand",
                declared.where,
            )


def _topological(known: Mapping[str, Evidence[Any, Any]]) -> dict[str, Evidence[Any, Any]]:
    ordered: dict[str, Evidence[Any, Any]] = {}
    waiting = dict(known)
    while waiting:
        ready = [
            name for name, declared in waiting.items() if all(before in ordered for before in declared.after)
        ]
        if not ready:
            cycle = _cycle(waiting)
            names = " after ".join([*cycle, cycle[0]])
            raise DeclarationError(f"evidence depends on itself: {names}", waiting[cycle[0]].where)
        for name in ready:
            ordered[name] = waiting.pop(name)
    return ordered


def _cycle(waiting: Mapping[str, Evidence[Any, Any]]) -> list[str]:
    """Names each of which comes after the next, and the last after the first. Each of ``waiting`` waits for another of them."""
    path = [next(iter(waiting))]
    while True:
        before = next(name for name in waiting[path[-1]].after if name in waiting)
        if before in path:
            return path[path.index(before) :]
        path.append(before)


def closure(after: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """All that comes before each, however indirectly. ``after`` is in an order in which each follows what it depends on, and so are
    the answers."""
    before: dict[str, set[str]] = {}
    for name, direct in after.items():
        before[name] = set(direct).union(*(before[each] for each in direct))
    return {name: tuple(each for each in after if each in names) for name, names in before.items()}
