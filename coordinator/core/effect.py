"""Effects: how a sink says what happened, what it guarantees, and what the dispatcher may do next.

The one rule: *we never send again unless the provider is known to recognise our key, or known not to have acted.* `next_step`
is that rule as a table over (guarantee, result, age, attempts); everything that dispatches asks it and does nothing else.

    result            keyed, inside window   keyed, window over   lookup               none
    Accepted          succeed                succeed              succeed              succeed
    Rejected          fail                   fail                 fail                 fail
    NotSent           retry, then fail       retry, then fail     retry, then fail     retry, then fail
    Ambiguous         resend, then look up*  look up*             look up              park

    (* where the sink can be asked by key; otherwise park)

An operation is *in doubt* once a send of it was ambiguous, until the provider has said that it knows nothing of it. In doubt,
"rejected" and "not sent" speak of the latest attempt only: what would be a failure is looked up or parked instead, and what
would be a retry is sent only while the provider recognises our key.

A parked operation is `uncertain` with its reason, for a person or for evidence that arrives later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.money import Money
from coordinator.core.where import declared_at
from coordinator.errors import DeclarationError

OperationState = Literal[
    "ready", "dispatching", "succeeded", "failed", "uncertain", "compensating", "compensated", "cancelled"
]


class Keyed(msgspec.Struct, frozen=True, tag="keyed", tag_field="kind"):
    """The provider recognises our key for ``window_ms`` after it first saw it. With ``lookup_lag_ms`` it can be asked by key as
    well, and shows an effect at most that long after it happened."""

    window_ms: int
    lookup_lag_ms: int | None = None


class Lookup(msgspec.Struct, frozen=True, tag="lookup", tag_field="kind"):
    """The provider does not deduplicate, but can be asked by key."""

    lag_ms: int


class Unguarded(msgspec.Struct, frozen=True, tag="none", tag_field="kind"):
    """The provider neither deduplicates nor can be asked: after an ambiguous answer only a person knows."""


Guarantee: TypeAlias = Keyed | Lookup | Unguarded


def keyed(*, hours: float, lookup_lag: timedelta | None = None) -> Keyed:
    if hours <= 0:
        raise DeclarationError(
            f"a key is recognised for some time: hours must be positive, not {hours}", declared_at()
        )
    lag = None if lookup_lag is None else int(lookup_lag.total_seconds() * 1000)
    return Keyed(int(hours * 3_600_000), lag)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a sink is asked to perform. ``key`` is the same for every attempt; the fencing token is not part of it."""

    id: str
    key: str
    tenant: str
    decision_id: str
    effect: str
    payload: bytes
    attempt: int
    traceparent: str


class Accepted(msgspec.Struct, frozen=True):
    """The provider did it, now or at an earlier attempt; ``reference`` is the provider's own name for it, ``cost`` what all of it
    cost, if the provider says so."""

    reference: str
    cost: Money | None = None


class Rejected(msgspec.Struct, frozen=True):
    """The provider did not do it and will not, however often we ask. It may bill for that as well: ``cost``."""

    code: str
    message: str
    cost: Money | None = None


class NotSent(msgspec.Struct, frozen=True):
    """The provider did not do it, but may if asked again (connection refused, 429, 503 before acting)."""

    code: str
    message: str
    retry_after_ms: int | None = None


class Ambiguous(msgspec.Struct, frozen=True):
    """The request may have reached the provider, and we do not know whether it acted (timeout, reset, 5xx). ``replayed``: the
    provider said that this is its stored answer for our key; sending again would only bring it back."""

    code: str
    message: str
    replayed: bool = False


SendResult: TypeAlias = Accepted | Rejected | NotSent | Ambiguous


class NotFound(msgspec.Struct, frozen=True):
    """The provider knows no effect with this key now."""


LookupResult: TypeAlias = Accepted | NotFound | Ambiguous


class Sink(Protocol):
    """An adapter that performs an effect. ``timeout_ms`` bounds one attempt; ``lookup`` is called only if
    the guarantee has it."""

    @property
    def name(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def timeout_ms(self) -> int: ...
    async def perform(self, operation: Operation) -> SendResult: ...
    async def lookup(self, operation: Operation) -> LookupResult: ...


@runtime_checkable
class PaidSink(Protocol):
    """A sink whose effect costs money: ``reserves`` is the most it may cost, held from the budgets before the decision's work
    begins. It covers one effect of the sink in a decision, the first."""

    @property
    def reserves(self) -> Money | None: ...


def reserves_of(sink: Sink) -> Money | None:
    """What one effect of this sink may cost; None if it says nothing of it."""
    return sink.reserves if isinstance(sink, PaidSink) else None


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider tells us of itself, its signature checked: what became of ``key``. ``event_id`` is the provider's own; an
    event counts once. ``reference`` if it happened, ``reason`` if it did not; ``cost`` if it says that."""

    event_id: str
    key: str
    happened: bool
    reference: str = ""
    reason: str = ""
    cost: Money | None = None


class NoticeRefused(Exception):
    """The signature is wrong, the event is too old, or the body cannot be understood. The text is safe to show."""


@runtime_checkable
class NoticeReader(Protocol):
    """A sink whose provider sends events of its own accord. ``headers`` have lower-case names. Raises `NoticeRefused`."""

    def notice(self, headers: Mapping[str, str], body: bytes) -> Notice: ...


class Succeed(msgspec.Struct, frozen=True):
    reference: str


class Fail(msgspec.Struct, frozen=True):
    reason: str


class Resend(msgspec.Struct, frozen=True):
    """Send again with the same key, not before ``after_ms``."""

    after_ms: int
    reason: str


class AskProvider(msgspec.Struct, frozen=True):
    """Uncertain; ask the provider by key, not before ``after_ms``."""

    after_ms: int
    reason: str


class Park(msgspec.Struct, frozen=True):
    """Uncertain, until a person or later evidence resolves it."""

    reason: str


Step: TypeAlias = Succeed | Fail | Resend | AskProvider | Park

MAX_SENDS = 8
MAX_LOOKUPS = 8
SAFE_SHARE_OF_WINDOW = 0.8


def before_send(guarantee: Guarantee, *, age_ms: int, in_doubt: bool, timeout_ms: int) -> Step | None:
    """What to do in place of sending, or None to send: a resend that was planned inside the key's window may come to its turn
    after it, when whoever planned it has been away."""
    if not in_doubt or _recognised(guarantee, age_ms, 0, timeout_ms):
        return None
    return _ask_or_park(
        guarantee,
        "an earlier attempt may have been acted upon, and its key may be forgotten by now",
        timeout_ms,
    )


def next_step(
    guarantee: Guarantee,
    result: SendResult,
    *,
    age_ms: int,
    sends: int,
    in_doubt: bool,
    timeout_ms: int,
    backoff_ms: int,
) -> Step:
    """What to do after one attempt. ``age_ms``: since before the first send; ``sends``: attempts so far, this one included;
    ``in_doubt``: whether an earlier attempt may have been acted upon; ``backoff_ms``: the pause drawn for the next attempt."""
    match result:
        case Accepted(reference=reference):
            return Succeed(reference)
        case Rejected(code=code, message=message):
            return _failure(guarantee, f"{code}: {message}", in_doubt, timeout_ms)
        case NotSent(code, message, retry_after_ms):
            pause_ms = max(backoff_ms, retry_after_ms or 0)
            if sends < MAX_SENDS and (not in_doubt or _recognised(guarantee, age_ms, pause_ms, timeout_ms)):
                return Resend(pause_ms, code)
            return _failure(guarantee, f"{code} after {sends} attempts: {message}", in_doubt, timeout_ms)
        case Ambiguous(code, message, replayed):
            if not replayed and sends < MAX_SENDS and _recognised(guarantee, age_ms, backoff_ms, timeout_ms):
                return Resend(backoff_ms, f"{code}: {message}")
            return _ask_or_park(guarantee, f"{code}: {message}", timeout_ms)


def _failure(guarantee: Guarantee, reason: str, in_doubt: bool, timeout_ms: int) -> Step:
    if not in_doubt:
        return Fail(reason)
    return _ask_or_park(
        guarantee,
        f"an earlier attempt may have been acted upon; the latest one was not: {reason}",
        timeout_ms,
    )


def _ask_or_park(guarantee: Guarantee, reason: str, timeout_ms: int) -> Step:
    lag_ms = lookup_lag_ms(guarantee)
    return Park(reason) if lag_ms is None else AskProvider(timeout_ms + lag_ms, reason)


def _recognised(guarantee: Guarantee, age_ms: int, pause_ms: int, timeout_ms: int) -> bool:
    """Whether the provider will still know our key when an attempt that begins after ``pause_ms`` has ended."""
    match guarantee:
        case Keyed(window_ms):
            return age_ms + pause_ms + timeout_ms < window_ms * SAFE_SHARE_OF_WINDOW
        case Lookup() | Unguarded():
            return False


def after_lookup(
    guarantee: Guarantee,
    result: LookupResult,
    *,
    age_ms: int,
    committed_ms: int,
    sends: int,
    lookups: int,
    timeout_ms: int,
    backoff_ms: int,
) -> Step:
    """What to do after asking the provider. Not found is proof only once the longest request and the lag have passed since the
    last send (``age_ms``), and while the provider cannot have forgotten the key again (``committed_ms``: since the commit, which
    was before the first send); then it is safe to send again, since the provider demonstrably has not acted."""
    match result:
        case Accepted(reference=reference):
            return Succeed(reference)
        case NotFound():
            step = _after_not_found(guarantee, age_ms, committed_ms, timeout_ms)
            if isinstance(step, Resend) and sends >= MAX_SENDS:
                return Fail(f"{sends} attempts, and the provider has no effect under this key")
            return step
        case Ambiguous(code, message) if lookups < MAX_LOOKUPS:
            return AskProvider(backoff_ms, f"{code}: {message}")
        case Ambiguous(code, message):
            return Park(f"the provider could not be asked: {code}: {message}")


def _after_not_found(guarantee: Guarantee, age_ms: int, committed_ms: int, timeout_ms: int) -> Step:
    if isinstance(guarantee, Keyed) and committed_ms >= guarantee.window_ms:
        return Park("the provider may have forgotten the key by now: that it knows of nothing proves nothing")
    lag_ms = lookup_lag_ms(guarantee)
    if lag_ms is None:
        return Park("the provider cannot be asked: that it knows of nothing proves nothing")
    if age_ms < timeout_ms + lag_ms:
        return AskProvider(timeout_ms + lag_ms - age_ms, "asked too early to be proof")
    return Resend(0, "the provider has no effect under this key")


def lookup_lag_ms(guarantee: Guarantee) -> int | None:
    """How long after an effect a lookup may still miss it; None if the provider cannot be asked."""
    match guarantee:
        case Keyed(_, lag_ms):
            return lag_ms
        case Lookup(lag_ms):
            return lag_ms
        case Unguarded():
            return None


def operation_key(decision_id: str, effect: str, ordinal: int) -> str:
    """The key the provider deduplicates by: a function of the decision alone, so that every attempt and every process has it."""
    return f"{decision_id}.{effect}.{ordinal}"


def payload_json(payload: bytes) -> JsonValue:
    decoded: JsonValue = msgspec.json.decode(payload)
    return decoded
