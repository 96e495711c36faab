"""House rules that a reader would otherwise have to remember: sizes, docstrings, broad excepts, sleeps, codes, telemetry, paths.

Read from the sources; whatever breaks a rule is named as file:line.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from coordinator import errors, telemetry

ROOT = Path(__file__).parent.parent
LONGEST_BODY = 70
LONGEST_FILE = 400
TRIVIAL_STATEMENTS = 6
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

SLEEPS = {
    "tests/support/waiting.py": "the bounded poll that every other test waits with",
    "tests/test_providers.py": "polls another process within a bound; there is no loop of ours to wait with",
    "tests/adapters/test_postgres.py": "polls the server within a bound",
    "tests/adapters/test_http.py": "a server that is slow on purpose",
    "tests/api/test_protocol.py": "a client that is slow on purpose",
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def place(path: Path, line: int, what: str = "") -> str:
    return f"{named(path)}:{line} {what}".rstrip()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def definitions(tree: ast.AST) -> Iterator[Definition]:
    return (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def length(node: Definition) -> int:
    """Lines of the body, the docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def is_trivial(node: Definition) -> bool:
    """Whether the signature says it all: a stub, fields alone, or so few statements that they are their own description."""
    if isinstance(node, ast.ClassDef):
        return all(
            isinstance(each, ast.AnnAssign | ast.Pass) or undocumented_is_fine(each) for each in node.body
        )
    return sum(isinstance(each, ast.stmt) for each in ast.walk(node)) - 1 <= TRIVIAL_STATEMENTS


def undocumented_is_fine(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
        node.name.startswith("_") or is_trivial(node)
    )


def public(body: Iterable[ast.stmt]) -> Iterator[Definition]:
    """Public definitions of a module or class, and those inside its public classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def broad_handlers(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every handler of Exception, BaseException or anything at all."""
    lines = path.read_text().splitlines()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ExceptHandler) and (
            node.type is None or {"Exception", "BaseException"} & names_in(node.type)
        ):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.body[0].lineno])


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def goes_on(path: Path, line: int) -> bool:
    """Whether the handler on that line ends in a raise: it cleans up or translates, and keeps nothing to itself."""
    return any(
        isinstance(node, ast.ExceptHandler) and node.lineno == line and isinstance(node.body[-1], ast.Raise)
        for node in ast.walk(parsed(path))
    )


def sleeping(path: Path) -> Iterator[int]:
    """Lines with a sleep, or a mention of one; ``sleep(0)`` only hands over to other tasks."""
    tree = parsed(path)
    yielding = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == 0
    }
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name == "sleep" and node not in yielding:
            yield getattr(node, "lineno", 0)


def test_every_module_says_what_it_is_for() -> None:
    silent = [named(path) for path in sources("coordinator", "adapters", "tests") if path.read_text().strip()]
    silent = [name for name in silent if not ast.get_docstring(parsed(ROOT / name))]
    assert silent == []


def test_what_core_offers_says_what_its_name_and_signature_do_not() -> None:
    silent = [
        place(path, node.lineno, node.name)
        for path in sources("coordinator/core")
        for node in public(parsed(path).body)
        if not ast.get_docstring(node) and not is_trivial(node)
    ]
    assert silent == []


def test_no_docstring_merely_restates_a_name() -> None:
    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z]+", text.lower())) - {"the", "a", "an", "of", "to", "this", "s", "for"}

    idle = [
        place(path, node.lineno, node.name)
        for path in sources("coordinator", "adapters")
        for node in definitions(parsed(path))
        if (text := ast.get_docstring(node))
        and words(text) <= words(re.sub(r"([A-Z])", r" \1", node.name).replace("_", " "))
    ]
    assert idle == []


def test_no_body_is_longer_than_a_reader_holds_in_mind() -> None:
    long = [
        place(path, node.lineno, f"{node.name}: {length(node)} lines")
        for path in sources("coordinator", "adapters")
        for node in definitions(parsed(path))
        if not isinstance(node, ast.ClassDef) and length(node) > LONGEST_BODY
    ]
    assert long == []


def test_no_file_needs_a_table_of_contents() -> None:
    long = [
        f"{named(path)}: {count} lines"
        for path in sources("coordinator", "adapters")
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE
    ]
    assert long == []


def test_whoever_catches_everything_and_keeps_it_says_why_on_the_spot() -> None:
    unexplained = [
        place(path, line, text.splitlines()[0].strip())
        for path in sources("coordinator", "adapters")
        for line, text in broad_handlers(path)
        if not re.search(r"#(?! noqa: \w+$) \w+", text, re.MULTILINE) and not goes_on(path, line)
    ]
    assert unexplained == []


def test_no_test_sleeps_but_those_with_a_reason() -> None:
    asleep = {named(path): list(sleeping(path)) for path in sources("tests")}
    assert {name: lines for name, lines in asleep.items() if lines and name not in SLEEPS} == {}
    assert [name for name in SLEEPS if not asleep.get(name)] == [], "no longer needed in the list"


def leaves(kind: type[Exception]) -> list[type[Exception]]:
    below = [
        leaf
        for child in kind.__subclasses__()
        if child.__module__ == errors.__name__
        for leaf in leaves(child)
    ]
    return below or [kind]


ALL_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.CoordinatorError)
]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in ALL_ERRORS if "code" in vars(kind)]
    assert sorted(codes) == sorted(set(codes))
    assert [kind.__name__ for kind in leaves(errors.CoordinatorError) if "code" not in vars(kind)] == []


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_an_errors_code_is_kebab_case_and_stands_in_the_tree_at_the_top(
    kind: type[errors.CoordinatorError],
) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.code)
    tree = errors.__doc__ or ""
    assert re.search(rf"\b{kind.__name__}\b", tree)
    if issubclass(kind, errors.RequestRefused) and kind is not errors.RequestRefused:
        assert re.search(rf"\b{kind.__name__} +\d{{3}} {kind.code}\b", tree)


def test_the_tree_at_the_top_names_no_error_that_is_not_there() -> None:
    named_there = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert set(named_there) == {kind.__name__ for kind in ALL_ERRORS} - {"CoordinatorError"}


def metrics() -> dict[str, tuple[str, str, str]]:
    """By the constant that holds it: a metric's exported name, type and labels, read where it is defined."""
    found = {}
    for node in parsed(ROOT / "coordinator/telemetry.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
                    name, _, labels = (ast.literal_eval(argument) for argument in call.args)
                    found[node.targets[0].id] = (name, call.func.id.lower(), ", ".join(labels))
    return found


KINDS = {"Counter", "Gauge", "Histogram"}
METRICS = metrics()


def test_the_table_of_metrics_is_what_is_defined() -> None:
    rows = re.findall(r"^    (coordinator_\w+) +(\w+) +(.+)$", telemetry.__doc__ or "", re.MULTILINE)
    assert len(rows) > 5
    assert sorted(rows) == sorted(METRICS.values())


def test_every_metric_is_exported_under_its_name() -> None:
    exported = generate_latest().decode()
    assert [name for name, *_ in METRICS.values() if f"# TYPE {name} " not in exported] == []


def test_the_table_of_spans_is_what_is_defined() -> None:
    rows = re.findall(r"^    (coordinator\.\w+) ", telemetry.__doc__ or "", re.MULTILINE)
    assert rows == list(telemetry.SPANS)


def test_every_metric_is_emitted_somewhere() -> None:
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in sources("coordinator")
        if path.name != "telemetry.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert set(METRICS) - used == set()


@functools.cache
def spans_begun() -> set[str]:
    """Names of spans given as they are, and the stages of a decision, each of which is one."""
    begun = set()
    for path in sources("coordinator"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    begun |= {first.value} if node.func.attr == "span" else set()
                    begun |= {f"coordinator.{first.value}"} if node.func.attr == "stage" else set()
    return begun


@pytest.mark.parametrize("name", telemetry.SPANS)
def test_every_span_in_the_table_is_begun_somewhere(name: str) -> None:
    assert name in spans_begun()


def test_no_span_is_begun_that_is_not_in_the_table() -> None:
    assert spans_begun() <= set(telemetry.SPANS)


# Assembled, so that this file does not break its own rule.
MACHINE = [
    r"(?<![\w.])/(?:work|home|root|Users)/\w",
    r"\bshared" + r"/\w",
    r"\b(?:DESIGN|CONTRACT|STYLE|FACTS|HOUSE)\.md\b",
    r"\bpypi\.org\b|\bpythonhosted\b|\bregistry\.npmjs\b|\bproxy\.golang\b",
    r"--(?:extra-)?index-url|PIP_INDEX_URL|UV_INDEX",
]


def tracked_texts() -> Iterator[tuple[Path, str]]:
    """Every text file that git knows of or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path != Path(__file__) and path.is_file():
            try:
                yield path, path.read_text()
            except UnicodeDecodeError:
                continue


def test_nothing_in_the_tree_knows_the_machine_it_was_written_on() -> None:
    rule = re.compile("|".join(MACHINE))
    known = [
        place(path, number, line.strip()[:100])
        for path, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if rule.search(line)
    ]
    assert known == []
