"""Answers of the demo providers: JSON, 304 for a known revision, RFC 9457 problems."""

from typing import Any

import msgspec
from aiohttp import web

from coordinator.demo.refusals import Refusal

_STATUS = {
    "not-found": 404,
    "method-not-allowed": 405,
    "malformed-request": 400,
    "idempotency-key-missing": 400,
    "idempotency-key-invalid": 400,
    "idempotency-key-reused": 422,
    "payload-too-large": 413,
    "ledger-broken": 500,
}


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Any msgspec-encodable value."""
    return encoded(msgspec.json.encode(value), status, headers)


def encoded(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A body that is JSON already."""
    return web.Response(
        body=body, status=status, headers={"Content-Type": "application/json"} | (headers or {})
    )


def revision(request: web.BaseRequest, body: bytes, etag: str) -> web.Response:
    """The body with its ETag, or 304 when `If-None-Match` names that ETag (RFC 9110, 13.1.2)."""
    known = request.headers.get("If-None-Match")
    if known is not None and _names(known, etag):
        return web.Response(status=304, headers={"ETag": etag})
    return encoded(body, headers={"ETag": etag})


def allow(request: web.BaseRequest, *methods: str) -> None:
    """Refusal `method-not-allowed` for any other method."""
    if request.method not in methods:
        raise Refusal("method-not-allowed", f"{request.method} is not one of {methods}.")


def problem(refusal: Refusal) -> web.Response:
    """A refusal as the answer to its request."""
    return problem_of(_STATUS[refusal.code], refusal.code, refusal.detail)


def problem_of(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> web.Response:
    """An RFC 9457 problem."""
    title = code.replace("-", " ").capitalize()
    body = {"type": f"about:blank#{code}", "title": title, "status": status, "detail": detail, "code": code}
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers={"Content-Type": "application/problem+json"} | (headers or {}),
    )


def _names(if_none_match: str, etag: str) -> bool:
    listed = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return "*" in listed or etag in listed
