"""An effect as a POST: the operation's key as ``Idempotency-Key``, its payload byte for byte, signed if there is a secret.

It is an `HttpSink` with everything decided: what its answers mean is in `adapters.http_sink` and `adapters.statuses`. The
signature is that of Standard Webhooks (standardwebhooks.com): ``webhook-id`` is the key, so that a receiver that keeps ids
deduplicates by it as well. With ``inbound_secret`` it also reads what the provider sends of its own accord (`adapters.notice`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from adapters.declare import checked_headers, declared_at
from adapters.http_sink import HttpSink
from adapters.notice import NoticeFields, SignedNotices, standard_webhook
from adapters.statuses import Conflict
from coordinator.core.effect import Guarantee, Notice, NoticeRefused, Operation
from coordinator.core.money import Money
from coordinator.errors import DeclarationError

_RESERVED = frozenset({"webhook-id", "webhook-signature", "webhook-timestamp"})


class WebhookSink(HttpSink):
    """A sink behind one URL.

    ``secret`` signs what we send, ``inbound_secret`` is what the provider signs its notices with; both are Standard Webhooks
    secrets (base64, with or without ``whsec_``). The rest is as for `HttpSink`. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        guarantee: Guarantee,
        secret: str | None = None,
        inbound_secret: str | None = None,
        notice_fields: NoticeFields = NoticeFields(),
        lookup_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_ms: int = 10_000,
        provider: str | None = None,
        reference_field: str = "reference",
        conflict_means: Conflict | None = None,
        replayed_header: str = "Idempotent-Replayed",
        reserves: Money | None = None,
        cost_field: str | None = None,
    ) -> None:
        where, what = declared_at(), f"sink {name!r}"
        if "{" in url or "}" in url:
            raise DeclarationError(
                f"{what}: its URL is the same for all operations; placeholders go into lookup_url", where
            )
        self._signer = None if secret is None else standard_webhook(secret, what, where)
        self._notices = (
            None
            if inbound_secret is None
            else SignedNotices(standard_webhook(inbound_secret, what, where), notice_fields)
        )
        super().__init__(
            name,
            url,
            guarantee=guarantee,
            headers=checked_headers(headers, _RESERVED, what, where),
            lookup_url=lookup_url,
            timeout_ms=timeout_ms,
            provider=provider,
            reference_field=reference_field,
            conflict_means=conflict_means,
            replayed_header=replayed_header,
            reserves=reserves,
            cost_field=cost_field,
            sign=self._standard_headers,
        )

    def notice(self, headers: Mapping[str, str], body: bytes) -> Notice:
        """What an event of the provider says, its signature checked. Raises `NoticeRefused`."""
        if self._notices is None:
            raise NoticeRefused("this effect takes no notices: it was declared without an inbound_secret")
        return self._notices.read(headers, body)

    def _standard_headers(self, operation: Operation, body: bytes) -> dict[str, str]:
        headers = {"webhook-id": operation.key}
        if self._signer is not None:
            now = datetime.now(UTC)
            headers["webhook-timestamp"] = str(int(now.timestamp()))
            headers["webhook-signature"] = self._signer.sign(operation.key, now, body.decode())
        return headers
