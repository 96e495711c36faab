"""Imports point one way: core <- store <- engine <- api/console <- app/cli, and core computes without touching the world.

Read from the sources, not from what happens to be imported: a line that breaks a rule is named as file:line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIFTED = frozenset({"api", "console"})
LAYERS = {"core": 0, "store": 1, "engine": 2, "api": 3, "console": 3, "app": 4, "worker": 4, "cli": 5}
"""worker is a client, a program of its own: what it shares with the service is core."""
ANYTHING = frozenset({"demo", "testing"})
"""Programs of their own on top of everything; the command line starts them."""
GROUND = frozenset({"errors", "config", "failpoints", "logs", "telemetry", "embedded"})
"""Beside the layers, for all of them: these import core and each other alone."""
CORE_PACKAGES = frozenset({"msgspec", "rfc8785", "iso4217"})
WORLD = frozenset(
    {"time", "random", "secrets", "asyncio", "socket", "os", "threading", "subprocess", "anyio", "logging"}
)
DOING = frozenset({"open", "print", "input", "exec", "eval"})
CLOCKS = frozenset({"now", "utcnow", "today"})


def part_of(path: Path) -> str:
    """`core` for coordinator/core/x.py, `errors` for coordinator/errors.py, `` for coordinator/__init__.py."""
    inside = path.relative_to(ROOT / "coordinator").parts
    return inside[0].removesuffix(".py") if inside != ("__init__.py",) else ""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module imported anywhere in a file, with relative names made absolute."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names


def where(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} {what}"


def inner_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of the coordinator for every import from it; `` for the package's own names."""
    for line, name in imported(path):
        first, *rest = name.split(".")
        if first == "coordinator":
            known = {*LAYERS, *GROUND, *ANYTHING}
            yield line, rest[0] if rest and rest[0] in known else ""


def forbidden(importer: str, target: str) -> bool:
    if importer in ANYTHING or importer == target:
        return False
    if importer in GROUND:
        return target not in GROUND | {"core"}
    if importer == "core":
        return target != "errors"
    if importer == "worker":
        return target not in GROUND | {"core"}
    if target in GROUND:
        return False
    if importer == "":
        return target not in {*LAYERS, *GROUND} - {"cli"}
    if {importer, target} == LIFTED:
        return True
    if target in ANYTHING:
        return importer != "cli"
    return LAYERS.get(target, 99) > LAYERS[importer]


def test_every_file_of_the_package_belongs_to_a_layer() -> None:
    known = {*LAYERS, *GROUND, *ANYTHING, ""}
    assert [
        str(path.relative_to(ROOT)) for path in sources("coordinator") if part_of(path) not in known
    ] == []


def test_imports_point_towards_core() -> None:
    broken = [
        where(path, line, f"{part_of(path) or 'the package'} imports {target or 'the package itself'}")
        for path in sources("coordinator")
        for line, target in inner_imports(path)
        if forbidden(part_of(path), target)
    ]
    assert broken == []


def test_core_imports_only_the_standard_library_and_three_pure_packages() -> None:
    broken = [
        where(path, line, name)
        for path in sources("coordinator/core")
        for line, name in imported(path)
        if not is_standard(name) and name.split(".")[0] not in {*CORE_PACKAGES, "coordinator"}
    ]
    assert broken == []


def test_core_has_no_clock_no_randomness_and_no_input_or_output() -> None:
    broken = []
    for path in sources("coordinator/core"):
        broken += [where(path, line, name) for line, name in imported(path) if name.split(".")[0] in WORLD]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in CLOCKS:
                broken.append(where(path, node.lineno, f".{node.attr}: a clock is an argument"))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DOING:
                broken.append(where(path, node.lineno, node.func.id))
    assert broken == []


def test_adapters_see_of_the_coordinator_only_its_core_and_what_that_raises() -> None:
    broken = [
        where(path, line, name)
        for path in sources("adapters")
        for line, name in imported(path)
        if name.split(".")[0] == "coordinator" and name.split(".")[1] not in {"core", "errors"}
    ]
    assert broken == []


def test_the_coordinator_never_imports_an_adapter() -> None:
    broken = [
        where(path, line, name)
        for path in sources("coordinator")
        if part_of(path) not in ANYTHING
        for line, name in imported(path)
        if name.split(".")[0] == "adapters"
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("importer", "target", "refused"),
    [
        ("core", "store", True),
        ("core", "errors", False),
        ("store", "engine", True),
        ("store", "core", False),
        ("engine", "api", True),
        ("api", "engine", False),
        ("api", "console", True),
        ("cli", "app", False),
        ("cli", "worker", False),
        ("worker", "core", False),
        ("worker", "store", True),
        ("api", "worker", True),
        ("cli", "demo", False),
        ("app", "cli", True),
        ("engine", "demo", True),
        ("errors", "store", True),
        ("engine", "", True),
        ("testing", "cli", False),
    ],
)
def test_the_rule_itself_refuses_what_it_should(importer: str, target: str, refused: bool) -> None:
    assert forbidden(importer, target) is refused
