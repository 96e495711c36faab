"""Records: locked in one order, changed only as their kind allows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.core.record import Change, Record, RecordKind


class Stock(msgspec.Struct, frozen=True):
    left: int


def never_grows(old: Stock | None, new: Stock) -> str | None:
    if old is None:
        return None if new.left >= 0 else "a stock begins with something"
    return None if new.left <= old.left else f"{new.left} is more than {old.left}"


KIND = RecordKind("stock", Stock, transition=never_grows)


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        (None, {"left": 3}, None),
        (None, {"left": -3}, "a stock begins with something"),
        ({"left": 3}, {"left": 3}, None),
        ({"left": 3}, {"left": 4}, "4 is more than 3"),
    ],
)
def test_a_transition_sees_typed_data_and_says_why_not(old: Any, new: Any, refusal: str | None) -> None:
    assert KIND.refusal(old, new) == refusal


@pytest.mark.parametrize("new", [{}, {"left": "3"}, {"left": None}, None, []])
def test_data_that_does_not_fit_the_kind_is_refused_with_the_place(new: Any) -> None:
    refusal = KIND.refusal(None, new)
    assert refusal is not None
    assert refusal.startswith("not a valid stock: ")


def test_a_kind_without_a_transition_allows_whatever_fits() -> None:
    open_kind = RecordKind("stock", Stock)
    assert open_kind.refusal({"left": 3}, {"left": 9}) is None
    assert open_kind.refusal(None, {"left": "x"}) is not None


def test_old_data_that_no_longer_fits_its_kind_is_refused_not_guessed() -> None:
    refusal = KIND.refusal({"remaining": 3}, {"left": 3})
    assert refusal is not None
    assert refusal.startswith("not a valid stock: ")


def test_a_record_becomes_a_change_of_itself() -> None:
    assert Record("stock", "s-1", 8, Stock(3)).becomes(Stock(2)) == Change("stock", "s-1", Stock(2))
