"""Worker processes that a test starts, stops, kills, and looks into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coordinator.demo.launch import package_environment
from tests.workers.asking import Service

ROOT = Path(__file__).parents[2]


class Researcher:
    """See `tests.workers.researcher`."""

    def __init__(
        self, service: Service, name: str, max_tasks: int, folder: Path, kind: str = "gated"
    ) -> None:
        self.name = name
        self._began = folder / f"began-{name}"
        self._gate = folder / f"open-{name}"
        command = [sys.executable, "-m", "tests.workers.researcher", service.address, service.key]
        self.process = subprocess.Popen([*command, name, str(max_tasks), str(folder), kind], cwd=ROOT)

    def began(self) -> list[tuple[str, int, int]]:
        """Task, token, and how many ran at once, of each task that it has begun."""
        if not self._began.exists():
            return []
        lines = [line.split() for line in self._began.read_text().splitlines()]
        return [(id, int(token), int(at_once)) for id, token, at_once in lines]

    def open(self) -> None:
        """What it has begun may end, and what it begins from now on ends at once."""
        self._gate.touch()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def researchers(
    service: Service, names: list[str], max_tasks: int, folder: Path
) -> Iterator[list[Researcher]]:
    with ExitStack() as stack:
        made = []
        for name in names:
            made.append(Researcher(service, name, max_tasks, folder))
            stack.callback(ended, made[-1].process)
        yield made


def ended(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """It is gone, whatever it did."""
    process.kill()
    process.wait()


def program_worker(
    service: Service, command: str, folder: Path, *options: str, name: str = "programs", max_tasks: int = 1
) -> subprocess.Popen[str]:
    """`coordinator worker --exec`, whose tasks' logs are in ``folder``."""
    arguments = [
        "--url",
        service.address,
        "--name",
        name,
        "--max-tasks",
        str(max_tasks),
        "--log-dir",
        str(folder),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "worker", *arguments, *options, "--exec", command],
        env={**os.environ, **package_environment(), "COORDINATOR_KEY": service.key},
        stderr=subprocess.PIPE,
        text=True,
    )
