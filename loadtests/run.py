"""`python -m loadtests.run`: the floor, the cases, the table. How to read it: the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator.demo.launch import Process
from loadtests.cases import Row, floor_row, http_row, inproc_row, plan_for
from loadtests.check import check
from loadtests.decision_types import TYPES
from loadtests.floor import Floor
from loadtests.idle import idle_case
from loadtests.load import Measured, Plan
from loadtests.machine import environment
from loadtests.report import Report, checked_text, idle_text, line, preamble, problems, steadiness, table
from loadtests.world import World, world

CASES = ("closed", "open", "hot", "idle", "processes")
OPEN_SHARE = 0.5
"""Of the closed loop's rate at the most clients."""
WARMUP_DECISIONS_S = 1.0


class Run:
    """The state of one run. Rows go to stderr as they come; the table at the end has them all, with their final ratios."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world = world
        self.seconds: float = options.seconds
        self.clients: Sequence[int] = options.clients
        self.types: Sequence[str] = options.types
        self.wanted: Sequence[str] = options.only
        self.inproc: bool = options.inproc
        self.acknowledged: dict[str, int] = {}
        found = environment(world)
        with world.server(1) as server:
            plan = plan_for("three-sources", 4, WARMUP_DECISIONS_S)
            self._count(plan, http_row(world, server, "", plan)[1])
        self.floor = Floor(world)
        self.report = Report(environment=found, sizes=self.floor.sample.sizes())
        print(preamble(found, self.report.sizes), flush=True)

    def all(self) -> None:
        with self.world.server(1) as server:
            for clients in self.clients:
                with self._between_floors(clients):
                    self._at(server, clients)
            if "open" in self.wanted:
                self._open(server)
            if "idle" in self.wanted:
                row, self.report.idle = idle_case(self.world, server, self.floor, self.seconds)
                self._print(row)
        if "processes" in self.wanted:
            with self.world.server(2) as server:
                for type in self.types:
                    self._http(server, "2 processes", plan_for(type, max(self.clients), self.seconds))
        self.report.checked = check(self.world, self.acknowledged)

    @contextmanager
    def _between_floors(self, clients: int) -> Iterator[None]:
        """The floor before and after: a machine that changes its speed meanwhile shows."""
        self._print(floor_row(self.world, self.floor, clients, self.seconds, "one"))
        self._print(floor_row(self.world, self.floor, clients, self.seconds, "each"))
        yield
        self._print(floor_row(self.world, self.floor, clients, self.seconds, "each"))

    def _at(self, server: Process, clients: int) -> None:
        if "closed" in self.wanted:
            for type in self.types:
                self._http(server, "closed", plan_for(type, clients, self.seconds))
        if self.inproc:
            for type in self.types:
                plan = plan_for(type, clients, self.seconds)
                row, measured = inproc_row(self.world, "in process", plan)
                self._count(plan, measured)
                self._print(row)
        if "hot" in self.wanted and clients == max(self.clients):
            self._http(server, "hot", plan_for(self.types[0], clients, self.seconds, hot=True))

    def _open(self, server: Process) -> None:
        for closed in [row for row in self.report.rows if row.case == "closed"]:
            if closed.clients == max(self.clients):
                rate = max(1.0, OPEN_SHARE * closed.per_s)
                plan = plan_for(closed.type, 0, self.seconds, rate=rate)
                self._http(server, f"open, {rate:.0f}/s", plan)

    def _http(self, server: Process, case: str, plan: Plan) -> None:
        row, measured = http_row(self.world, server, case, plan)
        self._count(plan, measured)
        self._print(row)

    def _count(self, plan: Plan, measured: Measured) -> None:
        self.acknowledged[plan.prefix] = measured.committed + measured.warmed_up

    def _print(self, row: Row) -> None:
        self.report.rows.append(row)
        print(line(self.report, row), file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement (default 10)")
    parser.add_argument("--clients", type=_numbers, default=[1, 16, 64], help="default 1,16,64")
    parser.add_argument("--types", type=_names(TYPES), default=list(TYPES), help=f"of {','.join(TYPES)}")
    parser.add_argument("--only", type=_names(CASES), default=list(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--inproc", action="store_true", help="the engine without HTTP, too")
    parser.add_argument(
        "--data", type=Path, help="a folder on the disk to measure (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not all(1 <= number <= 900 for number in numbers):
        raise argparse.ArgumentTypeError("clients must be within 1..900")
    return numbers


class _names:
    """Parses a comma-separated choice."""

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in self.known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(self.known)}")
        return names


def main() -> int:
    """0: all is right. 1: what was acknowledged and what is there differ."""
    options = parse()
    with (
        tempfile.TemporaryDirectory(prefix="loadtests-", dir=options.data) as folder,
        world(Path(folder)) as made,
    ):
        run = Run(made, options)
        run.all()
    report = run.report
    print(f"\n{table(report)}\n\n{steadiness(report)}")
    if said := problems(report.rows):
        print(f"\n{said}")
    if report.idle is not None:
        print(f"\n{idle_text(report.idle)}")
    assert report.checked is not None
    print(f"\n{checked_text(report.checked)}")
    if options.json is not None:
        options.json.write_bytes(report.as_json())
    return 0 if report.checked.ok else 1


if __name__ == "__main__":
    sys.exit(main())
