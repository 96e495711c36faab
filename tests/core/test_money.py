"""Money is whole minor units of a real currency, and is never rounded."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.money import Money, exponent, money, total

LARGEST = 2**53 - 1


@pytest.mark.parametrize(("currency", "digits"), [("SGD", 2), ("JPY", 0), ("KWD", 3), ("CLF", 4)])
def test_the_minor_unit_is_the_currencys_own(currency: str, digits: int) -> None:
    assert exponent(currency) == digits


@pytest.mark.parametrize(
    ("text", "amount_minor"),
    [
        ("0.40 SGD", 40),
        ("1 SGD", 100),
        ("12.5 SGD", 1250),
        ("-0.01 SGD", -1),
        ("-0 SGD", 0),
        ("500 JPY", 500),
        ("1.00 JPY", 1),
        ("0.001 KWD", 1),
        ("0.400 SGD", 40),
        ("  3 SGD ", 300),
        ("90071992547409.91 SGD", LARGEST),
    ],
)
def test_an_amount_is_read_in_minor_units(text: str, amount_minor: int) -> None:
    assert money(text) == Money(amount_minor, text.split()[-1])


@pytest.mark.parametrize(
    ("amount_minor", "currency", "text"),
    [
        (40, "SGD", "0.40 SGD"),
        (-1, "SGD", "-0.01 SGD"),
        (0, "SGD", "0.00 SGD"),
        (500, "JPY", "500 JPY"),
        (1, "KWD", "0.001 KWD"),
        (LARGEST, "SGD", "90071992547409.91 SGD"),
    ],
)
def test_an_amount_is_said_as_it_is_read(amount_minor: int, currency: str, text: str) -> None:
    amount = Money(amount_minor, currency)
    assert (str(amount), money(str(amount))) == (text, amount)


@pytest.mark.parametrize(
    "text",
    [
        "0.401 SGD",
        "0.5 JPY",
        "1.0001 KWD",
        "0.1000000000000000000000000000000000001 SGD",
        "0.00000000000000000000000000000000000001 SGD",
    ],
)
def test_more_digits_than_the_currency_has_are_refused_not_rounded(text: str) -> None:
    with pytest.raises(ValueError, match="more digits"):
        money(text)


@pytest.mark.parametrize(
    "amount",
    [
        "NaN",
        "sNaN",
        "Infinity",
        "-Infinity",
        "1e2",
        "1e999999",
        "1_000",
        "1,000",
        "٣",
        "--1",
        "+1",
        ".5",
        "1.",
    ],
)
def test_an_amount_is_spelled_in_plain_digits(amount: str) -> None:
    with pytest.raises(ValueError, match="is not an amount"):
        money(f"{amount} SGD")


@pytest.mark.parametrize("amount", ["90071992547409.92", "9999999999999999", "9" * 17, "9" * 5_000])
def test_a_huge_amount_is_refused(amount: str) -> None:
    with pytest.raises(ValueError, match=r"2\^53|is not an amount"):
        money(f"{amount} SGD")


@pytest.mark.parametrize("text", ["1", "1 sgd", "1 XYZ", "1  SGD", "1 SGD SGD", "1 702", "SGD 1", ""])
def test_an_unknown_currency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an ISO 4217 currency code"):
        money(text)


@pytest.mark.parametrize("currency", ["XAU", "XXX", "XDR"])
def test_a_currency_without_a_minor_unit_is_refused(currency: str) -> None:
    with pytest.raises(ValueError, match="no minor unit"):
        money(f"1 {currency}")
    with pytest.raises(ValueError, match="no minor unit"):
        Money(1, currency)


@given(st.integers(-LARGEST, LARGEST), st.sampled_from(["SGD", "JPY", "KWD", "CLF"]))
def test_every_amount_is_read_as_exactly_what_was_written(amount_minor: int, currency: str) -> None:
    written = format(Decimal(amount_minor).scaleb(-exponent(currency)), "f")
    assert money(f"{written} {currency}") == Money(amount_minor, currency)


@pytest.mark.parametrize(
    "text",
    [
        b'{"amount_minor": 9007199254740992, "currency": "SGD"}',
        b'{"amount_minor": 1.5, "currency": "SGD"}',
        b'{"amount_minor": "1", "currency": "SGD"}',
        b'{"amount_minor": true, "currency": "SGD"}',
        b'{"amount_minor": 1, "currency": "XAU"}',
        b'{"amount_minor": 1, "currency": "sgd"}',
        b'{"amount_minor": 1}',
        b'{"amount_minor": 1, "currency": "SGD", "amount": 1}',
    ],
)
def test_money_on_the_wire_is_checked_as_it_is_decoded(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Money)


def test_a_total_stays_in_one_currency() -> None:
    assert total([]) is None
    assert total([Money(1, "SGD"), Money(-3, "SGD")]) == Money(-2, "SGD")
    with pytest.raises(ValueError, match="too many values"):
        total([Money(1, "SGD"), Money(1, "JPY")])
