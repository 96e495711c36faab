"""Decision types that cost money, served for `loadtests.budgets`. Their source answers from memory: what is measured is the money.

unpaid    one reading, no effect
paid      the same, with a reservation that is settled with what the reading cost
slow      paid, and the reading takes a while: many are held at once
erratic   paid, and the reading costs less or more than was reserved, or does not say, or fails
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from coordinator import Commit, Coordinator, DecisionType, Evidence, Outcome, Packet, Record, decision_type
from coordinator.core.evidence import Answer, Failed, Found, ReadRequest
from coordinator.core.money import Money
from loadtests.decision_types import Ask

RESERVED: Final = 30
"""Minor units, of each reading."""
SLOW_S: Final = 1.0


class Told(msgspec.Struct, frozen=True):
    text: str


class Oracle:
    """Takes ``seconds()`` and then says ``cost()``; None: it does not say, less than nothing: it fails."""

    returns = Told

    def __init__(
        self, name: str, cost: Callable[[], int | None], seconds: Callable[[], float] | None = None
    ) -> None:
        self.name = name
        self.provider = name
        self._cost = cost
        self._seconds = seconds

    async def read(self, request: ReadRequest) -> Answer[Told]:
        if self._seconds is not None:
            await asyncio.sleep(self._seconds())
        cost = self._cost()
        if cost is not None and cost < 0:
            return Failed("down", "it does not work now")
        return Found(Told("42"), cost=None if cost is None else Money(cost, "SGD"))


def _erratic() -> int | None:
    dice = random.random()
    return None if dice < 0.1 else -1 if dice < 0.2 else random.randint(0, 2 * RESERVED)


def _declared(name: str, source: Oracle, reserves: Money | None) -> DecisionType[Ask, None]:
    evidence = Evidence("told", source, deadline_ms=10_000, attempts=1, reserves=reserves)
    return decision_type(
        name, request=Ask, policy=_policy(evidence.name), policy_version="1", evidence=[evidence]
    )


def _policy(name: str) -> Callable[[Ask, Packet, Record[Any]], Outcome]:
    def tell(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({"state": packet.item(name).state})

    return tell


PRICE: Final = Money(RESERVED, "SGD")
coordinator = Coordinator(
    [
        _declared("unpaid", Oracle("free", lambda: None), None),
        _declared("paid", Oracle("paid", lambda: RESERVED), PRICE),
        _declared("slow", Oracle("slow", lambda: RESERVED, lambda: SLOW_S), PRICE),
        _declared("erratic", Oracle("erratic", _erratic, lambda: random.uniform(0, 0.2)), PRICE),
    ]
)
