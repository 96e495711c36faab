"""What became of a decision's effects, in words that hold: what happened, what did not, what nobody knows, what was undone by what.

    ✓ happened      succeeded
    ✗ did not       failed; cancelled before the provider did it
    ? unknown       uncertain, or an attempt is under way or will be repeated while an earlier one may have been acted upon
    ↩ undone        compensated, by the operation that is shown below it
    … not sent yet  ready

An operation that was compensated happened all the same: both are said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from coordinator.cli.say import STATE_STYLES

Json = Mapping[str, Any]


class Truth(NamedTuple):
    """``kind`` is what is counted, ``words`` what is said of one."""

    mark: str
    kind: str
    words: str


HAPPENED = Truth("✓", "happened", "happened")
DID_NOT = Truth("✗", "did not happen", "did not happen")
WILL_NOT = Truth("✗", "did not happen", "did not and will not happen")
UNKNOWN = Truth("?", "unknown", "nobody knows whether it happened")
NOT_YET = Truth("…", "not sent yet", "not sent yet")
UNDER_WAY = Truth("…", "under way", "being sent now")
UNDOING = Truth("↩", "being undone", "happened, being undone")
UNDONE = Truth("↩", "undone", "happened, and was undone")
BY_STATE = {
    "ready": NOT_YET,
    "dispatching": UNDER_WAY,
    "succeeded": HAPPENED,
    "failed": DID_NOT,
    "cancelled": WILL_NOT,
    "uncertain": UNKNOWN,
    "compensating": UNDOING,
    "compensated": UNDONE,
}


def truth(state: str, in_doubt: bool = False) -> Truth:
    """A state that a newer service may have is told as it is."""
    if in_doubt and state in ("ready", "dispatching"):
        return UNKNOWN
    return BY_STATE.get(state) or Truth("·", state, state)


def effects(operations: Sequence[Json], details: Mapping[str, Json]) -> Table:
    """``operations`` are those of a decision, ``details`` some or all of them in full by id: only with these can be said what was
    undone by what, and what waits for what."""
    table = Table(box=None, pad_edge=False, show_header=False, show_edge=False)
    table.add_column(no_wrap=True, overflow="fold")
    known = [{**operation, **details.get(operation["id"], {})} for operation in operations]
    primary = [operation for operation in known if operation.get("compensates") is None]
    table.add_row(_head(primary))
    for operation in primary:
        undoing = [
            other
            for other in known
            if "ordinal" in operation and other.get("compensates") == operation["ordinal"]
        ]
        table.add_row(_line(operation, undoing, primary))
        for other in undoing:
            table.add_row(_line(other, (), primary, indent="    ↳ "))
    return table


def became(operation: Json) -> Text:
    """One operation in full, on its own."""
    return _line(operation, (), (), indent="").append(f"\n  id  {operation['id']}", "dim")


def _head(operations: Iterable[Json]) -> Text:
    counted = Counter(_truth(operation).kind for operation in operations)
    several = " · ".join(f"{count} {kind}" for kind, count in counted.items())
    return Text.assemble(("operations", "bold"), f"  {several}" if counted.total() > 1 else "")


def _truth(operation: Json) -> Truth:
    return truth(operation["state"], operation.get("in_doubt", False))


def _line(operation: Json, undoing: Sequence[Json], siblings: Sequence[Json], *, indent: str = "  ") -> Text:
    state, said = operation["state"], _truth(operation)
    style = STATE_STYLES.get(state, "")
    line = Text.assemble(indent, (f"{said.mark} ", style), f"{operation['effect']} ", (state, style))
    line.append(f" · {_words(operation, undoing, siblings)}")
    if "key" not in operation:
        return line
    attempts = operation["attempts"]
    if attempts:
        line.append(f" · {attempts} {'attempt' if attempts == 1 else 'attempts'}")
    line.append(f" · {operation['reference']}" if operation["reference"] else "")
    line.append(f" · {operation['reason']}" if operation["reason"] else "", "yellow")
    margin = " " * (len(indent) + 2)
    return line.append(f"\n{margin}key {operation['key']}", "dim")


def _words(operation: Json, undoing: Sequence[Json], siblings: Sequence[Json]) -> str:
    words = _truth(operation).words
    if undoing and operation["state"] in ("compensating", "compensated"):
        words += f" by {undoing[0]['effect']}"
    elif undoing and operation["state"] == "succeeded":
        words += f", and {undoing[0]['effect']} could not undo it"
    elif operation["state"] == "ready" and (waits := _waits_for(operation, siblings)):
        words += f", waits for {waits}"
    if operation.get("cancel_requested") and not undoing:
        words += _cancelling(operation)
    return words


def _waits_for(operation: Json, siblings: Sequence[Json]) -> str:
    before = [other for other in siblings if other.get("ordinal") in operation.get("after", ())]
    return ", ".join(other["effect"] for other in before if other["state"] != "succeeded")


def _cancelling(operation: Json) -> str:
    can = operation["has_compensation"]
    match operation["state"]:
        case "succeeded":
            return "; cancelling was asked for" + ("" if can else ", and it declares nothing to undo it")
        case "ready" | "dispatching" | "uncertain":
            return "; cancelling was asked for" + (": it will be undone if it happened" if can else "")
        case _:
            return ""
