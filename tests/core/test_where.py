"""A mistake is laid at the user's door: the nearest line outside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import coordinator
from coordinator.core.where import declared_at

PACKAGE = Path(coordinator.__file__).parent
DECLARING = "\n\nwhere = declared_at()\n"


def declared_in(filename: str, source: str = DECLARING, **names: object) -> str:
    """What `declared_at` says to code that stands in a file of this name."""
    known: dict[str, object] = {"declared_at": declared_at, **names}
    exec(compile(source, filename, "exec"), known)
    return str(known["where"])


def test_a_users_file_is_named_with_its_line() -> None:
    assert declared_in("/srv/quotes.py") == "quotes.py:3"


@pytest.mark.parametrize("beside", ["coordinator_quotes/rules.py", "coordinator-rules.py", "coordinators.py"])
def test_a_file_beside_the_package_with_a_similar_name_is_the_users(beside: str) -> None:
    assert declared_in(str(PACKAGE.parent / beside)) == f"{Path(beside).name}:3"


def test_frames_of_the_package_are_passed_over() -> None:
    ours = "def helper():\n    return declared_at()\nwhere = helper\n"
    known: dict[str, object] = {"declared_at": declared_at}
    exec(compile(ours, str(PACKAGE / "core" / "imagined.py"), "exec"), known)
    assert declared_in("/srv/quotes.py", "\n\n\n\nwhere = helper()\n", helper=known["where"]) == "quotes.py:5"


@pytest.mark.parametrize("folder", ["demo", "testing"])
def test_what_the_demo_and_the_suite_declare_is_theirs(folder: str) -> None:
    assert declared_in(str(PACKAGE / folder / "imagined.py")) == "imagined.py:3"
