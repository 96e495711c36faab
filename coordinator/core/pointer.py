"""Where a value does not fit its type: msgspec's error text as a JSON pointer (RFC 6901) and what is wrong there."""

from __future__ import annotations

import re

MAX_DETAIL = 500
_AT_PATH = re.compile(r"(?P<what>.*) - at `(?P<key>key in )?\$?(?P<path>.*)`\Z", re.DOTALL)
_MEMBER = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_NAMED_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>.*)`\Z", re.DOTALL)


def located(message: str) -> tuple[str, str]:
    """A validation error's text as a JSON pointer (RFC 6901) and what is wrong there. The pointer ends at the nearest member
    whose name the error tells."""
    at = _AT_PATH.match(message)
    what, path = (at["what"], at["path"]) if at else (message, "")
    pointer = ""
    for member in _MEMBER.finditer(path):
        if member[0] == "[...]":
            break
        pointer += "/" + _escaped(member["name"] or member["index"])
    named = _NAMED_FIELD.match(what)
    if named and "[...]" not in path:
        pointer += "/" + _escaped(shortened(named["name"]))
    return pointer, shortened(what)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def shortened(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"
