"""Reports: whether what a worker says of its task can be evidence of the decision that it is for.

It is checked while the worker can still correct it, by the process that receives it, under the lock of the task's row. What that
process does not know (another release asked for it) it lets pass: whoever makes the packet checks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from coordinator.core.decision import DecisionType
from coordinator.core.evidence import RemoteSource
from coordinator.core.fit import Misfit, fitted
from coordinator.core.money import Money
from coordinator.core.task import Completed, NotCompleted
from coordinator.errors import BodyTooLarge, MalformedRequest, RequestRefused
from coordinator.store.claims import Held, Report


class Reports:
    def __init__(self, types: Mapping[str, DecisionType[Any, Any]], max_evidence_bytes: int) -> None:
        self._types = types
        self._max_bytes = max_evidence_bytes

    def refusal(self, held: Held, report: Report) -> RequestRefused | None:
        """Why a report by the task's present holder is not taken."""
        declared = self._types.get(held.type)
        if declared is None:
            return None
        currency = declared.reserves[0].currency if declared.reserves else held.ceiling_currency
        if report.state == "failed":
            return _of_cost(msgspec.json.decode(report.encoded, type=NotCompleted).cost, currency)
        answer = msgspec.json.decode(report.encoded, type=Completed)
        evidence = declared.evidence.get(held.evidence)
        source = None if evidence is None else evidence.by_worker
        known = source if source is not None and source.name == held.source else None
        return self._of_result(answer.result, known) or _of_cost(answer.cost, currency)

    def _of_result(self, result: object, source: RemoteSource[Any] | None) -> RequestRefused | None:
        """Without a result there is no such thing, which every source may say."""
        if result is None or source is None:
            return None
        try:
            plain = fitted(result, source.returns)
        except Misfit as error:
            pointer = f"/result{error.pointer}"
            detail = f"The result is not what {source.name} returns, at {pointer}: {error.what}."
            return MalformedRequest(detail, [(pointer, error.what)])
        if len(msgspec.json.encode(plain)) > self._max_bytes:
            return BodyTooLarge(f"A result may have at most {self._max_bytes} bytes.")
        return None


def _of_cost(cost: Money | None, currency: str | None) -> MalformedRequest | None:
    if cost is None or currency is None or cost.currency == currency:
        return None
    detail = f"The decision is paid in {currency}; a cost in {cost.currency} cannot be counted."
    return MalformedRequest(detail, [("/cost/currency", f"must be {currency}")])
