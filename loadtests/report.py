"""The figures as text, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

import msgspec

from loadtests.cases import Row
from loadtests.check import Checked
from loadtests.idle import Idle

CPU = ("server", "providers", "postgres", "driver")
WIDTHS = {"case": 20, "type": 14, "clients": 4}
FLOOR = "floor, log each"
STEADY = 0.2
"""How much the floor may move."""


class Report(msgspec.Struct, kw_only=True):
    """Everything one run found. ``rows`` in the order in which they ran."""

    environment: dict[str, str]
    sizes: str
    rows: list[Row] = []
    idle: Idle | None = None
    checked: Checked | None = None

    def ratio(self, row: Row) -> float | None:
        """decisions/s over the mean floor at the same number of clients, of those measured so far."""
        floors = [one.per_s for one in self.rows if one.case == FLOOR and one.clients == row.clients]
        return row.per_s / mean(floors) if floors else None

    def as_json(self) -> bytes:
        rows = [{**msgspec.to_builtins(row), "ratio_to_floor": self.ratio(row)} for row in self.rows]
        return msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(self), "rows": rows}), indent=2)


def table(report: Report) -> str:
    return "\n".join([_heading(), *(line(report, row) for row in report.rows)])


def steadiness(report: Report) -> str:
    """How much the floor itself moved between before and after: ratios are no better than that."""
    moved: dict[int, float] = {}
    for clients in dict.fromkeys(row.clients for row in report.rows if row.case == FLOOR):
        rates = [row.per_s for row in report.rows if row.case == FLOOR and row.clients == clients]
        moved[clients] = max(rates) / min(rates) - 1
    said = ", ".join(f"{part:.0%} at {clients} clients" for clients, part in moved.items())
    verdict = ". NOT STEADY: repeat it on an idle machine" if max(moved.values()) > STEADY else ""
    return f"between before and after, the floor moved by {said}{verdict}"


def _heading() -> str:
    figures = ("per s", "x floor", "p50", "p95", "p99", "tx", "xid", "WAL kB", *CPU, "errors", "left")
    names = "  ".join(
        name.rjust(width) if name == "clients" else name.ljust(width)
        for name, width in {**WIDTHS, "clients": 7}.items()
    )
    return f"{names}  {'  '.join(name.rjust(_width(name)) for name in figures)}"


def line(report: Report, row: Row) -> str:
    figures = {
        "per s": _figure(row.per_s, 0),
        "x floor": _figure(report.ratio(row), 2),
        "p50": _figure(row.p50, 1),
        "p95": _figure(row.p95, 1),
        "p99": _figure(row.p99, 1),
        "tx": _figure(row.tx, 2),
        "xid": _figure(row.xid, 2),
        "WAL kB": _figure(row.wal_kb, 1),
        **{name: _figure(row.cpu_ms.get(name), 2) for name in CPU},
        "errors": str(sum(row.errors.values())),
        "left": str(row.left),
    }
    names = f"{row.case.ljust(WIDTHS['case'])}  {row.type.ljust(WIDTHS['type'])}  {row.clients:7}"
    return f"{names}  {'  '.join(text.rjust(_width(name)) for name, text in figures.items())}"


def preamble(environment: Mapping[str, str], sizes: str) -> str:
    lines = [f"{name.ljust(11)} {value}" for name, value in environment.items()]
    return "\n".join([*lines, f"{'row bytes'.ljust(11)} {sizes}"])


def idle_text(idle: Idle) -> str:
    stages = ", ".join(f"{name} {ms:g}" for name, ms in idle.stages.items())
    verdict = "met" if idle.met else "MISSED"
    return (
        f"idle target {verdict}: a decision takes {idle.latency:.1f} ms at the median; allowed are 1.25 x its slowest source "
        f"({idle.slowest_source:.1f} ms) + one commit ({idle.one_commit:.2f} ms) = {idle.target:.1f} ms\n"
        f"            its timeline, medians in ms: {stages}"
    )


def checked_text(checked: Checked) -> str:
    return (
        f"{'right' if checked.ok else 'WRONG'}: {checked.acknowledged} decisions acknowledged, {checked.lost} lost, "
        f"{checked.unasked} unasked; {checked.effects_succeeded} effects succeeded, {checked.effects_in_ledger} in the "
        f"providers' ledger, {checked.effects_more_than_once} more than once"
    )


def problems(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"errors of {row.case}, {row.type}, {row.clients}: {row.errors}" for row in rows if row.errors
    )


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _width(name: str) -> int:
    return max(6, len(name))
