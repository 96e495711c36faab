"""Condition: whether a reading begins at all. What is not read is `skipped`, at once, with the reason.

a condition is declared (`when`)      it alone decides, over what comes before, found or not
else something before is missing      dependency-missing
no money was reserved for it          budget-exhausted
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.core.evidence import Evidence, ItemError, Skip, State, clean_text
from coordinator.core.packet import Packet
from coordinator.engine.run import Reading, Run
from coordinator.logs import THEIR_FAULTS, description_of


def why_not(
    run: Run, declared: Evidence[Any, Any], have: Mapping[str, Reading]
) -> tuple[State, ItemError] | None:
    """The state of what is not read, and why; None if it is to be read."""
    if declared.when is not None:
        if (said := _condition(run, declared, have)) is not None:
            return said
    else:
        lacking = next((name for name in declared.after if have[name].item.state != "found"), None)
        if lacking is not None:
            return "skipped", ItemError("dependency-missing", f"{lacking} is not there")
    if run.left_out(declared.name):
        return "skipped", ItemError("budget-exhausted", "no budget had room for what it may cost")
    return None


def _condition(
    run: Run, declared: Evidence[Any, Any], have: Mapping[str, Reading]
) -> tuple[State, ItemError] | None:
    assert declared.when is not None
    packet = Packet(
        [have[name].item for name in run.type.before[declared.name] if name in have], run.type.types
    )
    try:
        said: object = declared.when(run.input, packet)
    except THEIR_FAULTS as error:  # the declarer's own code; recorded as a typed failure
        return "failed", ItemError("condition-raised", description_of(error))
    match said:
        case True:
            return None
        case False:
            return "skipped", ItemError("not-needed", "its condition does not hold")
        case Skip(reason=str(reason)):
            return "skipped", ItemError("not-needed", clean_text(reason))
    what = clean_text(f"a condition answers True, False or Skip, not {said!r}")
    return "failed", ItemError("condition-returned-junk", what)
