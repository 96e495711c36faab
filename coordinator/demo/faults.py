"""Faults on demand: which route misbehaves, how, and how many more times.

A control table maps a route prefix to a `Fault`. A request is under the longest prefix its path begins with
(plain text: `/capacity/s` covers `/capacity/s1` and `/capacity/s10`); `POST /effects` limits an entry to one
method and goes before a bare entry of the same length. The order within one request:

    delay_ms        sleep. The provider goes on even when its caller has stopped waiting, as real ones do.
    hang            wait until the caller goes away (then nothing was done) or the table is replaced
    status          answer this status and do nothing, with `Retry-After` when `retry_after_s` is given
    bump_revision   the fact moves by one step before it is answered, so this very answer shows the move
    (the provider acts)
    lose_answer     drop the connection without an answer; together with `hang`, hang after acting first

Two fields describe the provider rather than one answer: `dedup_window_s` is how long a key is remembered,
`lookup_lag_ms` how long after it happened an effect stays invisible to a lookup.

`times` is how many requests the entry may still touch. A request uses one when a field of the entry concerns
it: the faults of an answer concern every request, `bump_revision` only reads of facts, the last two only
POSTs of effects. It is counted before the fault begins, so concurrent requests never share one. A used-up
entry is gone, and the next shorter prefix applies. Replacing the table releases what hangs and what lags.
"""

import asyncio
from typing import Annotated, NamedTuple

import msgspec

from coordinator.demo.facts import FACTS
from coordinator.demo.refusals import Refusal

FAULTY_ROUTES = (*FACTS, "calendar", "effects")
"""The routes that can misbehave. The ledger and the control itself always tell the truth."""

_METHODS = ("GET", "POST")
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=600_000)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    delay_ms: _Milliseconds = 0
    status: Annotated[int, msgspec.Meta(ge=200, le=599)] | None = None
    retry_after_s: Annotated[int, msgspec.Meta(ge=0, le=86_400)] | None = None
    hang: bool = False
    lose_answer: bool = False
    dedup_window_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    bump_revision: bool = False
    lookup_lag_ms: _Milliseconds = 0
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def concerns(self, request: "Request") -> bool:
        """Whether a request under this entry uses up one of its `times`."""
        if self.delay_ms or self.status or self.hang or self.lose_answer:
            return True
        if request.route == "effects":
            return request.method == "POST" and bool(self.lookup_lag_ms or self.dedup_window_s is not None)
        return self.bump_revision and request.route in FACTS


class Request(NamedTuple):
    """What faults need to know of a request."""

    method: str
    path: str
    route: str


class _Entry:
    """A fault and how often it may still be used."""

    __slots__ = ("fault", "left", "method", "path")

    def __init__(self, prefix: str, fault: Fault) -> None:
        self.method, self.path = _split(prefix)
        self.fault = fault
        self.left = fault.times

    def covers(self, request: Request) -> bool:
        return request.path.startswith(self.path) and self.method in ("", request.method)


NO_FAULT = Fault()
_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FAULT = msgspec.json.Decoder(Fault)


class Control:
    """The table in force. `replaced` is set once another one takes its place."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self.replaced = asyncio.Event()

    def replace(self, body: bytes) -> None:
        """Put the table in `body` in force, or raise Refusal `malformed-request` and keep the present one."""
        entries = [(prefix, _Entry(prefix, fault)) for prefix, fault in parse_table(body).items()]
        entries.sort(key=lambda item: (len(item[1].path), bool(item[1].method)), reverse=True)
        self._entries = dict(entries)
        self.replaced.set()
        self.replaced = asyncio.Event()

    @property
    def quiet(self) -> bool:
        """Whether no fault is in force."""
        return not self._entries

    def in_force(self) -> dict[str, Fault]:
        """The table with the `times` that are left."""
        return {
            prefix: msgspec.structs.replace(entry.fault, times=entry.left)
            for prefix, entry in self._entries.items()
        }

    def claim(self, request: Request) -> Fault:
        """The fault this request meets, counted."""
        for prefix, entry in self._entries.items():
            if entry.covers(request):
                if entry.left is not None and entry.fault.concerns(request):
                    entry.left -= 1
                    if entry.left == 0:
                        del self._entries[prefix]
                return entry.fault
        return NO_FAULT

    def peek(self, request: Request) -> Fault:
        """The fault this request meets, not counted."""
        return next((entry.fault for entry in self._entries.values() if entry.covers(request)), NO_FAULT)


def parse_table(body: bytes) -> dict[str, Fault]:
    """Decode and check a control table; Refusal `malformed-request` names the entry and what to mend."""
    try:
        raw = _TABLE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal("malformed-request", f"A control table is {{prefix: fault}}: {error}.") from None
    table = {}
    for prefix, text in raw.items():
        method, path = _split(prefix)
        routes = _routes_under(path)
        if method not in ("", *_METHODS) or not routes:
            known = f"a prefix of {FAULTY_ROUTES}, after one of {_METHODS} and a space if need be"
            raise Refusal("malformed-request", f"{prefix!r} covers no route: write {known}.")
        table[f"{method} {path}".strip()] = _checked_fault(prefix, bytes(text), routes)
    return table


def _split(prefix: str) -> tuple[str, str]:
    method, space, path = prefix.partition(" ")
    if not space:
        method, path = "", prefix
    return method, path if path.startswith("/") else "/" + path


def _routes_under(path: str) -> set[str]:
    return {r for r in FAULTY_ROUTES if f"/{r}/".startswith(path) or path.startswith(f"/{r}/")}


def _checked_fault(prefix: str, text: bytes, routes: set[str]) -> Fault:
    try:
        fault = _FAULT.decode(text)
    except msgspec.DecodeError as error:
        known = ", ".join(Fault.__struct_fields__)
        raise Refusal("malformed-request", f"{prefix!r}: {error}. Known fields: {known}.") from None
    of_effects = fault.dedup_window_s is not None or fault.lookup_lag_ms > 0
    for wrong, why in (
        (fault.status is not None and (fault.hang or fault.lose_answer), "status excludes hang, lose_answer"),
        (fault.retry_after_s is not None and fault.status is None, "retry_after_s needs a status"),
        (fault.bump_revision and routes.isdisjoint(FACTS), f"bump_revision is for {tuple(FACTS)}"),
        (of_effects and "effects" not in routes, "dedup_window_s and lookup_lag_ms are for effects"),
    ):
        if wrong:
            raise Refusal("malformed-request", f"{prefix!r}: {why}.")
    return fault
