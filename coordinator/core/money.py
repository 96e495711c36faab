"""Money as integer minor units of an ISO 4217 currency; never a float."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import msgspec
from iso4217 import Currency

from coordinator.core.canonical import MAX_INTEGER

_AMOUNT = re.compile(r"(-?)([0-9]{1,16})(?:\.([0-9]+))?")


class Money(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An amount in minor units (cents for SGD, yen for JPY, fils for KWD)."""

    amount_minor: int
    currency: str

    def __post_init__(self) -> None:
        if abs(self.amount_minor) > MAX_INTEGER:
            raise ValueError(f"amount_minor must be within ±(2^53-1), got {self.amount_minor}")
        exponent(self.currency)

    def __str__(self) -> str:
        """As `money` reads it: ``0.40 SGD``."""
        digits = exponent(self.currency)
        return f"{Decimal(self.amount_minor).scaleb(-digits):.{digits}f} {self.currency}"


def exponent(currency: str) -> int:
    """How many decimal digits the currency's minor unit has (SGD 2, JPY 0, KWD 3). ``ValueError`` for an unknown code."""
    try:
        digits = Currency(currency).exponent
    except ValueError:
        raise ValueError(f"{currency!r} is not an ISO 4217 currency code, such as SGD") from None
    if digits is None:
        raise ValueError(f"{currency} has no minor unit and cannot be used for payments")
    return digits


def total(amounts: Sequence[Money]) -> Money | None:
    """The sum of amounts in one currency; None for no amounts."""
    if not amounts:
        return None
    (currency,) = {amount.currency for amount in amounts}
    return Money(sum(amount.amount_minor for amount in amounts), currency)


def money(text: str) -> Money:
    """Read ``"0.40 SGD"``. More digits than the currency has are an error, never rounded."""
    amount, _, currency = text.strip().partition(" ")
    digits = exponent(currency)
    parts = _AMOUNT.fullmatch(amount)
    if parts is None:
        raise ValueError(f"{text!r} is not an amount such as '0.40 SGD'")
    sign, whole, fraction = parts.groups(default="")
    fraction = fraction.rstrip("0")
    if len(fraction) > digits:
        raise ValueError(f"{text!r} has more digits than {currency}'s {digits}")
    return Money(int(sign + whole + fraction.ljust(digits, "0")), currency)
