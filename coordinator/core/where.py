"""Where a declaration stands in the user's code, so that an error can name the line to mend."""

from __future__ import annotations

import sys
from pathlib import Path

_OURS = f"{Path(__file__).resolve().parents[1]}/"


def declared_at() -> str:
    """``file:line`` of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_code.co_filename.startswith(_OURS)
        and not _is_demo(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_demo(filename: str) -> bool:
    return filename.startswith((f"{_OURS}demo/", f"{_OURS}testing/"))
