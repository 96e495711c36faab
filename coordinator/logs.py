"""What code that is not ours raises, as text that can be kept and that every log handler can write.

The text of an adapter's or a policy's exception is anybody's; a lone surrogate in it would make a log handler fail in our place, and
one that fails to describe itself would take ours with it.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from coordinator.core.evidence import clean_text

THEIR_FAULTS = (Exception, SystemExit)
"""What code that is not ours may raise without ending the service: ``sys.exit`` in a policy is a fault of the policy."""

_OURS = str(Path(__file__).parent)


def traceback_of(error: BaseException) -> str:
    """The whole traceback; what UTF-8 cannot hold is escaped."""
    return "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()


def description_of(error: BaseException) -> str:
    """The kind of the error and its own text, if it has one that can be had."""
    try:
        return clean_text(f"{type(error).__name__}: {error}")
    except THEIR_FAULTS:  # its __str__ is not ours either; the kind is recorded
        return type(error).__name__


def line_of(error: BaseException) -> str:
    """``function, file:line`` of the innermost frame that is not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)] or frames
    return f"{theirs[-1].name}, {Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else "nowhere"
