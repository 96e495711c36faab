"""Evidence from a JSON answer to a GET; its revision is the ETag, or else the digest of what was declared of the value.

    200                      Found, if it is strict JSON of the declared type
    304                      Unchanged, if a conditional read was asked for
    404 410 (`absent_on`)    Absent: the provider knows that there is no such thing
    429 503                  Failed, retryable, with the pause that the provider asked for
    408 425 other 5xx        Failed, retryable
    everything else          Failed: asking again would not help

The body is read up to a bound and no further, whatever its headers promise and however small it was when compressed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

import aiohttp
import msgspec
from yarl import URL

from adapters.client import close_clients, describe, session, within
from adapters.declare import checked_headers, declared_at, provider_of
from adapters.template import REQUEST, NoValue, Template
from adapters.webhook import WebhookSink
from adapters.wire import BodyTooLarge, bounded_body, explanation, retry_after_ms, spare_body
from coordinator.core.canonical import InvalidJson, canonical, digest, parse
from coordinator.core.evidence import (
    Absent,
    Answer,
    Failed,
    Found,
    ReadRequest,
    Unchanged,
    clean_text,
    is_struct,
)
from coordinator.core.money import Money
from coordinator.errors import DeclarationError

__all__ = ["HttpSource", "WebhookSink"]

T = TypeVar("T")

MAX_REDIRECTS = 5
_ENTITY_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"\Z')
_RESERVED = frozenset(
    {"accept", "if-none-match", "traceparent", "host", "content-length", "transfer-encoding", "connection"}
)


class HttpSource(Generic[T]):
    """A source behind a URL template (see `adapters.template`).

    ``headers`` are sent as they are and shown nowhere. ``max_bytes`` bounds the decompressed body. ``allow_redirects`` follows
    up to 5, within the same origin only, so that no header reaches another host. ``cost_from``, ``confidence_from`` and
    ``units_from`` read from the value what the reading cost, how sure the provider is, and how many units of its limit per
    minute it counted. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        returns: type[T],
        provider: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = 262_144,
        absent_on: Collection[int] = (404, 410),
        allow_redirects: bool = False,
        cost_from: Callable[[T], Money | None] | None = None,
        confidence_from: Callable[[T], float | None] | None = None,
        units_from: Callable[[T], int | None] | None = None,
    ) -> None:
        where, what = declared_at(), f"source {name!r}"
        host = provider_of(url, what, where)
        if not is_struct(returns):
            raise DeclarationError(f"{what} returns {returns!r}; it must be a msgspec.Struct", where)
        if max_bytes < 1:
            raise DeclarationError(f"{what}: max_bytes must be positive", where)
        if not all(400 <= status <= 499 for status in absent_on):
            raise DeclarationError(f"{what}: absent_on may only hold statuses 400..499", where)
        self.name = name
        self.provider = provider or host
        self.returns = returns
        self._url = Template(url, REQUEST, what, where)
        self._headers = {"Accept": "application/json", **checked_headers(headers, _RESERVED, what, where)}
        self._max_bytes = max_bytes
        self._absent_on = frozenset(absent_on)
        self._redirects = MAX_REDIRECTS if allow_redirects else 0
        self._cost_from = cost_from
        self._confidence_from = confidence_from
        self._units_from = units_from

    @property
    def asks_for(self) -> tuple[str, ...]:
        return tuple(path.text for path in self._url.paths)

    def __repr__(self) -> str:
        return f"HttpSource({self.name!r}, provider={self.provider!r})"

    async def aclose(self) -> None:
        await close_clients()

    async def read(self, request: ReadRequest) -> Answer[T]:
        """One GET within ``request.timeout_s``. Cancelling it closes the connection."""
        try:
            url = URL(self._url.url(request), encoded=True)
        except NoValue as error:
            return Failed("no-address", clean_text(str(error)))
        try:
            return await self._get(url, request)
        except aiohttp.ConnectionTimeoutError as error:
            return Failed("unreachable", describe(error), retryable=True)
        except TimeoutError:
            return Failed("timed-out", f"no answer within {request.timeout_s:.3f} s")
        except aiohttp.ClientConnectorError as error:
            return Failed("unreachable", describe(error), retryable=True)
        except aiohttp.ClientResponseError as error:
            return Failed("malformed-response", describe(error))
        except aiohttp.ClientError as error:
            return Failed("connection-lost", describe(error), retryable=True)

    async def _get(self, url: URL, request: ReadRequest) -> Answer[T]:
        headers = self._headers_for(request)
        timeout = within(request.timeout_s)
        for _ in range(self._redirects + 1):
            async with session().get(
                url, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status not in (301, 302, 303, 307, 308) or not self._redirects:
                    return await self._answer(response, asked_if="If-None-Match" in headers)
                target = _target(url, response.headers.get("Location", ""))
            if target is None:
                return Failed("redirected-elsewhere", "a redirect that leaves the origin is not followed")
            url = target
        return Failed("redirected-elsewhere", f"more than {self._redirects} redirects")

    def _headers_for(self, request: ReadRequest) -> dict[str, str]:
        headers = self._headers
        if request.traceparent:
            headers = {**headers, "traceparent": request.traceparent}
        if request.if_revision and _ENTITY_TAG.match(request.if_revision):
            headers = {**headers, "If-None-Match": request.if_revision}
        return headers

    async def _answer(self, response: aiohttp.ClientResponse, *, asked_if: bool) -> Answer[T]:
        status = response.status
        if status == 200:
            return await self._found(response)
        if status == 304 and asked_if:
            return Unchanged()
        body = await spare_body(response)
        if status in self._absent_on:
            return Absent()
        why = explanation(status, body)
        if status in (429, 503):
            return Failed("provider-busy", why, retryable=True, retry_after_ms=retry_after_ms(response))
        if status >= 500 or status in (408, 425):
            return Failed("provider-error", why, retryable=True)
        return Failed("provider-refused" if status >= 400 else "unexpected-status", why)

    async def _found(self, response: aiohttp.ClientResponse) -> Found[T] | Failed:
        kind = response.content_type
        if "Content-Type" not in response.headers or not (
            kind == "application/json" or kind.endswith("+json")
        ):
            response.close()
            return Failed(
                "wrong-content-type", clean_text(f"expected JSON, got {response.headers.get('Content-Type')}")
            )
        try:
            body = await bounded_body(response, self._max_bytes)
        except BodyTooLarge:
            return Failed("response-too-large", f"the body is larger than {self._max_bytes} bytes")
        try:
            value = msgspec.convert(parse(body), self.returns)
        except (InvalidJson, msgspec.ValidationError) as error:
            return Failed("malformed-response", clean_text(str(error)))
        etag = response.headers.get("ETag")
        revision = clean_text(etag) if etag else digest(canonical(value))
        return self._with_extras(value, revision, _age_ms(response.headers.get("Age", "")))

    def _with_extras(self, value: T, revision: str, age_ms: int) -> Found[T] | Failed:
        if self._cost_from is None and self._confidence_from is None and self._units_from is None:
            return Found(value, revision, age_ms)
        try:
            cost = self._cost_from(value) if self._cost_from else None
            confidence = self._confidence_from(value) if self._confidence_from else None
            units = self._units_from(value) if self._units_from else None
        except Exception as error:  # noqa: BLE001 - the declarer's own code; what it raised is the answer
            return Failed("source-raised", clean_text(f"{type(error).__name__}: {error}"))
        if confidence is not None and not 0 <= confidence <= 1:
            return Failed("malformed-response", "the confidence is not within 0..1")
        return Found(value, revision, age_ms, cost, confidence, units=units)


def _target(url: URL, location: str) -> URL | None:
    """Where a redirect leads, if that is within the same origin."""
    try:
        target = url.join(URL(location))
        return target if location and target.origin() == url.origin() else None
    except ValueError:
        return None


def _age_ms(text: str) -> int:
    """``Age`` in whole seconds (RFC 9111, 5.1); 0 when it is absent or nonsense."""
    return int(text[:9]) * 1000 if text.isascii() and text.isdigit() else 0
