"""Tracebacks of code that is not ours, as text that every log handler can write.

The text of an adapter's or a policy's exception is anybody's; a lone surrogate in it would make the handler fail in our place, and
the log line would be lost.
"""

from __future__ import annotations

import traceback


def traceback_of(error: BaseException) -> str:
    """The whole traceback; what UTF-8 cannot hold is escaped."""
    return "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace").decode()
