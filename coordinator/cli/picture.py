"""One decision as a picture: when each stage and each reading ran, what the fence compared, what was sent.

Bars share one time axis. Nothing is drawn that is not in the decision; what took less than half a millisecond is a tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coordinator.cli.effects import effects
from coordinator.cli.review import review
from coordinator.cli.say import STATE_STYLES, short
from coordinator.core.money import Money

WIDTH = 40
MILLISECOND = timedelta(milliseconds=1)

Json = Mapping[str, Any]


class Axis:
    """Milliseconds since the first thing that the decision shows, drawn over `WIDTH` characters."""

    def __init__(self, moments: Sequence[tuple[datetime, datetime]]) -> None:
        self.start = min((begin for begin, _ in moments), default=None)
        end = max((end for _, end in moments), default=None)
        self.length_ms = max((end - self.start) / MILLISECOND, 1.0) if self.start and end else 1.0

    def bar(self, begin: datetime, end: datetime, style: str) -> Text:
        if self.start is None:
            return Text()
        first = round((begin - self.start) / MILLISECOND / self.length_ms * WIDTH)
        last = round((end - self.start) / MILLISECOND / self.length_ms * WIDTH)
        first = min(max(first, 0), WIDTH - 1)
        mark = "━" * (last - first) if last > first else "╸"
        return Text(" " * first + mark, style=style)


def picture(decision: Json, operations: Mapping[str, Json] | None = None) -> RenderableType:
    """``operations`` holds the details of some or all operations by id: with them, it is shown what was undone by what."""
    read = [item for item in decision["evidence"] if not _is_reused(item)]
    axis = Axis([*map(_stage_span, decision["timeline"]), *map(_reading_span, read)])
    parts: list[RenderableType] = [_head(decision)]
    if decision.get("review"):
        parts.append(Padding(review(decision, plain), (1, 0, 0, 0)))
    if decision["timeline"]:
        parts.append(Padding(_times(decision, axis), (1, 0, 0, 0)))
    if len((decision.get("graph") or {}).get("critical_path", ())) > 1:
        parts.append(_graph(decision["graph"]))
    if decision["fence"]["checks"]:
        parts.append(Padding(_fence(decision["fence"]), (1, 0, 0, 0)))
    if decision["operations"]:
        parts.append(Padding(effects(decision["operations"], operations or {}), (1, 0, 0, 0)))
    return Group(*parts)


def _head(decision: Json) -> Text:
    status = decision["status"]
    text = Text.assemble(
        (status, f"bold {STATE_STYLES.get(status, '')}".strip()),
        f"  {decision['type']} ",
        (decision["id"], "dim"),
    )
    if record := decision["record"]:
        base, made = record["base_version"], record["committed_version"]
        versions = f"v{base} → v{made}" if made is not None else "" if base is None else f"v{base}, unchanged"
        text.append(f"\n{record['kind']}/{record['id']}  {versions}")
    outcome = decision["outcome"] or {}
    if reason := outcome.get("reason"):
        text.append(f"\n{reason}", "yellow")
    elif outcome.get("terms") is not None:
        text.append(f"\n{plain(outcome['terms'])}")
    return text


def _times(decision: Json, axis: Axis) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, show_edge=False)
    for number in range(4):
        table.add_column(justify="right" if number == 2 else "left", no_wrap=True, overflow="ellipsis")
    stages = decision["timeline"]
    homes = [_home(item, stages) for item in decision["evidence"]]
    for number, stage in enumerate(stages):
        begin, end = _stage_span(stage)
        table.add_row(Text(stage["stage"], "bold"), axis.bar(begin, end, "blue"), f"{stage['ms']} ms", "")
        for item, home in zip(decision["evidence"], homes, strict=True):
            if home == number:
                table.add_row(*_reading(item, axis))
    return table


def _graph(graph: Json) -> Text:
    path = " → ".join(graph["critical_path"])
    said = f"critical path {path}, {graph['critical_path_ms']} ms; all readings {graph['total_work_ms']} ms"
    return Text(said, "dim")


def _is_reused(item: Json) -> bool:
    """It was observed for another decision, some time before this one."""
    return bool(item["reading"] == "reused")


def _home(item: Json, stages: Sequence[Json]) -> int | None:
    """The stage that a reading belongs to: the one that its span sticks out of the least."""
    if _is_reused(item):
        return next((number for number, stage in enumerate(stages) if stage["stage"] == "gather"), None)
    first, last = _reading_span(item)
    outside = [
        (max(begin - first, timedelta()) + max(last - end, timedelta()), number)
        for number, stage in enumerate(stages)
        if stage["stage"] in ("gather", "fence")
        for begin, end in [_stage_span(stage)]
    ]
    return min(outside)[1] if outside else None


def _reading(item: Json, axis: Axis) -> tuple[RenderableType, ...]:
    style = STATE_STYLES.get(item["state"], "")
    said = item["error"]["code"] if item["error"] else plain(item["value"]) if item["value"] else ""
    again = f", {item['attempts']} attempts" if item["attempts"] > 1 else ""
    again += "" if item["reading"] == "own" else f", {item['reading']}"
    return (
        Text(f"  {item['name']}"),
        Text() if _is_reused(item) else axis.bar(*_reading_span(item), style),
        f"{item['elapsed_ms']} ms",
        Text.assemble((item["state"], style), "  ", (short(said, 64) + again, "dim")),
    )


def plain(value: Any) -> str:
    """JSON for people: money as money, an object as its members."""
    match value:
        case {"amount_minor": int(minor), "currency": str(currency)} if len(value) == 2:
            return str(Money(minor, currency))
        case dict():
            return " · ".join(f"{name} {plain(member)}" for name, member in value.items())
        case _:
            return short(value)


def _fence(fence: Json) -> Table:
    rounds = fence["rounds"]
    table = Table(box=None, pad_edge=False, show_header=False, show_edge=False)
    table.add_column(no_wrap=True)
    table.add_row(Text.assemble(("fence", "bold"), f"  {rounds} {'round' if rounds == 1 else 'rounds'}"))
    for check in fence["checks"]:
        table.add_row(_check(check))
    return table


def _check(check: Json) -> Text:
    field = f".{check['field']}" if check["field"] else ""
    text = Text("  ✓ " if check["held"] else "  ✗ ", "green" if check["held"] else "red")
    text.append(f"{check['evidence']}{field} ", "default")
    then, now = short(plain(check["then"]), 30), short(plain(check["now"]), 30)
    if check["field"] == "age_ms":
        text.append(f"{now} ms old, may be {then} ms", "dim")
    else:
        text.append(
            f"{then} → {now}" if then != now else f"still {now}", "red" if not check["held"] else "dim"
        )
    if (ago := check["confirmed_ms_before_commit"]) is not None:
        where = "under lock, inside the commit" if ago == 0 and check["evidence"] == "record" else None
        text.append(f" · {where or f'confirmed {ago} ms before commit'}", "dim")
    return text


def _stage_span(stage: Json) -> tuple[datetime, datetime]:
    begin = datetime.fromisoformat(stage["at"])
    return begin, begin + stage["ms"] * MILLISECOND


def _reading_span(item: Json) -> tuple[datetime, datetime]:
    end = datetime.fromisoformat(item["observed_at"])
    return end - item["elapsed_ms"] * MILLISECOND, end
