"""`coordinator demo` as a process of its own, and the command line run against it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from coordinator.cli import main
from coordinator.demo.launch import Process, package_environment, python_module

COMMAND = python_module("coordinator.cli")
TIMEOUT_S = 90.0


def demo_process(data: Path, *options: str) -> Process:
    """Not started yet; `ready` is the line it prints."""
    return Process(
        [*COMMAND, "demo", "--no-tour", "--json", "--data", str(data), *options],
        env=package_environment(),
        timeout_s=TIMEOUT_S,
    )


def coordinator(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a process of its own, with no settings but those given."""
    inherited = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**inherited, **package_environment(), **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def coordinator_here(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same within this process, which saves a second of imports. An error that nobody expected is raised."""
    unset = {name: None for name in os.environ if _is_setting(name)}
    done = CliRunner(env={**unset, **(env or {})}).invoke(main, arguments, prog_name="coordinator")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess([*COMMAND, *arguments], done.exit_code, done.stdout, done.stderr)


def _is_setting(name: str) -> bool:
    return name.startswith("COORDINATOR_") or name == "DATABASE_URL"


def as_json(finished: subprocess.CompletedProcess[str]) -> Any:
    """Its one line of output."""
    assert finished.stdout.count("\n") == 1, finished
    return msgspec.json.decode(finished.stdout)


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not reaped yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
