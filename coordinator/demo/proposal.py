"""The demo's decision: what may we promise a customer for a maintenance job, at which price, by when?

Capacity, customer, cost, today's date and the euro's rate are read at once; the delivery date as soon as the customer's country
is known. The rates are those of the European Central Bank and the calendar has the country's real holidays.

    COORDINATOR_PROVIDERS_URL=http://127.0.0.1:PORT coordinator serve coordinator.demo.proposal:coordinator
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Annotated, Literal

import msgspec

from adapters.function import FunctionSource
from adapters.http import HttpSource, WebhookSink
from coordinator import (
    Commit,
    Coordinator,
    Decisive,
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
from coordinator.core.money import exponent

PROVIDERS = os.environ.get("COORDINATOR_PROVIDERS_URL", "http://127.0.0.1:9")
"""Port 9 is where nothing answers: the module also loads where no providers run."""
Currency = Literal["SGD", "EUR", "USD", "GBP", "JPY"]
LARGEST_DISCOUNT_PERCENT = 25


class QuoteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for. ``start`` is the day from which delivery is counted, today if it is left out."""

    customer: str
    site: str
    hours: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    currency: Currency
    discount_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    start: date | None = None


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


class Customer(msgspec.Struct, frozen=True):
    name: str
    country: str
    discount_percent: int


class Cost(msgspec.Struct, frozen=True):
    """In cents of the euro."""

    estimate_minor: int


class Rate(msgspec.Struct, frozen=True):
    """One euro in the quote's currency, a decimal as it was published."""

    rate: str
    published: date


class Day(msgspec.Struct, frozen=True):
    date: date


class Tone(msgspec.Struct, frozen=True):
    segment: str


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record that decisions change."""

    state: Literal["draft", "quoted", "accepted"]
    price: Money | None = None
    delivery: date | None = None


def allowed(old: Proposal | None, new: Proposal) -> str | None:
    """Which changes of a proposal nobody may make, neither a decision nor a person."""
    if old and old.state == "accepted" and new.state != "accepted":
        return "an accepted proposal stays accepted"
    if new.state != "draft" and (new.price is None or new.price.amount_minor <= 0):
        return f"a proposal that is {new.state} has a positive price"
    return None


async def day_asked_for(request: QuoteRequest, _: Mapping[str, object]) -> Day:
    return Day(request.start or datetime.now(UTC).date())


capacity = Evidence(
    "capacity",
    HttpSource("planner", f"{PROVIDERS}/capacity/{{input.site}}", returns=Capacity),
    deadline_ms=2000,
    freshness=Decisive("available_hours"),
)
customer = Evidence(
    "customer",
    HttpSource("crm", f"{PROVIDERS}/customers/{{input.customer}}", returns=Customer),
    deadline_ms=2000,
    freshness=MaxAge(timedelta(hours=1)),
)
cost = Evidence(
    "cost",
    HttpSource("estimator", f"{PROVIDERS}/costs/{{input.site}}-{{input.hours}}h", returns=Cost),
    deadline_ms=2000,
    freshness=Decisive("estimate_minor"),
)
rate = Evidence(
    "rate",
    HttpSource("ecb", f"{PROVIDERS}/rates/EUR/{{input.currency}}", returns=Rate),
    deadline_ms=2000,
    freshness=MaxAge(timedelta(days=1)),
)
start = Evidence("start", FunctionSource("clock", day_asked_for, returns=Day), deadline_ms=500)
delivery = Evidence(
    "delivery",
    HttpSource(
        "calendar",
        f"{PROVIDERS}/calendar/{{evidence.customer.country}}/{{evidence.start.date}}?working_days=10",
        returns=Day,
    ),
    deadline_ms=2000,
    after=["customer", "start"],
)
tone = Evidence(
    "tone",
    HttpSource("writer", f"{PROVIDERS}/customers/tone-{{input.customer}}", returns=Tone),
    deadline_ms=150,
    required=False,
)
send_quote = WebhookSink(
    "send-quote",
    f"{PROVIDERS}/effects/send-quote",
    guarantee=keyed(hours=24, lookup_lag=timedelta(seconds=2)),
    lookup_url=f"{PROVIDERS}/effects/send-quote/{{key}}",
    timeout_ms=2000,
)


def quote(request: QuoteRequest, packet: Packet, record: Record[Proposal]) -> Outcome:
    """The policy: pure, synchronous, typed."""
    if record.data and record.data.state == "accepted":
        return Decline("the proposal was accepted already")
    if packet[capacity].available_hours < request.hours:
        return Decline(f"{request.hours} h asked for, {packet[capacity].available_hours} h free")
    discount = packet[customer].discount_percent + request.discount_percent
    if discount >= 100:
        return Review(f"{discount} % discount would leave nothing to pay")
    price = in_currency(packet[cost].estimate_minor, packet[rate].rate, discount, request.currency)
    proposal = Proposal("quoted", price, packet[delivery].date)
    terms = {
        "price": price,
        "delivery": proposal.delivery,
        "discount_percent": discount,
        "tone": packet[tone].or_else(Tone("neutral")).segment,
    }
    sent = {"proposal": record.id, "customer": request.customer, **terms}
    offer = Commit(terms, changes=[record.becomes(proposal)], effects=[Effect("send-quote", sent)])
    if discount > LARGEST_DISCOUNT_PERCENT:
        needs = f"{discount} % discount; up to {LARGEST_DISCOUNT_PERCENT} % need no approval"
        return Review(needs, proposal=offer)
    return offer


def in_currency(euro_cents: int, rate: str, discount: int, currency: str) -> Money:
    """Exact up to the last step, which rounds half up to the currency's own minor unit."""
    exact = Decimal(euro_cents) * Decimal(rate) * (100 - discount) / 100
    return Money(int(exact.scaleb(exponent(currency) - 2).to_integral_value(ROUND_HALF_UP)), currency)


proposal_quote = decision_type(
    "proposal-quote",
    request=QuoteRequest,
    policy=quote,
    policy_version="1",
    evidence=[capacity, customer, cost, rate, start, delivery, tone],
    effects=[send_quote],
    record=RecordKind("proposal", Proposal, transition=allowed),
)
coordinator = Coordinator([proposal_quote])
