"""What all commands have in common in how they speak: faults, JSON, tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import IO, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_WITHOUT_TERMINAL = 160
STATE_STYLES = {
    "committed": "green",
    "succeeded": "green",
    "compensated": "green",
    "found": "green",
    "declined": "yellow",
    "in_review": "yellow",
    "queued": "cyan",
    "running": "cyan",
    "ready": "cyan",
    "dispatching": "cyan",
    "compensating": "cyan",
    "absent": "yellow",
    "timed_out": "red",
    "uncertain": "magenta",
    "unresolved": "red",
    "conflicted": "red",
    "expired": "red",
    "failed": "red",
    "settled": "green",
    "held": "cyan",
    "released": "dim",
    "cancelled": "dim",
    "skipped": "dim",
}

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")


class Fault(click.ClickException):
    """Something is wrong; exit code 1. The message ends with what to do next."""

    def __init__(self, message: str, document: bytes | None = None) -> None:
        """``document`` is what ``--json`` prints on stdout in place of a result."""
        super().__init__(message)
        self.document = (
            document if _wants_json() else None
        )  # asked now: no command is current when it is shown

    def show(self, file: IO[Any] | None = None) -> None:
        if self.document is not None:
            print_json(self.document)
        else:
            super().show(file)


def _wants_json() -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and context.params.get("as_json"))


def print_json(document: object) -> None:
    """One line on stdout; bytes are JSON already."""
    line = bytes(document) if isinstance(document, bytes | msgspec.Raw) else msgspec.json.encode(document)
    click.echo(line.strip(), nl=True)
    sys.stdout.flush()


@cache
def console() -> Console:
    """Of stdout. Where that is no terminal, wide enough that ids are not cut."""
    width = None if sys.stdout.isatty() else max(WIDTH_WITHOUT_TERMINAL, shutil.get_terminal_size().columns)
    return Console(width=width, highlight=False, soft_wrap=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """``empty`` is said when there is no row."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("id", "decision"))
    for row in rows:
        table.add_row(*map(cell, row))
    console().print(table if table.row_count else Text(empty, style="dim"))


def cell(value: object) -> Text:
    match value:
        case Text():
            return value
        case None:
            return Text("–", style="dim")
        case _:
            return Text(str(value), style=STATE_STYLES.get(str(value), ""))


def age(timestamp: str | datetime | None) -> str | None:
    """How long ago, in one unit."""
    if timestamp is None:
        return None
    then = datetime.fromisoformat(timestamp) if isinstance(timestamp, str) else timestamp
    seconds = (datetime.now(UTC) - then).total_seconds()
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def short(value: object, limit: int = 60) -> str:
    """JSON on one line, cut where it gets long."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"
