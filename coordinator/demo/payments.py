"""A second example: take a payment, in steps that depend on each other and of which some can be undone.

    authorise   holds the money; `void` undoes it
    capture     after authorise: takes the money
    dispatch    beside them: the warehouse begins to pack, and cannot be told to stop

All three are promised by one commit. If the capture fails for good, the authorisation is voided, since the outcome says
``on_failure="compensate"``; the warehouse's work stays `succeeded`, because it happened and nothing can undo it: that is what a
person sees. (Whether to let the warehouse begin before the capture is a business decision; ``after=["capture"]`` is the other one.)

    COORDINATOR_PROVIDERS_URL=http://127.0.0.1:PORT coordinator serve coordinator.demo.payments:coordinator
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import msgspec

from adapters.http import HttpSource, WebhookSink
from coordinator import (
    Commit,
    Coordinator,
    Decline,
    Effect,
    Evidence,
    MaxAge,
    Money,
    Outcome,
    Packet,
    Record,
    RecordKind,
    Review,
    decision_type,
    keyed,
)

PROVIDERS = os.environ.get("COORDINATOR_PROVIDERS_URL", "http://127.0.0.1:9")
"""Port 9 is where nothing answers: the module also loads where no providers run."""
LARGEST_UNSEEN_MINOR = 1_000_000


class PaymentRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record is the order that is paid."""

    customer: str
    amount: Money


class Customer(msgspec.Struct, frozen=True):
    name: str
    country: str


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: Literal["open", "paying"]
    amount: Money | None = None


def pay(request: PaymentRequest, customer: Customer, record: Record[Order]) -> Outcome:
    """The policy, once its evidence is read."""
    if record.data and record.data.state == "paying":
        return Decline("this order is being paid already")
    if request.amount.amount_minor <= 0:
        return Decline("there is nothing to pay")
    held = {"order": record.id, "amount": request.amount}
    payment = Commit(
        {"amount": request.amount, "customer": customer.name},
        changes=[record.becomes(Order("paying", request.amount))],
        effects=[
            Effect("authorise", held, compensation=Effect("void", held)),
            Effect("capture", held, after=["authorise"]),
            Effect("dispatch", {"order": record.id, "to": customer.country}),
        ],
        on_failure="compensate",
    )
    if request.amount.amount_minor > LARGEST_UNSEEN_MINOR:
        return Review("a person looks at payments of this size", proposal=payment)
    return payment


def payments(providers: str) -> Coordinator:
    """The coordinator of this example, with its providers at this address."""
    customer = Evidence(
        "customer",
        HttpSource("crm", f"{providers}/customers/{{input.customer}}", returns=Customer),
        deadline_ms=2000,
        freshness=MaxAge(timedelta(hours=1)),
    )

    def policy(request: PaymentRequest, packet: Packet, record: Record[Order]) -> Outcome:
        return pay(request, packet[customer], record)

    take_payment = decision_type(
        "take-payment",
        request=PaymentRequest,
        policy=policy,
        policy_version="1",
        evidence=[customer],
        effects=[_sink(providers, name) for name in ("authorise", "capture", "void", "dispatch")],
        record=RecordKind("order", Order),
    )
    return Coordinator([take_payment])


def _sink(providers: str, name: str) -> WebhookSink:
    url = f"{providers}/effects/{name}"
    return WebhookSink(
        name,
        url,
        guarantee=keyed(hours=24, lookup_lag=timedelta(seconds=1)),
        lookup_url=url + "/{key}",
        timeout_ms=2000,
    )


coordinator = payments(PROVIDERS)
