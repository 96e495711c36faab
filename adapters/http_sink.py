"""An effect as one HTTP request of any shape: method, URL, headers and body as the provider wants them.

What its status says is in `adapters.statuses`; beside that:

    no connection, no TLS session                  NotSent: not a byte of the request left
    timeout, reset or disconnect after connecting  Ambiguous
    5xx marked as replayed                         Ambiguous, and sending again would only bring it back (``replayed_header``)
    a placeholder without a value                  Rejected: nothing was sent, and nothing ever will be

Each call of `perform` sends at most once. aiohttp repeats PUT and DELETE by itself when a connection breaks, taking them for
harmless; a repeat that only the library knows of would hide an effect, so that is stopped here. Cancelling `perform` is passed on
and means, to the caller, that the result is ambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import aiohttp
import msgspec
from yarl import URL

from adapters.body import CONTENT, BodyTemplate, Content, member
from adapters.client import close_clients, describe, session, within
from adapters.declare import checked_headers, declared_at, provider_of
from adapters.statuses import Conflict, Meaning, Statuses
from adapters.template import NoValue, Template
from adapters.wire import explanation, json_object, retry_after_ms, spare_body
from coordinator.core.canonical import JsonValue
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Guarantee,
    Keyed,
    LookupResult,
    NotFound,
    NotSent,
    Operation,
    Rejected,
    SendResult,
    lookup_lag_ms,
)
from coordinator.core.evidence import clean_text
from coordinator.core.money import Money
from coordinator.errors import DeclarationError

Method: TypeAlias = Literal["POST", "PUT", "PATCH", "DELETE"]
Sign: TypeAlias = Callable[[Operation, bytes], Mapping[str, str]]
_RESERVED = frozenset(
    {"accept", "connection", "content-length", "content-type", "host", "traceparent", "transfer-encoding"}
)


class HttpSink:
    """A sink behind a URL template (see `adapters.body` for what may stand in it and in ``body``).

    ``guarantee`` is what the provider promises; one that includes a lookup needs ``lookup_url``, a template with ``{key}``,
    and the reverse. Without ``body`` the payload is sent byte for byte (and nothing with DELETE). ``key_header`` carries the
    operation's key. ``statuses`` amends what statuses mean; ``conflict_means`` says how to take a 409: by default ``in-flight``
    under a `Keyed` guarantee, else ``refused``. ``reference_field`` is where in its JSON answer, dotted, the provider puts its own
    name for the effect. ``sign`` adds headers that depend on the bytes that are sent. ``reserves`` is the most that one effect may
    cost, ``cost_field`` where its answer says what it did cost, as ``{"amount_minor", "currency"}``. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        guarantee: Guarantee,
        method: Method = "POST",
        body: JsonValue = None,
        headers: Mapping[str, str] | None = None,
        key_header: str = "Idempotency-Key",
        statuses: Mapping[int | str, Meaning] | None = None,
        conflict_means: Conflict | None = None,
        lookup_url: str | None = None,
        timeout_ms: int = 10_000,
        provider: str | None = None,
        reference_field: str = "reference",
        replayed_header: str = "Idempotent-Replayed",
        sign: Sign | None = None,
        reserves: Money | None = None,
        cost_field: str | None = None,
    ) -> None:
        where, what = declared_at(), f"sink {name!r}"
        host = provider_of(url, what, where)
        if method not in ("POST", "PUT", "PATCH", "DELETE"):
            raise DeclarationError(f"{what}: {method!r} is not one of POST, PUT, PATCH, DELETE", where)
        if not 1 <= timeout_ms <= 600_000:
            raise DeclarationError(f"{what}: timeout_ms must be within 1..600000", where)
        checked_headers({key_header: "", replayed_header: ""}, _RESERVED, what, where)
        reserved = _RESERVED | {key_header.lower()}
        self.name = name
        self.provider = provider or host
        self.guarantee = guarantee
        self.timeout_ms = timeout_ms
        self._method = method
        self._url = Template(url, CONTENT, what, where)
        self._fixed_url = None if self._url.paths else URL(url, encoded=True)
        self._body = None if body is None else BodyTemplate(body, what, where)
        self._lookup = _lookup_template(lookup_url, guarantee, what, where)
        self._headers = {"Accept": "application/json", **checked_headers(headers, reserved, what, where)}
        self._key_header = key_header
        self._statuses = Statuses(statuses, conflict_means, guarantee, what, where)
        self._timeout = within(timeout_ms / 1000)
        self._reference_field = reference_field
        self._replayed_header = replayed_header
        self._sign = sign
        self.reserves = reserves
        self._cost_field = cost_field
        self._fresh = not isinstance(guarantee, Keyed)
        self._middlewares = (_no_second_sending,) if method in ("PUT", "DELETE") else ()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, provider={self.provider!r}, guarantee={self.guarantee!r})"
        )

    async def aclose(self) -> None:
        await close_clients()

    async def perform(self, operation: Operation) -> SendResult:
        """One request, sent once. A provider that would act on a repeat gets a fresh connection, see `adapters.client`."""
        content = Content(operation)
        try:
            url = self._fixed_url or URL(self._url.url(content), encoded=True)
            body = self._body_of(content)
        except NoValue as error:
            return Rejected("no-value", clean_text(str(error)))
        try:
            async with session(fresh=self._fresh).request(
                self._method,
                url,
                data=body,
                headers=self._headers_for(operation, body),
                timeout=self._timeout,
                allow_redirects=False,
                middlewares=self._middlewares,
            ) as response:
                return self._result(response, await spare_body(response), operation)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return NotSent("unreachable", describe(error))
        except TimeoutError:
            return Ambiguous("timed-out", f"no answer within {self.timeout_ms} ms")
        except aiohttp.ClientResponseError as error:
            return Ambiguous("malformed-response", describe(error))
        except aiohttp.ClientError as error:
            return Ambiguous("connection-lost", describe(error))

    async def lookup(self, operation: Operation) -> LookupResult:
        """Ask for the effect by key. Only a JSON object is proof that it is there: a login page also answers 200."""
        if self._lookup is None:
            return Ambiguous("no-lookup", "this sink has no lookup_url")
        headers = {**self._headers, "Cache-Control": "no-cache"}
        if operation.traceparent:
            headers["traceparent"] = operation.traceparent
        try:
            url = URL(self._lookup.url(Content(operation)), encoded=True)
            async with session().get(
                url, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                return self._looked_up(response, await spare_body(response), operation)
        except NoValue as error:
            return Ambiguous("no-address", clean_text(str(error)))
        except TimeoutError:
            return Ambiguous("timed-out", f"no answer within {self.timeout_ms} ms")
        except aiohttp.ClientResponseError as error:
            return Ambiguous("malformed-response", describe(error))
        except aiohttp.ClientError as error:
            return Ambiguous("connection-lost", describe(error))

    def _body_of(self, content: Content) -> bytes | None:
        if self._body is not None:
            return self._body.encoded(content)
        return None if self._method == "DELETE" else content.operation.payload

    def _headers_for(self, operation: Operation, body: bytes | None) -> dict[str, str]:
        headers = {**self._headers, self._key_header: operation.key}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if operation.traceparent:
            headers["traceparent"] = operation.traceparent
        if self._sign is not None:
            headers.update(self._sign(operation, body or b""))
        return headers

    def _result(self, response: aiohttp.ClientResponse, body: bytes, operation: Operation) -> SendResult:
        status, pause_ms = response.status, retry_after_ms(response)
        meaning, code = self._statuses.verdict(status, says_when=pause_ms is not None)
        if meaning == "accepted":
            return Accepted(self._reference(response, body, operation), self._cost(body))
        why = explanation(status, body)
        if status >= 500 and meaning != "rejected" and self._is_replayed(response):
            return Ambiguous("stored-error", why, replayed=True)
        match meaning:
            case "not-sent":
                return NotSent(code, why, pause_ms)
            case "rejected" if code == "redirected":
                return Rejected(code, "the provider has moved; redirects are not followed")
            case "rejected":
                return Rejected(code, why, self._cost(body))
            case "ambiguous":
                return Ambiguous(code, why)

    def _is_replayed(self, response: aiohttp.ClientResponse) -> bool:
        return response.headers.get(self._replayed_header, "").strip().lower() == "true"

    def _looked_up(self, response: aiohttp.ClientResponse, body: bytes, operation: Operation) -> LookupResult:
        if response.status == 404:
            return NotFound()
        if response.status != 200:
            return Ambiguous("provider-error", explanation(response.status, body))
        if not json_object(body):
            return Ambiguous("malformed-response", "a lookup must answer with a JSON object")
        return Accepted(self._reference(response, body, operation), self._cost(body))

    def _cost(self, body: bytes) -> Money | None:
        """None where the answer does not say it, or says something else there: then it is not known."""
        if self._cost_field is None:
            return None
        try:
            return msgspec.convert(member(json_object(body), self._cost_field), Money | None)
        except msgspec.ValidationError:
            return None

    def _reference(self, response: aiohttp.ClientResponse, body: bytes, operation: Operation) -> str:
        named = member(json_object(body), self._reference_field)
        if isinstance(named, str | int) and not isinstance(named, bool) and named != "":
            return clean_text(str(named))
        return clean_text(response.headers.get("Location") or f"{response.status} {operation.key}")


async def _no_second_sending(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Turns the errors after which aiohttp would repeat PUT and DELETE into one after which it does not."""
    try:
        return await send(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(str(error)) from error


def _lookup_template(
    url: str | None, guarantee: Guarantee, what: str, where: str
) -> Template[Content] | None:
    can_be_asked = lookup_lag_ms(guarantee) is not None
    if url is None:
        if can_be_asked:
            raise DeclarationError(f"{what}: its guarantee includes a lookup: add lookup_url=...", where)
        return None
    if not can_be_asked:
        raise DeclarationError(
            f"{what}: lookup_url without a guarantee that includes a lookup and its lag", where
        )
    provider_of(url, what, where)
    template = Template(url, CONTENT, what, where)
    if "key" not in {path.text for path in template.paths}:
        raise DeclarationError(f"{what}: lookup_url has no {{key}}", where)
    return template
