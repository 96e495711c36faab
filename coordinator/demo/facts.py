"""Facts with revisions: customers, capacity, costs, rates, each derived from its id until someone moves it.

Every id exists but those that begin with `missing-`. Its first data and revision are derived from a hash of
the id, so two processes, or one before and after a restart, answer alike. What was moved (`bump`, `put`)
lives in memory only and is forgotten at a restart; each move raises the revision by 1, and with it the ETag.
"""

import zlib
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec

from coordinator.demo import published
from coordinator.demo.published import Rate
from coordinator.demo.refusals import Refusal

_CACHED_FACTS = 65_536
_LARGEST_INTEGER = 2**53 - 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


class Customer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    name: str
    segment: str = "maintenance"
    country: str = "SG"
    discount_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    site: str
    available_hours: _Count
    crew: _Count


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    estimate_minor: Annotated[int, msgspec.Meta(ge=-_LARGEST_INTEGER, le=_LARGEST_INTEGER)]
    currency: str = "EUR"


Fact = Customer | Capacity | Cost | Rate


class Reading(NamedTuple):
    """One fact as it is answered: `moves` counts how often it was moved since it was derived."""

    value: Fact
    moves: int
    etag: str
    body: bytes


class Facts:
    """All facts of one process."""

    def __init__(self) -> None:
        self._moved: dict[tuple[str, str], Reading] = {}

    def read(self, kind: str, fact_id: str) -> Reading:
        """The fact as it is now; Refusal `not-found` for unknown ids."""
        return self._moved.get((kind, fact_id)) or _derived(kind, fact_id)

    def bump(self, kind: str, fact_id: str) -> Reading:
        """Change the fact's decisive number by one step."""
        before = self.read(kind, fact_id)
        return self._move(kind, fact_id, _step(before.value), before.moves + 1)

    def put(self, kind: str, fact_id: str, fields: dict[str, Any]) -> Reading:
        """Set some or all fields of the fact; Refusal `malformed-request` when they don't fit its shape."""
        before = self.read(kind, fact_id)
        try:
            after = msgspec.convert(msgspec.to_builtins(before.value) | fields, type(before.value))
        except msgspec.ValidationError as error:
            raise Refusal("malformed-request", f"Not a fact of {kind}: {error}.") from None
        if _identity(after) != _identity(before.value):
            raise Refusal("malformed-request", f"A fact keeps its identity, {_identity(before.value)}.")
        return self._move(kind, fact_id, after, before.moves + 1)

    def _move(self, kind: str, fact_id: str, value: Fact, moves: int) -> Reading:
        reading = _reading(fact_id, value, moves)
        self._moved[kind, fact_id] = reading
        return reading


def _customer(fact_id: str) -> Customer:
    seed = _hash(fact_id)
    first, second = _NAMES[seed % len(_NAMES)], _TRADES[seed // 7 % len(_TRADES)]
    return Customer(id=fact_id, name=f"{first} {second} Pte Ltd", discount_percent=seed // 53 % 4 * 5)


def _capacity(fact_id: str) -> Capacity:
    seed = _hash(fact_id)
    return Capacity(site=fact_id, available_hours=24 + seed % 7 * 8, crew=2 + seed // 7 % 5)


def _cost(fact_id: str) -> Cost:
    return Cost(id=fact_id, estimate_minor=120_000 + _hash(fact_id) % 560 * 500)


def _rate(fact_id: str) -> Rate:
    base, slash, quote = fact_id.partition("/")
    if not slash:
        raise Refusal("not-found", "A rate is asked for as /rates/EUR/SGD.")
    return published.rate(base, quote)


_NAMES = ("Kallang", "Bukit Timah", "Tanjong Pagar", "Changi", "Marina South", "Jurong", "Sembawang", "Bedok")
_TRADES = (
    "Marine Services",
    "Cold Storage",
    "Facilities",
    "Engineering",
    "Logistics",
    "Data Halls",
    "Clinics",
)

FACTS: dict[str, Callable[[str], Fact]] = {
    "customers": _customer,
    "capacity": _capacity,
    "costs": _cost,
    "rates": _rate,
}
"""The routes whose answers have revisions that can be moved."""


@lru_cache(maxsize=_CACHED_FACTS)
def _derived(kind: str, fact_id: str) -> Reading:
    if not fact_id or fact_id.startswith("missing-"):
        raise Refusal("not-found", f"There is no {fact_id!r} in {kind}.")
    return _reading(fact_id, FACTS[kind](fact_id), 0)


def _reading(fact_id: str, value: Fact, moves: int) -> Reading:
    if isinstance(value, Rate):
        etag = f'"{value.published}.{moves}"' if moves else f'"{value.published}"'
    else:
        etag = f'"{1 + _hash(fact_id) % 9 + moves}"'
    return Reading(value, moves, etag, msgspec.json.encode(value))


def _step(value: Fact) -> Fact:
    match value:
        case Customer(discount_percent=percent):
            return msgspec.structs.replace(value, discount_percent=(percent + 1) % 31)
        case Capacity(available_hours=hours):
            return msgspec.structs.replace(value, available_hours=hours - 1 if hours else 40)
        case Cost(estimate_minor=estimate):
            return msgspec.structs.replace(value, estimate_minor=estimate + 100)
        case Rate(rate=rate):
            exact = Decimal(rate)
            one_in_last_place = Decimal((0, (1,), int(exact.as_tuple().exponent)))
            return msgspec.structs.replace(value, rate=format(exact + one_in_last_place, "f"))


def _identity(value: Fact) -> str:
    match value:
        case Customer(id=fact_id) | Cost(id=fact_id):
            return fact_id
        case Capacity(site=site):
            return site
        case Rate(base=base, quote=quote):
            return f"{base}/{quote}"


def _hash(fact_id: str) -> int:
    """The same in every process, which Python's own hash of text is not."""
    return zlib.crc32(fact_id.encode())
