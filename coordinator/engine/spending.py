"""Spending: what a decision needs before it works, and what its work has cost when it rests, as the store wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from coordinator.core.budget import DECISION, Short
from coordinator.core.decision import DecisionType
from coordinator.core.money import Money, total
from coordinator.core.view import BudgetView, timestamp
from coordinator.engine.run import Engine, Run
from coordinator.errors import BudgetExhausted
from coordinator.store.bills import Bill
from coordinator.store.closing import Spending
from coordinator.store.commit import NewOperation
from coordinator.store.reserve import Want


def want_of(
    engine: Engine,
    type: DecisionType[Any, Any],
    id: UUID,
    token: int,
    seconds: float,
    ceiling: Money | None,
) -> Want:
    """What decision ``id`` reserves, for the ``seconds`` it may still take and one lease more; under the ``ceiling`` of its own."""
    return Want(
        decision_id=id,
        token=token,
        needs=type.needs,
        ids=[engine.new_id() for _ in type.needs],
        on_exhausted=type.on_exhausted,
        ceiling=ceiling,
        expires_ms=max(0, round(seconds * 1000)) + engine.settings.lease_ms,
    )


def exhausted(short: Short, *, decision: UUID | None = None) -> BudgetExhausted:
    """The refusal: which budget, what is left of it, when it resets. ``decision``: the one that was stored all the same."""
    resets = None if short.resets_at is None else timestamp(short.resets_at)
    lacking = f"has {short.available} left and {short.needed} is needed"
    if short.budget == DECISION:
        detail = f"the request's own ceiling {lacking}"
    else:
        when = "it does not reset" if resets is None else f"it resets at {resets}"
        detail = f"budget {short.budget!r} {lacking}; {when}"
    return BudgetExhausted(
        detail,
        stored=decision is not None,
        decision=None if decision is None else str(decision),
        budget=short.budget,
        needed=short.needed,
        available=short.available,
        resets_at=resets,
    )


def paid_operations(run: Run, operations: Sequence[NewOperation]) -> Sequence[NewOperation]:
    """With the mark that their decision holds reservations for some of them."""
    if not run.held or not any(("effect", operation.effect) in run.held for operation in operations):
        return operations
    return [msgspec.structs.replace(operation, paid=True) for operation in operations]


def spending_of(run: Run, operations: Sequence[NewOperation]) -> Spending | None:
    """What became of the money; None where there was none to reserve. Of several effects of one sink the first has the
    reservation."""
    if not run.type.needs:
        return None
    first: dict[str, UUID] = {}
    for operation in operations:
        if operation.paid:
            first.setdefault(operation.effect, operation.id)
    return Spending(
        spent={name: [cost.amount_minor for cost in costs] for name, costs in _new_costs(run).items()},
        silent=frozenset(run.silent),
        accounted=run.accounted,
        operations=first,
    )


def unreserved_of(engine: Engine, run: Run) -> list[Bill]:
    """What sources billed that nothing was reserved for."""
    held = run.held or {}
    return [
        Bill(
            id=engine.new_id(),
            kind="evidence",
            item=name,
            provider=run.type.evidence[name].provider or "",
            cost=cost,
        )
        for name, costs in _new_costs(run).items()
        if ("evidence", name) not in held and (cost := total(costs)) is not None and cost.amount_minor
    ]


def budget_view(run: Run) -> BudgetView:
    """A call that was begun and did not say what it cost may still be billed: its reservation is uncertain."""
    held = {} if run.held is None and run.short is not None else run.held
    reserved = [need for need in run.type.needs if held is None or (need.kind, need.item) in held]
    silent = [
        need.amount
        for need in reserved
        if need.kind == "evidence" and need.item in run.silent | run.silent_before
    ]
    return BudgetView(
        reserved=total([need.amount for need in reserved]),
        settled=total([cost for costs in run.spent.values() for cost in costs]),
        uncertain=total(silent),
    )


def _new_costs(run: Run) -> dict[str, list[Money]]:
    return {name: costs[run.settled.get(name, 0) :] for name, costs in run.spent.items()}
