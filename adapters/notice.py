"""What a provider tells us of its own accord, checked: a Standard Webhook that says what became of one of our keys.

The signature (standardwebhooks.com) covers the event's id, its time and its bytes; an event that is more than five minutes old or
ahead is refused, so that a captured one is of no use later. Within that time a repeat has the same ``webhook-id``, and whoever
stores notices counts an id once. The body is a JSON object:

    {"key": "...", "happened": true, "reference": "pay_81"}      {"key": "...", "happened": false, "reason": "card expired"}

No refusal says more than what kind of fault it found: it is shown to whoever sent the event.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping

import msgspec
from standardwebhooks.webhooks import EmptyWebhookSecretError, Webhook, WebhookVerificationError

from adapters.body import member
from adapters.wire import json_object
from coordinator.core.canonical import JsonValue
from coordinator.core.effect import Notice, NoticeRefused
from coordinator.core.evidence import clean_text
from coordinator.errors import DeclarationError

LONGEST_ID = 255


class NoticeFields(msgspec.Struct, frozen=True, kw_only=True):
    """Where in its events, dotted, the provider puts what we need: ``NoticeFields(key="data.idempotency_key")``."""

    key: str = "key"
    happened: str = "happened"
    reference: str = "reference"
    reason: str = "reason"


class SignedNotices:
    """Reads the notices of one provider."""

    def __init__(self, secret: Webhook, fields: NoticeFields) -> None:
        self._secret = secret
        self._fields = fields

    def read(self, headers: Mapping[str, str], body: bytes) -> Notice:
        """``headers`` have lower-case names. Raises `NoticeRefused`."""
        try:
            self._secret.verify(body, dict(headers), json_parse=False)
        except WebhookVerificationError as error:
            raise NoticeRefused(clean_text(str(error))) from None
        except ValueError:  # what the library lets through of a signature that is none
            raise NoticeRefused("the signature cannot be understood") from None
        event_id, said = headers["webhook-id"], json_object(body)
        key = member(said, self._fields.key)
        happened = member(said, self._fields.happened)
        if not isinstance(key, str) or not 1 <= len(key) <= LONGEST_ID:
            raise NoticeRefused(f"{self._fields.key} is not a key of 1..{LONGEST_ID} characters")
        if not isinstance(happened, bool):
            raise NoticeRefused(f"{self._fields.happened} is neither true nor false")
        if len(event_id) > LONGEST_ID or not event_id.isprintable():
            raise NoticeRefused(f"webhook-id is not 1..{LONGEST_ID} printable characters")
        return Notice(
            event_id=event_id,
            key=key,
            happened=happened,
            reference=_words(member(said, self._fields.reference)),
            reason=_words(member(said, self._fields.reason)),
        )


def standard_webhook(secret: str, what: str, where: str) -> Webhook:
    """A secret in base64, with or without ``whsec_``. Raises `DeclarationError`, which does not show it."""
    try:
        return Webhook(secret)
    except (binascii.Error, ValueError, EmptyWebhookSecretError):
        message = f"{what}: the secret is not base64 as Standard Webhooks have it (whsec_...)"
        raise DeclarationError(message, where) from None


def _words(said: JsonValue) -> str:
    plain = isinstance(said, str | int) and not isinstance(said, bool)
    return clean_text(str(said)) if plain else ""
