"""The locks that a decision type declares: checked when it loads, and the same names for the same request whatever their order."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pytest

from coordinator import DecisionType, RecordKind, decision_type
from coordinator.core.lock_names import MAX_LOCKS, MAX_NAME_LENGTH, Unnamed
from coordinator.core.request import RecordRef
from coordinator.errors import DeclarationError
from tests.core.declaring import promise_nothing


class Tier(Enum):
    GOLD = "gold"


class Address(msgspec.Struct, frozen=True):
    country: str
    lines: list[str] = []


class Order(msgspec.Struct, frozen=True):
    region: Annotated[str, msgspec.Meta(max_length=400)]
    ship_to: Address
    bill_to: Address | None = None
    number: int = 7
    tier: Tier = Tier.GOLD
    ref: UUID = UUID(int=0)
    extra: dict[str, Any] = {}
    anything: Any = None


ORDER = Order("eu", Address("sg"))
KIND = RecordKind("order", Address)


def declare(locks: Any, record: RecordKind[Any] | None = None) -> DecisionType[Any, Any]:
    return decision_type(
        "quote",
        request=Order,
        policy=promise_nothing,
        policy_version="1",
        evidence=[],
        record=record,
        locks=locks,
    )


def mistake(locks: Any) -> str:
    with pytest.raises(DeclarationError) as wrong:
        declare(locks)
    assert wrong.value.where.startswith("test_lock_names.py:")
    return str(wrong.value)


def names(*templates: str, order: Order = ORDER, record: RecordRef | None = None) -> tuple[str, ...]:
    declared = declare(templates, KIND if record else None)
    return declared.locks.of(order, record)


def test_the_names_are_in_one_order_whatever_the_order_of_the_declaration() -> None:
    there, back = ["ledger", "region/{input.region}"], ["region/{input.region}", "ledger"]
    assert names(*there) == names(*back) == ("ledger", "region/eu")


def test_the_order_is_that_of_code_points() -> None:
    assert names("é", "Z", "a", "\U0001f600", "ﬀ") == ("Z", "a", "é", "ﬀ", "\U0001f600")


def test_names_that_come_out_alike_are_one_lock() -> None:
    assert names("region/{input.region}", "region/eu") == ("region/eu",)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{input.ship_to.country}", "sg"),
        ("{input.number}-{input.tier}", "7-gold"),
        ("{input.ref}", str(UUID(int=0))),
        ("{record.kind}/{record.id}", "order/o-1"),
    ],
)
def test_a_name_is_made_of_the_requests_values(template: str, name: str) -> None:
    assert names(template, record=RecordRef(kind="order", id="o-1")) == (name,)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{input.regin}", "the request has no 'regin', only anything, bill_to"),
        ("{input.ship_to}", "ship_to is a structure, not a plain value"),
        ("{input.ship_to.city}", "ship_to has no 'city', only country, lines"),
        ("{input.bill_to.city}", "bill_to has no 'city'"),
        ("{input.ship_to.lines}", "lines is a list, not a plain value"),
        ("{input.region.name}", "region is a str and has no parts"),
        ("{input.extra}", "extra is a dict, not a plain value"),
        ("{input}", "is not a path"),
        ("{evidence.a.b}", "starts with none of input, record"),
        ("{tenant}", "starts with none of input, record"),
        ("{record.id}", "add record="),
        ("a{b", "a brace without its partner"),
        ("", "is not a text of 1..255 characters"),
        ("x" * 256, "is not a text of 1..255 characters"),
        ("\0", "is not a text of 1..255 characters"),
        (5, "is not a text of 1..255 characters"),
    ],
)
def test_a_template_that_cannot_name_a_lock_is_refused_where_it_is_declared(template: Any, what: str) -> None:
    assert what in mistake([template])


def test_too_many_locks_are_refused() -> None:
    assert "9 locks; at most 8" in mistake([str(n) for n in range(MAX_LOCKS + 1)])


def test_one_text_is_not_a_list_of_locks() -> None:
    assert "must be a list of texts" in mistake("ledger")


@pytest.mark.parametrize(
    ("template", "order", "pointer"),
    [
        ("{input.region}", Order("", Address("sg")), "/input/region"),
        ("{input.bill_to.country}", ORDER, "/input/bill_to/country"),
        ("{input.anything}", Order("eu", Address("sg"), anything=[1]), "/input/anything"),
        ("{input.extra.a}", ORDER, "/input/extra/a"),
        ("region/{input.region}", Order("x" * MAX_NAME_LENGTH, Address("sg")), "/input/region"),
    ],
)
def test_a_request_without_a_usable_value_names_no_lock(template: str, order: Order, pointer: str) -> None:
    with pytest.raises(Unnamed) as refused:
        names(template, order=order)
    assert refused.value.pointer == pointer
