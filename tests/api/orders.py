"""A decision type with several effects, each with another guarantee, at the demo providers: its input says which are wanted.

`charge` is unguarded and can be undone by `refund`; `ship` can be asked by key; `mail` is keyed; `book-courier` is a provider that
takes the order and tells later, by a signed notice, what became of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from adapters.http import WebhookSink
from coordinator import Commit, Coordinator, Effect, Keyed, Outcome, Packet, Record, RecordKind, decision_type
from coordinator.core.effect import (
    Ambiguous,
    Lookup,
    NotFound,
    Notice,
    NoticeRefused,
    Operation,
    Unguarded,
)

PROVIDERS = os.environ.get("COORDINATOR_PROVIDERS_URL", "http://127.0.0.1:9")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER_SECRET = "whsec_Z2VoZWltZXMgV29ydCBkZXIgYW5kZXJlbg=="
SLOW_MS = 30_000
"""Until that long after a send, `ship` shows nothing by itself: a test decides when it is asked."""


class OrderInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effects: list[str]
    in_order: bool = False
    on_failure: Literal["keep", "compensate"] = "keep"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effects: list[str]


class Event(msgspec.Struct, frozen=True):
    """The body of the courier's notices."""

    key: str
    happened: bool
    reference: str = ""
    reason: str = ""


class Courier:
    """Takes an order and tells later what became of it, signed with ``secret``."""

    name = "book-courier"
    provider = "mail"
    guarantee = Unguarded()
    timeout_ms = 1000

    def __init__(self, secret: str) -> None:
        self._secret = Webhook(secret)

    async def perform(self, operation: Operation) -> Ambiguous:
        return Ambiguous("told-later", "the courier tells us later")

    async def lookup(self, operation: Operation) -> NotFound:
        return NotFound()

    def notice(self, headers: Mapping[str, str], body: bytes) -> Notice:
        try:
            self._secret.verify(body, dict(headers), json_parse=False)
            event = msgspec.json.decode(body, type=Event)
        except (WebhookVerificationError, ValueError) as error:
            raise NoticeRefused(str(error)) from None
        return Notice(
            event_id=headers["webhook-id"],
            key=event.key,
            happened=event.happened,
            reference=event.reference,
            reason=event.reason,
        )


def signed(
    body: bytes, event: str, *, secret: str = SECRET, at: datetime | None = None
) -> list[tuple[str, str]]:
    """The headers of a notice."""
    now = at or datetime.now(UTC)
    signature = Webhook(secret).sign(event, now, body.decode("utf-8", "surrogateescape"))
    return [
        ("webhook-id", event),
        ("webhook-timestamp", str(int(now.timestamp()))),
        ("webhook-signature", signature),
    ]


def place(request: OrderInput, packet: Packet, record: Record[Order]) -> Outcome:
    effects: list[Effect] = []
    for name in request.effects:
        effects.append(
            Effect(
                name,
                {"order": record.id},
                after=[before.sink for before in effects] if request.in_order else (),
                compensation=Effect("refund", {"order": record.id}) if name == "charge" else None,
            )
        )
    return Commit(
        {"effects": request.effects},
        changes=[record.becomes(Order(request.effects))],
        effects=effects,
        on_failure=request.on_failure,
    )


def _url(name: str) -> str:
    return f"{PROVIDERS}/effects/{name}"


charge = WebhookSink("charge", _url("charge"), guarantee=Unguarded(), provider="bank")
refund = WebhookSink("refund", _url("refund"), guarantee=Keyed(window_ms=3_600_000), provider="bank-refunds")
mail = WebhookSink("mail", _url("mail"), guarantee=Keyed(window_ms=3_600_000), provider="mail")
ship = WebhookSink(
    "ship",
    _url("ship"),
    guarantee=Lookup(lag_ms=SLOW_MS),
    lookup_url=_url("ship") + "/{key}",
    inbound_secret=SECRET,
    provider="carrier",
)

orders = RecordKind("order", Order)
order = decision_type(
    "order",
    request=OrderInput,
    policy=place,
    policy_version="1",
    evidence=[],
    effects=[charge, refund, ship, mail, Courier(SECRET)],
    record=orders,
)
other_courier = decision_type(
    "courier-order",
    request=OrderInput,
    policy=place,
    policy_version="1",
    evidence=[],
    effects=[Courier(OTHER_SECRET)],
    record=orders,
)
coordinator = Coordinator([order, other_courier])
