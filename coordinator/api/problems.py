"""Every refusal as an RFC 9457 problem document: which status and title a code has, and how it is told.

`TABLE` is the only place where a code meets an HTTP status. A problem has ``type``, ``title``, ``status``, ``detail``, ``code``
and ``retry``, then what a program needs to act. ``retry_after_ms`` is told again as ``Retry-After``, in whole seconds rounded up.

What nobody expected is a 500 that says nothing but a trace id: its traceback is in the log, under that id.
"""

from __future__ import annotations

import logging
import secrets
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Scope

from coordinator.api.answer import NOT_SNIFFED, NOT_STORED, PROBLEM, Answer, location
from coordinator.api.headers import traceparent
from coordinator.errors import CommitUnknown, RequestRefused, Retry, SchemaOutdated
from coordinator.store.database import UNREACHABLE

log = logging.getLogger(__name__)

MAX_DETAIL = 1000
"""Characters; a detail may quote what the caller sent."""

TABLE: dict[str, tuple[int, str]] = {
    "malformed-request": (400, "The request is malformed"),
    "idempotency-key-missing": (400, "An Idempotency-Key is required"),
    "idempotency-key-invalid": (400, "The Idempotency-Key is invalid"),
    "unauthenticated": (401, "No valid API key was given"),
    "notice-refused": (401, "The notice is not accepted"),
    "missing-scope": (403, "The API key lacks the scope for this"),
    "class-not-allowed": (403, "The API key may not ask for this class"),
    "own-request": (403, "Nobody reviews what the same key asked for"),
    "not-found": (404, "There is no such thing"),
    "unknown-decision-type": (404, "There is no such decision type"),
    "method-not-allowed": (405, "The method is not allowed here"),
    "stale-version": (409, "The record has moved on"),
    "decision-in-flight": (409, "A decision under this key is still running"),
    "budget-exhausted": (409, "The budget does not cover it"),
    "state-conflict": (409, "Its present state does not allow this"),
    "superseded": (409, "Another holds it now, or it has ended"),
    "precondition-failed": (412, "The precondition does not hold"),
    "stale-review": (412, "The review has moved on"),
    "body-too-large": (413, "The body is too large"),
    "unsupported-media-type": (415, "The body is not JSON in UTF-8"),
    "idempotency-key-reused": (422, "The Idempotency-Key stands for another request"),
    "transition-refused": (422, "The record does not allow this change"),
    "precondition-required": (428, "A precondition is required"),
    "headers-too-large": (431, "The headers are too large"),
    "queue-full": (429, "The queue is full"),
    "internal-error": (500, "An internal error"),
    "streams-full": (503, "As many streams are open as may be"),
    "review-unconfirmed": (503, "The review could not be confirmed"),
    "draining": (503, "The service is stopping"),
    "overloaded": (503, "The service is overloaded"),
    "commit-unknown": (503, "It is not known whether this was stored"),
    "schema-outdated": (503, "The database schema is out of date"),
}

_FROM_STATUS = {
    404: "not-found",
    405: "method-not-allowed",
    413: "body-too-large",
    415: "unsupported-media-type",
}
_encode = msgspec.json.Encoder().encode


class UnsupportedMediaType(RequestRefused):
    """415: the content type is not JSON, its charset not UTF-8, or the body is compressed."""

    code = "unsupported-media-type"
    retry = "same-key"


def document(code: str, detail: str, retry: Retry, **extra: object) -> bytes:
    """The bytes of a problem. ``extra`` members that are None are left out."""
    status, title = TABLE[code]
    told = {name: value for name, value in extra.items() if value is not None}
    return _encode(
        {
            "type": f"urn:coordinator:problem:{code}",
            "title": title,
            "status": status,
            "detail": detail if len(detail) <= MAX_DETAIL else detail[: MAX_DETAIL - 1] + "…",
            "code": code,
            "retry": retry,
            **told,
        }
    )


def render(refusal: RequestRefused) -> tuple[int, bytes]:
    """Status and document of a refusal: also what is stored when a refusal is a decision's answer."""
    return TABLE[refusal.code][0], document(refusal.code, refusal.detail, refusal.retry, **refusal.extra)


def refused(refusal: RequestRefused) -> Answer:
    """The whole answer of a refusal."""
    status, body = render(refusal)
    return Answer(status, body, _headers(refusal), content_type=PROBLEM)


def _headers(refusal: RequestRefused) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    match refusal.extra.get("retry_after_ms"):
        case int() as milliseconds:
            headers.append((b"retry-after", b"%d" % -(-milliseconds // 1000)))
    if (decision := refusal.extra.get("decision")) is not None:
        headers.append(location(decision))
    if (etag := refusal.extra.get("etag")) is not None:
        headers.append((b"etag", f'"{etag}"'.encode("ascii")))
    if refusal.code == "unauthenticated":
        headers.append((b"www-authenticate", b"Bearer"))
    elif refusal.code == "notice-refused":
        headers.append((b"www-authenticate", b"Signature"))
    elif refusal.code == "missing-scope":
        headers.append((b"www-authenticate", b'Bearer error="insufficient_scope"'))
    return headers


def before_routing(code: str, detail: str) -> Answer:
    """A refusal of the connection itself, of which no request is known."""
    body = document(code, detail, "same-key", retry_after_ms=1000 if code == "overloaded" else None)
    return Answer(
        TABLE[code][0], body, [(b"retry-after", b"1")] if code == "overloaded" else [], content_type=PROBLEM
    )


def unavailable(error: BaseException) -> Answer:
    """What a lost connection to the database, or a COMMIT of unknown outcome, tells the caller. A repeat is safe: decisions are
    idempotent by key, records are guarded by version."""
    code = error.code if isinstance(error, CommitUnknown | SchemaOutdated) else "overloaded"
    detail = "The database could not be used just now. Repeat the same request."
    body = document(code, detail, "same-key", retry_after_ms=1000)
    return Answer(TABLE[code][0], body, [(b"retry-after", b"1")], content_type=PROBLEM)


def unexpected(scope: Scope, error: BaseException) -> Answer:
    """500, with a trace id under which the traceback is logged; nothing else of the error is told."""
    given = traceparent(scope)
    trace_id = given.split("-")[1] if given else secrets.token_hex(16)
    log.error("trace %s: %s %s", trace_id, scope.get("method"), scope.get("path"), exc_info=error)
    detail = "Something unexpected happened. Quote the trace id to the operator."
    body = document("internal-error", detail, "same-key", trace_id=trace_id)
    return Answer(500, body, content_type=PROBLEM)


def answer_to(scope: Scope, error: Exception) -> Answer:
    """The answer to whatever a handler raised."""
    match error:
        case RequestRefused():
            return refused(error)
        case CommitUnknown() | SchemaOutdated():
            log.warning("%s: %s", error.code, error)
            return unavailable(error)
        case _ if isinstance(error, UNREACHABLE):
            log.warning("the database was lost during a request: %s: %s", type(error).__name__, error)
            return unavailable(error)
        case _:
            return unexpected(scope, error)


def not_allowed(allow: tuple[bytes, bytes]) -> Answer:
    """405, with the methods that are."""
    body = document("method-not-allowed", f"Allowed here: {allow[1].decode()}.", "never")
    return Answer(405, body, [allow], content_type=PROBLEM)


def framework_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """What the router itself refuses (no such path, no such method), told like everything else."""
    if isinstance(error, HTTPException) and error.status_code < 500:
        code = _FROM_STATUS.get(error.status_code, "malformed-request")
        status, detail = TABLE[code][0], HTTPStatus(TABLE[code][0]).description or TABLE[code][1]
        body, headers = document(code, detail, "never"), dict(error.headers or {})
    else:
        answer = unexpected(request.scope, error)
        status, body, headers = answer.status, answer.body, {}
    fixed = {name.decode(): value.decode() for name, value in (NOT_STORED, NOT_SNIFFED)}
    return Response(body, status_code=status, headers=headers | fixed, media_type=PROBLEM[1].decode())
