"""Request headers, read strictly where a mistake would change what happens, leniently where their RFC says so.

An `Idempotency-Key` or a precondition that cannot be read exactly is an error. A `Prefer` or a `traceparent` that cannot be read
is ignored (RFC 7240 section 2, W3C Trace Context).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from litestar.types import Scope

from coordinator.core.canonical import MAX_INTEGER
from coordinator.errors import (
    IdempotencyKeyInvalid,
    IdempotencyKeyMissing,
    MalformedRequest,
    PreconditionRequired,
)

MAX_KEY_LENGTH = 255

_VISIBLE = re.compile(r"[!-~]{1,255}\Z")
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"\Z')  # an sf-string, RFC 8941 section 3.3.3
_ESCAPE = re.compile(r"\\(.)")
_STRONG_VERSION = re.compile(r'"(0|[1-9][0-9]{0,15})"\Z')
_ENTITY_TAG = re.compile(r'(W/)?"([!#-~]{0,64})"\Z')
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z", re.DOTALL)
# name [= token or quoted string] [; parameters], then a comma or the end
_PREFERENCE = re.compile(
    r"""[\s,]* ([!#$%&'*+.^_`|~0-9A-Za-z-]+) (?:\s*=\s*("(?:[^"\\]|\\.)*"|[^\s,;"]*))?
        ((?:\s*;(?:[^",]|"(?:[^"\\]|\\.)*")*)?) \s* (?=,|\Z)""",
    re.VERBOSE,
)
_NEXT_COMMA = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.)*"?)*')


class Preference(msgspec.Struct, frozen=True):
    """How long the caller wants to wait, and the value for ``Preference-Applied``, if it asked for anything."""

    wait_s: float
    applied: bytes | None = None


def values(scope: Scope, name: bytes) -> list[str]:
    """All fields of that (lower-case) name, in order."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def idempotency_key(scope: Scope) -> str:
    """The caller's key: ``"abc"`` (an sf-string) and ``abc`` are the same."""
    given = values(scope, b"idempotency-key")
    if not given:
        raise IdempotencyKeyMissing(
            "Send an Idempotency-Key header: 1 to 255 visible ASCII characters, new for each request."
        )
    if len(given) > 1:
        raise IdempotencyKeyInvalid("The Idempotency-Key header stands there more than once.")
    key = given[0].strip(" \t")
    if key.startswith('"'):
        quoted = _QUOTED.match(key)
        key = _ESCAPE.sub(r"\1", quoted[1]) if quoted else ""
    if not _VISIBLE.match(key):
        raise IdempotencyKeyInvalid(
            f"An Idempotency-Key has 1 to {MAX_KEY_LENGTH} visible ASCII characters, quoted or bare."
        )
    return key


def preference(scope: Scope, *, default_wait_s: int, max_wait_s: int) -> Preference:
    """``wait=N`` is capped; ``respond-async`` without it means not to wait at all. The first of each counts."""
    given = values(scope, b"prefer")
    if not given:
        return Preference(default_wait_s)
    first: dict[str, str] = {}
    for name, value in _preferences(", ".join(given)):
        first.setdefault(name, value)
    wait = first.get("wait", "")
    if re.fullmatch(r"[0-9]{1,9}", wait):
        seconds = min(int(wait), max_wait_s)
        return Preference(seconds, b"wait=%d" % seconds)
    if first.get("respond-async") == "":
        return Preference(0, b"respond-async")
    return Preference(default_wait_s)


def _preferences(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each well-formed preference; the others are skipped up to their comma."""
    position = 0
    while position < len(text):
        found = _PREFERENCE.match(text, position)
        if found:
            yield found[1].lower(), _ESCAPE.sub(r"\1", (found[2] or "").removeprefix('"').removesuffix('"'))
            position = found.end() + 1
        else:
            skipped = _NEXT_COMMA.match(text, position)
            position = (skipped.end() if skipped else position) + 1


def expected_version(scope: Scope) -> int:
    """The version that a write relies on: ``If-Match: "8"`` or ``If-None-Match: *`` (0: there is none yet)."""
    match, none_match = values(scope, b"if-match"), values(scope, b"if-none-match")
    if not match and not none_match:
        raise PreconditionRequired(
            'Send If-Match: "<version>" to replace the record, or If-None-Match: * to create it.'
        )
    if len(match) + len(none_match) > 1:
        raise MalformedRequest("Send one of If-Match and If-None-Match, once.")
    if none_match:
        if none_match[0].strip(" \t") != "*":
            raise MalformedRequest("If-None-Match may only be * here.")
        return 0
    version = _STRONG_VERSION.match(match[0].strip(" \t"))
    if version is None or int(version[1]) > MAX_INTEGER:
        raise MalformedRequest('If-Match must be one strong entity tag with a version, such as "8".')
    return int(version[1])


def last_event_id(scope: Scope) -> int:
    """The number of the last event that a follower saw; 0 if it saw none."""
    given = values(scope, b"last-event-id")
    text = given[-1].strip(" \t") if given else ""
    if text and not re.fullmatch(r"[0-9]{1,15}", text):
        raise MalformedRequest("Last-Event-ID must be the id of an event of this stream, a whole number.")
    return int(text or 0)


def entity_tag(scope: Scope) -> str:
    """The entity tag in If-Match, without its quotes. A weak one is kept as it stands: it matches nothing (RFC 9110 section 13.1.1)."""
    match = values(scope, b"if-match")
    if not match:
        raise PreconditionRequired('Send If-Match: "<etag>" with the ETag of what you looked at.')
    tag = _ENTITY_TAG.match(match[0].strip(" \t")) if len(match) == 1 else None
    if tag is None:
        raise MalformedRequest('If-Match must be one entity tag, the one you looked at, such as "1".')
    return tag[2] if tag[1] is None else tag[0]


def session(scope: Scope) -> str | None:
    """The caller's own name for what it may cancel together, if it sent one."""
    given = values(scope, b"coordinator-session")
    if not given:
        return None
    if len(given) > 1:
        raise MalformedRequest("A Coordinator-Session stands there once.")
    return session_name(given[0])


def session_name(text: str) -> str:
    """``text`` if a session can be called so."""
    if not _VISIBLE.match(text):
        raise MalformedRequest("A Coordinator-Session has 1 to 255 visible ASCII characters.")
    return text


def traceparent(scope: Scope) -> str | None:
    """The W3C trace context of the caller, if it sent a valid one; a later version is read as version 00."""
    given = values(scope, b"traceparent")
    found = _TRACEPARENT.match(given[0]) if len(given) == 1 else None
    if found is None or found[1] == "ff" or not found[2].strip("0") or not found[3].strip("0"):
        return None
    if found[1] == "00" and found[5] is not None:
        return None
    return f"00-{found[2]}-{found[3]}-{found[4]}"
