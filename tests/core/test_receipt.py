"""A receipt is the canonical JSON of one change."""

from __future__ import annotations

import math

import pytest

from coordinator.core.money import Money
from coordinator.core.receipt import Receipt, receipt


def test_a_receipt_names_its_change_and_holds_the_facts_in_canonical_order() -> None:
    made = receipt("decision.committed", decision_id="d-1", version=9, amount=Money(40, "SGD"), at=1.0)
    assert made == Receipt(
        kind="decision.committed",
        decision_id="d-1",
        operation_id=None,
        body=b'{"amount":{"amount_minor":40,"currency":"SGD"},"at":1,"version":9}',
    )


def test_facts_that_are_not_known_are_left_out_and_others_are_not() -> None:
    made = receipt("operation.failed", decision_id=None, operation_id="o-1", a=None, b=0, c="", d=False, e=[])
    assert made.body == b'{"b":0,"c":"","d":false,"e":[]}'
    assert made.operation_id == "o-1"


def test_facts_in_another_order_are_the_same_receipt() -> None:
    assert receipt("a.b", decision_id="d", x=1, y=2) == receipt("a.b", decision_id="d", y=2, x=1)


def test_a_fact_that_json_cannot_hold_is_never_written_down_as_something_else() -> None:
    with pytest.raises(ValueError, match="nan"):
        receipt("a.b", decision_id="d", share=math.nan)
