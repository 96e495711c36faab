"""Failpoints: off unless the environment names them, and a name that is none ends the process before it serves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import failpoints
from coordinator.demo.launch import package_environment
from coordinator.errors import CommitUnknown
from coordinator.failpoints import ACTIONS, POINTS, FailpointError, actions, arm, failpoint, parse


@pytest.mark.parametrize(
    "text",
    [
        "nowhere=kill",
        "commit.before",
        "commit.before=explode",
        "commit.before=kill@0",
        "commit.before=kill@x",
        "=kill",
    ],
)
def test_what_is_no_failpoint_is_refused_with_the_list_of_all(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not NAME=kill\|raise\|hang\|lose") as refused:
        parse(text)
    assert all(point in str(refused.value) for point in POINTS)


def test_a_reply_can_be_lost_only_where_one_is_under_way() -> None:
    assert parse("commit.after=lose@2,gather.after=hang") == {
        "commit.after": ("lose", 2),
        "gather.after": ("hang", 1),
    }
    with pytest.raises(ValueError, match="a reply can be lost at"):
        parse("gather.after=lose")
    assert "lose" not in actions("decide.after")
    assert actions("settle.after") == ACTIONS


def python(code: str, armed: str) -> subprocess.CompletedProcess[str]:
    env = {**package_environment(), "COORDINATOR_FAILPOINTS": armed}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


def test_a_process_told_of_an_unknown_failpoint_does_not_start() -> None:
    done = python("import coordinator.app", "commit.befor=kill")
    assert done.returncode == 1
    assert "'commit.befor=kill' is not NAME=" in done.stderr


def test_kill_is_the_signal_that_nothing_can_catch() -> None:
    code = "import asyncio; from coordinator.failpoints import failpoint; asyncio.run(failpoint('commit.before'))"
    assert python(code, "commit.before=kill").returncode == -signal.SIGKILL
    assert python(code, "commit.before=kill@2").returncode == 0
    assert python(code, "").returncode == 0


async def test_a_failpoint_fires_once_at_the_passing_that_was_named() -> None:
    arm("commit.after=lose@2,dispatch.sent=lose,gather.after=raise")
    await failpoint("commit.after")
    with pytest.raises(CommitUnknown):
        await failpoint("commit.after")
    await failpoint("commit.after")
    with pytest.raises(ConnectionResetError):
        await failpoint("dispatch.sent")
    with pytest.raises(FailpointError):
        await failpoint("gather.after")


def test_every_point_is_passed_somewhere() -> None:
    """The two pairs that `Operations` passes are named there by their first word."""
    package = Path(failpoints.__file__).parent
    sources = [path.read_text() for layer in ("engine", "store") for path in (package / layer).glob("*.py")]
    named = {name for text in sources for name in re.findall(r'await failpoint\(f?"([^"]+)"\)', text)}
    said = named - {"{point}.before", "{point}.after"}
    pairs = {f"{word}.{edge}" for word in ("resolve", "notice") for edge in ("before", "after")}
    assert said | pairs == set(POINTS)
