"""Declaring decisions: `decision_type` and the `Coordinator` that holds everything one service serves.

All mistakes that can be seen without running anything (an unknown name, a cycle, a duplicate, a missing deadline, a type that is
not a struct) are `DeclarationError`s raised while the module loads, each naming the line to mend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

from coordinator.core.budget import Need, OnExhausted
from coordinator.core.child import circle
from coordinator.core.dependencies import NAME, closure, in_dependency_order
from coordinator.core.each import Each
from coordinator.core.effect import Sink, reserves_of
from coordinator.core.evidence import MAX_UNITS, Evidence, is_struct
from coordinator.core.likeness import asker
from coordinator.core.lock_names import LockNames
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.core.pool import Pool
from coordinator.core.record import Record, RecordKind
from coordinator.core.where import declared_at
from coordinator.errors import DeclarationError

R = TypeVar("R")
D = TypeVar("D")

Status = Literal[
    "queued",
    "running",
    "committed",
    "declined",
    "in_review",
    "unresolved",
    "conflicted",
    "expired",
    "cancelled",
    "failed",
]
RESTING: frozenset[str] = frozenset(
    {"committed", "declined", "in_review", "unresolved", "conflicted", "expired", "cancelled", "failed"}
)
MAX_SINK_TIMEOUT_MS = 600_000
MAX_REVIEW = timedelta(days=366)


@runtime_checkable
class Closable(Protocol):
    """An adapter that holds connections open: closed when its service stops. Called once per adapter; must not mind that."""

    async def aclose(self) -> None: ...


class DecisionType(Generic[R, D]):
    """One declared decision. ``evidence`` maps names to declarations in an order in which each follows what it depends on."""

    def __init__(
        self,
        name: str,
        request: type[R],
        policy: Callable[[R, Packet, Record[D]], Outcome],
        policy_version: str,
        evidence: Mapping[str, Evidence[Any, Any]],
        sinks: Mapping[str, Sink],
        record: RecordKind[D] | None,
        time_limit_ms: int,
        max_rounds: int,
        review_within: timedelta,
        cost: float,
        where: str,
        on_exhausted: OnExhausted,
        budget_wait_ms: int,
        locks: LockNames,
    ) -> None:
        self.name = name
        self.request = request
        self.policy = policy
        self.policy_version = policy_version
        self.evidence = evidence
        self.sinks = sinks
        self.record = record
        self.time_limit_ms = time_limit_ms
        self.max_rounds = max_rounds
        self.review_within = review_within
        self.cost = cost
        self.where = where
        self.locks = locks
        self.on_exhausted = on_exhausted
        self.budget_wait_ms = budget_wait_ms
        self.needs = _needs(evidence, sinks)
        self.reserves = [need.amount for need in self.needs]
        self.questions = {name: asker(declared.source) for name, declared in evidence.items()}
        self.after = {name: declared.after for name, declared in evidence.items()}
        self.before = closure(self.after)
        self.types: dict[str, Any] = {name: _type_of(declared) for name, declared in evidence.items()}


def _type_of(declared: Evidence[Any, Any]) -> Any:
    returns: Any = declared.source.returns
    each: Any = Each
    return each[returns] if declared.for_each else returns


def _needs(evidence: Mapping[str, Evidence[Any, Any]], sinks: Mapping[str, Sink]) -> tuple[Need, ...]:
    """What is reserved before the work begins: for evidence that declares it, whether it will be read or not, and for effects."""
    readings = [
        Need("evidence", name, declared.provider or "", declared.reserves, optional=not declared.required)
        for name, declared in evidence.items()
        if declared.reserves is not None
    ]
    effects = [
        Need("effect", name, sink.provider, amount)
        for name, sink in sinks.items()
        if (amount := reserves_of(sink)) is not None
    ]
    return (*readings, *effects)


def decision_type(
    name: str,
    *,
    request: type[R],
    policy: Callable[[R, Packet, Record[Any]], Outcome],
    policy_version: str,
    evidence: Sequence[Evidence[Any, Any]],
    effects: Sequence[Sink] = (),
    record: RecordKind[Any] | None = None,
    time_limit_ms: int = 30_000,
    max_rounds: int = 8,
    review_within: timedelta = timedelta(days=7),
    cost: float = 1.0,
    on_exhausted: OnExhausted = "refuse",
    budget_wait_ms: int = 5_000,
    locks: Sequence[str] = (),
) -> DecisionType[R, Any]:
    """Declare a decision type.

    ``policy(request, packet, record)`` is pure and synchronous. ``effects`` are the sinks that its outcomes may name.
    ``time_limit_ms`` bounds the whole decision, ``max_rounds`` how often the policy may run before the decision ends as
    `conflicted` or `in_review`. A review that nobody has ended ``review_within`` that time ends as `expired`. ``cost`` is how much
    one of these counts when tenants of a class take turns: one that costs 10 is weighed as ten others.
    ``locks`` name what only one decision may work on at a time, such as ``region/{input.region}``: for what no record's version can
    tell apart (see `coordinator.core.lock_names`).

    ``on_exhausted`` is what happens where a budget has no room for what its evidence and effects reserve: ``refuse`` with nothing
    stored; ``wait`` up to ``budget_wait_ms`` for money to come back; ``reduce`` to what is required, leaving optional paid evidence
    out; or put it up for ``review``. Raises `DeclarationError`.
    """
    where = declared_at()

    def wrong(message: str) -> DeclarationError:
        return DeclarationError(f"decision type {name!r}: {message}", where)

    if not NAME.match(name):
        raise wrong("a name is 1..63 characters of a-z, 0-9 and -, starting with a letter")
    if not is_struct(request):
        raise wrong(f"request must be a msgspec.Struct, not {request!r}")
    if inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(type(policy).__call__):
        raise wrong("policy must be a plain function; what needs I/O is evidence")
    try:
        inspect.signature(policy).bind(None, None, None)
    except TypeError as error:
        raise wrong(f"policy must take (request, packet, record): {error}") from None
    if not policy_version or type(policy_version) is not str:
        raise wrong(f"policy_version is empty or no text: {policy_version!r}")
    if not 1 <= time_limit_ms <= 3_600_000:
        raise wrong("time_limit_ms must be within 1..3600000")
    if not 1 <= max_rounds <= 100:
        raise wrong("max_rounds must be within 1..100")
    if type(review_within) is not timedelta or not timedelta(seconds=1) <= review_within <= MAX_REVIEW:
        raise wrong(
            f"review_within must be a timedelta within 1 s..{MAX_REVIEW.days} d, not {review_within!r}"
        )
    if not 0.01 <= cost <= 1000:
        raise wrong("cost must be within 0.01..1000")
    ordered = in_dependency_order(evidence, request, wrong)
    sinks = _by_name(effects, wrong)
    _check_reserves(_needs(ordered, sinks), on_exhausted, budget_wait_ms, wrong)
    names = LockNames(locks, request, has_record=record is not None, where=where)
    return DecisionType(
        name,
        request,
        policy,
        policy_version,
        ordered,
        sinks,
        record,
        time_limit_ms,
        max_rounds,
        review_within,
        cost,
        where,
        on_exhausted,
        budget_wait_ms,
        names,
    )


def _check_reserves(
    needs: Sequence[Need],
    on_exhausted: str,
    budget_wait_ms: int,
    wrong: Callable[[str], DeclarationError],
) -> None:
    for need in needs:
        if need.amount.amount_minor <= 0:
            raise wrong(f"{need.kind} {need.item!r} reserves {need.amount}; it must be positive")
    if len({need.amount.currency for need in needs}) > 1:
        raise wrong("its evidence and effects reserve in more than one currency")
    if on_exhausted not in get_args(OnExhausted):
        raise wrong(f"on_exhausted is {on_exhausted!r}; it may be {', '.join(get_args(OnExhausted))}")
    if not 1 <= budget_wait_ms <= 3_600_000:
        raise wrong("budget_wait_ms must be within 1..3600000")


def _by_name(effects: Sequence[Sink], wrong: Callable[[str], DeclarationError]) -> dict[str, Sink]:
    sinks: dict[str, Sink] = {}
    for sink in effects:
        if not hasattr(sink, "perform"):
            raise wrong(f"{sink!r} in effects is not a sink")
        if not NAME.match(sink.name):
            raise wrong(f"effect {sink.name!r}: a name is 1..63 characters of a-z, 0-9 and -")
        if not 1 <= sink.timeout_ms <= MAX_SINK_TIMEOUT_MS:
            raise wrong(f"effect {sink.name!r}: timeout_ms must be within 1..{MAX_SINK_TIMEOUT_MS}")
        if sink.name in sinks:
            raise wrong(f"effect {sink.name!r} is declared twice")
        sinks[sink.name] = sink
    return sinks


class Coordinator:
    """Everything one service serves: decision types, record kinds, and the limits of the providers that they call. What
    ``coordinator serve MODULE:NAME`` is pointed at."""

    def __init__(
        self,
        types: Sequence[DecisionType[Any, Any]],
        *,
        records: Sequence[RecordKind[Any]] = (),
        pools: Sequence[Pool] = (),
    ) -> None:
        where = declared_at()
        self.types: dict[str, DecisionType[Any, Any]] = {}
        self.record_kinds: dict[str, RecordKind[Any]] = {}
        self.sinks: dict[tuple[str, str], Sink] = {}
        for kind in (*records, *(declared.record for declared in types if declared.record is not None)):
            if not NAME.match(kind.name):
                raise DeclarationError(
                    f"record kind {kind.name!r}: a name is 1..63 of a-z, 0-9 and -", kind.where
                )
            if self.record_kinds.setdefault(kind.name, kind) is not kind:
                raise DeclarationError(f"record kind {kind.name!r} is declared twice", kind.where)
        for declared in types:
            if declared.name in self.types:
                raise DeclarationError(f"decision type {declared.name!r} is declared twice", declared.where)
            self.types[declared.name] = declared
            for name, sink in declared.sinks.items():
                self.sinks[declared.name, name] = sink
        if not self.types:
            raise DeclarationError("a Coordinator needs at least one decision type", where)
        self._check_children()
        self.pools = self._checked(pools)

    @property
    def providers(self) -> frozenset[str]:
        """The providers of all sources and sinks."""
        return frozenset(provider for provider, _ in self._calls())

    def longest_call_ms(self, provider: str) -> int:
        """How long a call of it may take before we give up on it."""
        return max(longest_ms for name, longest_ms in self._calls() if name == provider)

    def _calls(self) -> Iterator[tuple[str, int]]:
        """Provider and longest duration in ms of each reading and each effect that is declared."""
        for declared in self.types.values():
            for evidence in declared.evidence.values():
                if evidence.provider is not None:
                    yield evidence.provider, evidence.deadline_ms
        for sink in self.sinks.values():
            yield sink.provider, sink.timeout_ms

    def _check_children(self) -> None:
        """Decisions that ask for each other would wait for each other for ever."""
        asks: dict[str, list[str]] = {}
        for name, declared in self.types.items():
            asks[name] = []
            for evidence in declared.evidence.values():
                if evidence.child is not None and evidence.child.decision_type not in self.types:
                    known = ", ".join(self.types)
                    unknown = (
                        f"asks for a decision of type {evidence.child.decision_type!r}; there are {known}"
                    )
                    raise DeclarationError(f"evidence {evidence.name!r} {unknown}", evidence.where)
                if evidence.child is not None:
                    asks[name].append(evidence.child.decision_type)
        if names := circle(asks):
            round_trip = " asks for ".join([*names, names[0]])
            raise DeclarationError(f"decisions wait for each other: {round_trip}", self.types[names[0]].where)

    def _checked(self, pools: Sequence[Pool]) -> dict[str, Pool]:
        by_provider: dict[str, Pool] = {}
        for pool in pools:
            if pool.provider not in self.providers:
                known = ", ".join(sorted(self.providers))
                raise pool.wrong(f"nothing here calls a provider of this name, only {known}")
            if by_provider.setdefault(pool.provider, pool) is not pool:
                raise pool.wrong("it is declared twice")
        for evidence in (each for declared in self.types.values() for each in declared.evidence.values()):
            limit = by_provider.get(evidence.provider or "")
            if limit and evidence.units > (limit.limits.units_per_min or MAX_UNITS):
                raise limit.wrong(
                    f"evidence {evidence.name!r} is estimated at {evidence.units} units: it could never begin"
                )
        return by_provider

    def closables(self) -> list[Closable]:
        """The sources and sinks that hold something open."""
        sources = [
            evidence.source for declared in self.types.values() for evidence in declared.evidence.values()
        ]
        return [adapter for adapter in (*sources, *self.sinks.values()) if isinstance(adapter, Closable)]
