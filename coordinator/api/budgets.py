"""`/v1/budgets` and `/v1/reservations`: ceilings, what is left of them, what draws on them, and what a person knows of a bill."""

from __future__ import annotations

import re
from typing import Annotated, get_args
from uuid import UUID

import msgspec

from coordinator.api import examples, paging
from coordinator.api.answer import Answer
from coordinator.api.body import check_cost, typed
from coordinator.api.endpoint import READERS, Call, Parameter, Sent, Shown, endpoint, nothing_here
from coordinator.api.parameters import ID, PAGE
from coordinator.api.views import encode
from coordinator.core.budget import DECISION, Period, ReservationState
from coordinator.core.money import Money
from coordinator.core.view import timestamp
from coordinator.errors import MalformedRequest, NotFound, StateConflict
from coordinator.store import budgets
from coordinator.store.budgets import BudgetRow, NewBudget, ReservationRow

STATES: tuple[str, ...] = get_args(ReservationState)
STATE = Parameter("state", "query", "Only those in this state.", {"type": "string", "enum": list(STATES)})
NAME = Parameter("name", "path", "The budget's name.", required=True, example="tenant-day")
OPERATORS = frozenset({"operate"})
ADMINS = frozenset({"admin"})
_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")
Text = Annotated[str, msgspec.Meta(max_length=500)]
BillName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``provider`` names a provider's own budget: only its readings and effects draw on it."""

    ceiling: Money
    period: Period
    timezone: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "Etc/UTC"
    provider: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None


class BudgetShown(msgspec.Struct, kw_only=True):
    """Its present period. ``held + uncertain + settled <= ceiling + overage`` at every moment; ``available`` is what can still be
    reserved. ``resets_at`` is null for a total."""

    name: str
    ceiling: Money
    period: Period
    timezone: str
    provider: str | None
    held: Money
    uncertain: Money
    settled: Money
    overage: Money
    available: Money
    resets_at: str | None


class ReservationShown(msgspec.Struct, kw_only=True):
    """``amount`` is what was reserved, ``drawn`` what it takes of its budgets now: what was settled, once it is. ``expires_at`` is
    when it becomes uncertain if nobody closes it."""

    id: str
    decision: str
    operation: str | None
    kind: str
    item: str
    provider: str
    budgets: list[str]
    state: ReservationState
    amount: Money
    drawn: Money
    reason: str | None
    created_at: str
    expires_at: str | None
    closed_at: str | None


class RealCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``cost`` may be nothing; ``note`` goes into the receipt."""

    cost: Money
    note: Text = ""


class LateBill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``bill`` is the provider's own name for it, such as an invoice's line; ``note`` goes into the receipt."""

    bill: BillName
    cost: Money
    note: Text = ""


@endpoint(
    "GET",
    "/v1/budgets",
    "List budgets",
    scopes=READERS,
    parameters=[*PAGE],
    answers={200: Shown("A page of budgets, by name.", BudgetShown, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """Each with its present period, by the database's clock in the budget's own time zone."""
    limit, after = paging.limit_of(call.query), paging.position_of(call.query, "budgets")
    async with call.service.database.transaction(call.tenant) as connection:
        rows = await budgets.budgets(connection, call.tenant, after=after or "", limit=limit + 1)
    following = paging.cursor("budgets", rows[limit - 1].name) if len(rows) > limit else None
    return Answer(200, paging.page(map(budget_shown, rows[:limit]), following))


@endpoint(
    "GET",
    "/v1/budgets/{name}",
    "Show a budget",
    scopes=READERS,
    parameters=[NAME],
    answers={200: Shown("The budget in its present period.", BudgetShown)},
    problems=[NotFound],
)
async def show(call: Call) -> Answer:
    """What is held for work under way, uncertain since nobody knows what it cost, settled, and what is available."""
    return await _as_it_is_now(call, call.segment(3))


@endpoint(
    "PUT",
    "/v1/budgets/{name}",
    "Set a budget",
    scopes=ADMINS,
    parameters=[NAME],
    body=Sent(Ceiling, examples.BUDGET),
    answers={200: Shown("The budget as it is now.", BudgetShown)},
    problems=[MalformedRequest, StateConflict],
)
async def put(call: Call) -> Answer:
    """Makes it, or changes its ceiling from its present period on. A ceiling below what is taken already is allowed: the excess
    becomes an explicit overage, and nothing more is reserved. Currency, period, time zone and provider can only be changed while
    nothing has been drawn on it. What is not in its currency does not draw on it."""
    name, sent = call.segment(3), typed(await call.body(), Ceiling)
    if not _NAME.match(name) or name == DECISION:
        what = f"1..63 characters of a-z, 0-9 and -, starting with a letter, and not {DECISION!r}"
        raise MalformedRequest(f"A budget's name is {what}.")
    if sent.ceiling.amount_minor < 0:
        raise MalformedRequest("A ceiling is nothing or more.", [("/ceiling/amount_minor", "is negative")])
    await call.service.budgets.set(
        call.caller,
        NewBudget(
            name=name,
            ceiling=sent.ceiling,
            period=sent.period,
            timezone=sent.timezone,
            provider=sent.provider,
        ),
    )
    return await _as_it_is_now(call, name)


@endpoint(
    "GET",
    "/v1/budgets/{name}/reservations",
    "List what draws on a budget",
    scopes=READERS,
    parameters=[
        NAME,
        STATE,
        *PAGE,
    ],
    answers={200: Shown("A page of reservations, the newest first.", ReservationShown, page=True)},
    problems=[MalformedRequest, NotFound],
)
async def reservations(call: Call) -> Answer:
    """Of all its periods. An uncertain one waits for its provider or a person to say what was billed."""
    return await _page(call, budget=call.segment(3))


@endpoint(
    "GET",
    "/v1/reservations",
    "List reservations",
    scopes=READERS,
    parameters=[
        Parameter("decision", "query", "Only those of this decision.", {"type": "string", "format": "uuid"}),
        STATE,
        *PAGE,
    ],
    answers={200: Shown("A page of reservations, the newest first.", ReservationShown, page=True)},
    problems=[MalformedRequest],
)
async def all_reservations(call: Call) -> Answer:
    """Of every budget. A decision shows its money as it was at rest; this shows what has become of it since: late bills, what its
    effects cost, what was uncertain and is known by now."""
    return await _page(call, decision=paging.uuid_of(call.query, "decision"))


async def _page(call: Call, *, budget: str | None = None, decision: UUID | None = None) -> Answer:
    limit, before = paging.limit_of(call.query), paging.id_before(call.query, "reservations")
    state = paging.choice_of(call.query, "state", STATES)
    async with call.service.database.transaction(call.tenant) as connection:
        if budget is not None and await budgets.budget(connection, call.tenant, budget) is None:
            raise nothing_here()
        rows = await budgets.reservations(
            connection,
            call.tenant,
            budget=budget,
            decision=decision,
            state=state,
            before=before,
            limit=limit + 1,
        )
    following = paging.cursor("reservations", rows[limit - 1].id) if len(rows) > limit else None
    return Answer(200, paging.page(map(reservation_shown, rows[:limit]), following))


@endpoint(
    "GET",
    "/v1/reservations/{id}",
    "Show a reservation",
    scopes=READERS,
    parameters=[ID],
    answers={200: Shown("The reservation.", ReservationShown)},
    problems=[NotFound],
)
async def reservation(call: Call) -> Answer:
    """What was reserved for one reading or effect of a decision, and what became of it."""
    return await _reservation_now(call, call.id())


@endpoint(
    "POST",
    "/v1/reservations/{id}/resolve",
    "Say what an uncertain reservation cost",
    scopes=OPERATORS,
    parameters=[ID],
    body=Sent(RealCost, examples.REAL_COST),
    answers={200: Shown("The reservation, settled.", ReservationShown)},
    problems=[MalformedRequest, NotFound, StateConflict],
)
async def resolve(call: Call) -> Answer:
    """For one that is `uncertain`, and nothing else: a person has looked at the provider's bill. It is settled with that, once and
    for all; what exceeds the reservation is an overage."""
    id, sent = call.id(), typed(await call.body(), RealCost)
    check_cost(sent.cost)
    await call.service.budgets.resolve(call.caller, id, sent.cost, sent.note)
    return await _reservation_now(call, id)


@endpoint(
    "POST",
    "/v1/reservations/{id}/bills",
    "Enter a bill that came late",
    scopes=OPERATORS,
    parameters=[ID],
    body=Sent(LateBill, examples.LATE_BILL),
    answers={200: Shown("The reservation with the bill.", ReservationShown)},
    problems=[MalformedRequest, NotFound, StateConflict],
)
async def bills(call: Call) -> Answer:
    """For one that is `settled` or `released`, which it stays: all of the bill becomes an explicit overage of the period in which
    it was reserved. Each bill counts once, by its name."""
    id, sent = call.id(), typed(await call.body(), LateBill)
    if sent.cost.amount_minor <= 0 or "\x00" in sent.bill:
        raise MalformedRequest("A bill has a name and a positive cost.", [("/cost", "must be positive")])
    await call.service.budgets.bill_late(call.caller, id, sent.bill, sent.cost, sent.note)
    return await _reservation_now(call, id)


async def _as_it_is_now(call: Call, name: str) -> Answer:
    async with call.service.database.transaction(call.tenant) as connection:
        row = await budgets.budget(connection, call.tenant, name)
    if row is None:
        raise nothing_here()
    return Answer(200, budget_shown(row))


async def _reservation_now(call: Call, id: UUID) -> Answer:
    async with call.service.database.transaction(call.tenant) as connection:
        row = await budgets.reservation(connection, call.tenant, id)
    if row is None:
        raise nothing_here()
    return Answer(200, reservation_shown(row))


def budget_shown(row: BudgetRow) -> bytes:
    def money(amount: int) -> Money:
        return Money(amount, row.currency)

    taken = row.held + row.uncertain + row.settled
    return encode(
        BudgetShown(
            name=row.name,
            ceiling=money(row.ceiling_minor),
            period=row.period,
            timezone=row.timezone,
            provider=row.provider,
            held=money(row.held),
            uncertain=money(row.uncertain),
            settled=money(row.settled),
            overage=money(row.overage),
            available=money(max(0, row.ceiling_minor - taken)),
            resets_at=None if row.resets_at is None else timestamp(row.resets_at),
        )
    )


def reservation_shown(row: ReservationRow) -> bytes:
    return encode(
        ReservationShown(
            id=str(row.id),
            decision=str(row.decision_id),
            operation=None if row.operation_id is None else str(row.operation_id),
            kind=row.kind,
            item=row.item,
            provider=row.provider,
            budgets=row.budgets,
            state=row.state,
            amount=Money(row.amount_minor, row.currency),
            drawn=Money(row.drawn_minor, row.currency),
            reason=row.reason,
            created_at=timestamp(row.created_at),
            expires_at=None if row.expires_at is None else timestamp(row.expires_at),
            closed_at=None if row.closed_at is None else timestamp(row.closed_at),
        )
    )


ENDPOINTS = (index, show, put, reservations, all_reservations, reservation, resolve, bills)
