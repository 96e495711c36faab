"""What a handler returns: finished bytes with their status and headers, sent as they are.

Framework responses are built from parts again for every request; that cost more than the rest of a request's path through the
api, and nothing here needs it: all bodies exist as bytes already.
"""

from __future__ import annotations

from collections.abc import Sequence

from litestar.types import Receive, Scope, Send

Headers = Sequence[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
PROBLEM = (b"content-type", b"application/problem+json")
NOT_STORED = (b"cache-control", b"no-store")
NOT_SNIFFED = (b"x-content-type-options", b"nosniff")


class Answer:
    """An ASGI application that answers one request. ``content_type`` and ``caching`` are whole headers."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        status: int,
        body: bytes,
        headers: Headers = (),
        *,
        content_type: tuple[bytes, bytes] = JSON,
        caching: tuple[bytes, bytes] = NOT_STORED,
    ) -> None:
        self.status = status
        self.body = body
        self.headers = [caching, NOT_SNIFFED, *headers]
        if status != 204:
            self.headers += [content_type, (b"content-length", b"%d" % len(body))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def location(decision: object) -> tuple[bytes, bytes]:
    """The ``Location`` of a decision, by its id."""
    return b"location", f"/v1/decisions/{decision}".encode("ascii")
