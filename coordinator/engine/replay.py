"""Replay: does the policy, run again on what was stored, arrive at the same bytes?

What a policy concludes depends on three things only, and all three are stored: the request, the packet, and the record at the
version the decision was based on. So anyone who holds them and the declaring module can check a decision long afterwards:

    packet     the canonical bytes of the shown evidence      against `packet_digest`
    outcome    kind, terms and reason of the policy run again  against what the decision shows
    digest     the canonical bytes of the whole outcome,       against the one in the decision's receipt
               changes and effects included
    runs       several runs against each other: a policy that reads a clock, draws numbers or keeps state differs from itself

A decision that came to rest without its policy's word (evidence missing, out of time, the record moved) has only its packet to
compare. One that was reviewed shows what its policy had said beside what the reviewer made of it: the former is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from coordinator.core.canonical import JsonValue, canonical, digest, parse
from coordinator.core.decision import DecisionType
from coordinator.core.evidence import Item, clean_text
from coordinator.core.outcome import Commit, Decline, NeedMore, Outcome, Review, as_json
from coordinator.core.packet import Packet
from coordinator.core.view import DecisionView, OutcomeView
from coordinator.engine.decide import PolicyFailed, outcome_digest, record_seen, run_policy

RUNS = 3
POLICY_CONCLUDED = frozenset({"commit", "decline", "review"})
POLICY_FAILED = frozenset({"policy-raised", "policy-returned-junk", "record-malformed"})


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as it is kept. ``record_data`` is the record at the decision's base version, None for version 0;
    ``outcome_digest`` is from its receipt, None where that cannot be had."""

    view: DecisionView
    record_data: JsonValue = None
    outcome_digest: str | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``what`` is not the same now as it was stored."""

    what: str
    stored: JsonValue
    now: JsonValue


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """``compared`` names what was compared, whether it agreed or not. The digests are those of this replay."""

    decision: str
    status: str
    policy_version: str
    compared: list[str]
    differences: list[Difference]
    packet_digest: str | None = None
    outcome_digest: str | None = None

    @property
    def agrees(self) -> bool:
        return not self.differences


class _Ran(msgspec.Struct, frozen=True):
    """One run of the policy in comparable form."""

    shown: JsonValue
    digest: str | None


def replay(declared: DecisionType[Any, Any], stored: Stored, *, runs: int = RUNS) -> Replay:
    """Compare all that can be compared. Never raises for what a stored decision or a policy may hold."""
    compared: list[str] = []
    differences: list[Difference] = []
    packet, again = _packet(declared, stored.view)
    if packet is not None:
        compared.append("packet_digest")
        differences += _differ("packet_digest", stored.view.packet_digest, again)
    found: list[_Ran] = []
    if packet is not None and _policy_spoke(stored.view):
        found = [_run(declared, stored, packet) for _ in range(runs)]
        compared += ["outcome", f"{runs} runs"]
        differences += _differ("outcome", _shown(stored.view), found[0].shown)
        if stored.outcome_digest is not None:
            compared.append("outcome_digest")
            differences += _differ("outcome_digest", stored.outcome_digest, found[0].digest)
        differences += _unsteady(found)
    return Replay(
        decision=stored.view.id,
        status=stored.view.status,
        policy_version=declared.policy_version,
        compared=compared,
        differences=differences,
        packet_digest=again,
        outcome_digest=found[0].digest if found else None,
    )


def _packet(declared: DecisionType[Any, Any], view: DecisionView) -> tuple[Packet | None, str | None]:
    """The packet, and the digest of what is shown as evidence. Both readings of the evidence have to agree on it: as the JSON it
    is, and as the items that the policy is given."""
    if view.packet_digest is None:
        return None, None
    as_shown = canonical(parse(bytes(view.evidence)))
    packet = Packet(msgspec.json.decode(view.evidence, type=list[Item]), declared.types)
    return packet, packet.digest if packet.bytes == as_shown else digest(as_shown)


def _policy_spoke(view: DecisionView) -> bool:
    outcome = view.outcome
    if view.review is not msgspec.UNSET:
        return view.review.concluded is not None
    return outcome is not None and (
        (outcome.kind in POLICY_CONCLUDED and outcome.code is None) or outcome.code in POLICY_FAILED
    )


def _shown(view: DecisionView) -> JsonValue:
    """What the decision shows of its outcome. Why a policy failed is compared by its code; the words hold line numbers."""
    if view.review is not msgspec.UNSET:
        return as_json(view.review.concluded)
    if view.outcome is None:
        return None
    if view.outcome.code is not None:
        return {"code": view.outcome.code}
    return as_json(view.outcome)


def _run(declared: DecisionType[Any, Any], stored: Stored, packet: Packet) -> _Ran:
    record = stored.view.record
    try:
        seen = record_seen(
            declared,
            record.kind if record else "",
            record.id if record else "",
            (record.base_version or 0) if record else 0,
            stored.record_data,
        )
        request = msgspec.convert(stored.view.input, declared.request)
    except msgspec.ValidationError as error:
        return _Ran({"code": "record-malformed", "detail": str(error)}, None)
    fresh = Packet(
        packet.items, declared.types
    )  # each run decodes its own values: nothing is handed on by mutation
    try:
        outcome = run_policy(declared, request, fresh, seen)
        return _Ran(_as_shown(outcome), outcome_digest(outcome))
    except PolicyFailed as error:
        return _Ran({"code": error.code}, None)
    except (TypeError, ValueError) as error:
        return _Ran({"code": "outcome-not-json", "detail": str(error)}, None)


def _as_shown(outcome: Outcome) -> JsonValue:
    match outcome:
        case Commit(terms=terms):
            return as_json(OutcomeView(kind="commit", terms=as_json(terms)))
        case Decline(reason):
            return as_json(OutcomeView(kind="decline", reason=clean_text(reason)))
        case Review(reason=reason):
            return as_json(OutcomeView(kind="review", reason=clean_text(reason)))
        case NeedMore(evidence):
            return {"kind": "need-more", "evidence": list(evidence)}


def _differ(what: str, stored: JsonValue, now: JsonValue) -> Iterator[Difference]:
    if stored != now:
        yield Difference(what=what, stored=stored, now=now)


def _unsteady(found: Sequence[_Ran]) -> Iterator[Difference]:
    """The first run that is not like the first; one is enough to know."""
    for number, ran in enumerate(found[1:], start=2):
        if ran != found[0]:
            yield Difference(
                what=f"run {number} of the policy, which is not deterministic",
                stored=found[0].shown if found[0].shown != ran.shown else found[0].digest,
                now=ran.shown if found[0].shown != ran.shown else ran.digest,
            )
            return
