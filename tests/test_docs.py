"""What README and ARCHITECTURE say is true of this tree: the example loads and is typed, and every file they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.app import load
from coordinator.core.decision import Coordinator

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
NAMED = re.compile(r"`((?:coordinator|adapters|tests|loadtests)/[\w/.{},]+)`")


def expanded(name: str) -> list[str]:
    """``a/{b,c}.py`` as the shell would read it."""
    choice = re.search(r"\{(.*?)\}", name)
    if choice is None:
        return [name]
    return [name.replace(choice[0], part) for part in choice[1].split(",")]


def named_files() -> list[str]:
    return sorted({file for name in NAMED.findall(README + ARCHITECTURE) for file in expanded(name)})


@pytest.mark.parametrize("name", named_files())
def test_every_file_that_is_named_is_there(name: str) -> None:
    assert (ROOT / name).exists()


def example() -> str:
    return README.split("```python\n", 1)[1].split("```", 1)[0]


def test_the_example_of_the_readme_loads_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quotes.py").write_text(example())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load("quotes:coordinator")
    assert isinstance(loaded, Coordinator)
    assert list(loaded.types) == ["proposal-quote"]


def test_the_example_of_the_readme_is_strictly_typed(tmp_path: Path) -> None:
    module = tmp_path / "quotes.py"
    module.write_text(example())
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(module)], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
