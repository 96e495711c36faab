"""An effect as a POST: the operation's key as ``Idempotency-Key``, its payload byte for byte, signed if there is a secret.

    2xx                                            Accepted, whatever the body says
    4xx, but for those below                       Rejected: this request did not act and never will
    429, 503 with Retry-After                      NotSent: the provider says it has not acted
    no connection, no TLS session                  NotSent: not a byte of the request left
    408 409* 425 other 5xx, 3xx but 307 and 308    Ambiguous
    timeout, reset or disconnect after connecting  Ambiguous

    (* 409 from a provider that knows our key may mean that an earlier request with it is still running, as the IETF's
       Idempotency-Key draft has it. It then proves nothing about the effect; see `conflict_means`.)

The signature is that of Standard Webhooks (standardwebhooks.com): ``webhook-id`` is the key, so that a receiver that keeps
ids deduplicates by it as well. Cancelling `perform` is passed on and means, to the caller, that the result is ambiguous.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import aiohttp
from standardwebhooks.webhooks import EmptyWebhookSecretError, Webhook
from yarl import URL

from adapters.client import close_clients, describe, session, within
from adapters.declare import checked_headers, declared_at, provider_of
from adapters.template import OPERATION, NoValue, Template
from adapters.wire import explanation, json_object, retry_after_ms, spare_body
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
from coordinator.errors import DeclarationError

_RESERVED = frozenset(
    {
        "accept", "connection", "content-length", "content-type", "host", "idempotency-key", "traceparent",
        "transfer-encoding", "webhook-id", "webhook-signature", "webhook-timestamp",
    }
)  # fmt: skip
_REDIRECTED = (307, 308)


class WebhookSink:
    """A sink behind one URL.

    ``guarantee`` is what the provider promises; one that includes a lookup needs ``lookup_url``, a template with ``{key}``,
    and the reverse. ``secret`` is a Standard Webhooks secret (base64, with or without ``whsec_``). ``reference_field`` is where
    in its JSON answer the provider puts its own name for the effect. ``conflict_means`` says how to take a 409: by default
    ``in-flight`` under a `Keyed` guarantee, else ``refused``. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        guarantee: Guarantee,
        secret: str | None = None,
        lookup_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_ms: int = 10_000,
        provider: str | None = None,
        reference_field: str = "reference",
        conflict_means: Literal["in-flight", "refused"] | None = None,
    ) -> None:
        where, what = declared_at(), f"sink {name!r}"
        host = provider_of(url, what, where)
        if "{" in url or "}" in url:
            raise DeclarationError(
                f"{what}: its URL is the same for all operations; placeholders go into lookup_url", where
            )
        if not 1 <= timeout_ms <= 600_000:
            raise DeclarationError(f"{what}: timeout_ms must be within 1..600000", where)
        self.name = name
        self.provider = provider or host
        self.guarantee = guarantee
        self.timeout_ms = timeout_ms
        self._url = URL(url, encoded=True)
        self._lookup = _lookup_template(lookup_url, guarantee, what, where)
        self._signer = _signer(secret, what, where)
        self._headers = {"Accept": "application/json", **checked_headers(headers, _RESERVED, what, where)}
        self._timeout = within(timeout_ms / 1000)
        self._reference_field = reference_field
        self._conflict_means = conflict_means or ("in-flight" if isinstance(guarantee, Keyed) else "refused")
        self._fresh = not isinstance(guarantee, Keyed)

    def __repr__(self) -> str:
        return f"WebhookSink({self.name!r}, provider={self.provider!r}, guarantee={self.guarantee!r})"

    async def aclose(self) -> None:
        await close_clients()

    async def perform(self, operation: Operation) -> SendResult:
        """One POST, sent once. A provider that would act on a repeat gets a fresh connection, see `adapters.client`."""
        sending = session(fresh=self._fresh).post(
            self._url,
            data=operation.payload,
            headers=self._headers_for(operation),
            timeout=self._timeout,
            allow_redirects=False,
        )
        try:
            async with sending as response:
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
            url = URL(self._lookup.url(operation), encoded=True)
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

    def _headers_for(self, operation: Operation) -> dict[str, str]:
        headers = {
            **self._headers,
            "Content-Type": "application/json",
            "Idempotency-Key": operation.key,
            "webhook-id": operation.key,
        }
        if operation.traceparent:
            headers["traceparent"] = operation.traceparent
        if self._signer is not None:
            now = datetime.now(UTC)
            headers["webhook-timestamp"] = str(int(now.timestamp()))
            headers["webhook-signature"] = self._signer.sign(operation.key, now, operation.payload.decode())
        return headers

    def _result(self, response: aiohttp.ClientResponse, body: bytes, operation: Operation) -> SendResult:
        status = response.status
        if 200 <= status <= 299:
            return Accepted(self._reference(response, body, operation))
        why, pause_ms = explanation(status, body), retry_after_ms(response)
        if status == 429 or (status == 503 and pause_ms is not None):
            return NotSent("provider-busy", why, pause_ms)
        if status == 409 and self._conflict_means == "in-flight":
            return Ambiguous("in-flight-at-provider", why)
        if status in (408, 425) or status >= 500:
            return Ambiguous("provider-error", why)
        if status >= 400:
            return Rejected("provider-refused", why)
        if status in _REDIRECTED:
            return Rejected("redirected", "the provider has moved; redirects are not followed")
        return Ambiguous("unexpected-status", why)

    def _looked_up(self, response: aiohttp.ClientResponse, body: bytes, operation: Operation) -> LookupResult:
        if response.status == 404:
            return NotFound()
        if response.status != 200:
            return Ambiguous("provider-error", explanation(response.status, body))
        if not json_object(body):
            return Ambiguous("malformed-response", "a lookup must answer with a JSON object")
        return Accepted(self._reference(response, body, operation))

    def _reference(self, response: aiohttp.ClientResponse, body: bytes, operation: Operation) -> str:
        named = json_object(body).get(self._reference_field)
        if isinstance(named, str | int) and not isinstance(named, bool) and named != "":
            return clean_text(str(named))
        return clean_text(response.headers.get("Location") or f"{response.status} {operation.key}")


def _lookup_template(
    url: str | None, guarantee: Guarantee, what: str, where: str
) -> Template[Operation] | None:
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
    template = Template(url, OPERATION, what, where)
    if "key" not in {path.text for path in template.paths}:
        raise DeclarationError(f"{what}: lookup_url has no {{key}}", where)
    return template


def _signer(secret: str | None, what: str, where: str) -> Webhook | None:
    if secret is None:
        return None
    try:
        return Webhook(secret)
    except (binascii.Error, ValueError, EmptyWebhookSecretError):
        message = f"{what}: the secret is not base64 as Standard Webhooks have it (whsec_...)"
        raise DeclarationError(message, where) from None
