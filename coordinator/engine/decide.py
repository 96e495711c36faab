"""Decide: run the policy over the frozen packet, and turn what it concludes into something that can be committed.

The policy is the user's code: what it raises, and an outcome that cannot be carried out (an effect that was not declared, a
record that was not read, terms that are not JSON), ends the decision as `failed` with the reason; it is never an error of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator import telemetry
from coordinator.core.canonical import InvalidJson, JsonValue, canonical, check, digest
from coordinator.core.decision import DecisionType
from coordinator.core.effect import operation_key
from coordinator.core.evidence import clean_text
from coordinator.core.outcome import Commit, Decline, Effect, NeedMore, Outcome, Review, as_json
from coordinator.core.packet import Packet
from coordinator.core.record import Record
from coordinator.core.saga import COMPENSATION_ORDINALS
from coordinator.core.view import OutcomeView
from coordinator.engine.run import Engine, Reading, Run
from coordinator.logs import THEIR_FAULTS, description_of, line_of, traceback_of
from coordinator.store.commit import NewOperation, NewVersion

log = logging.getLogger(__name__)


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A conclusion in the form in which it can be stored. ``digest`` is over the canonical bytes of the policy's whole outcome,
    changes and effects included: a replay has to arrive at the same. It is empty if the policy had no say. ``proposal`` is what
    an approval would commit. ``concluded`` is what the policy said, where ``outcome`` is what a reviewer made of it."""

    status: str
    outcome: OutcomeView
    digest: str
    changes: tuple[NewVersion, ...] = ()
    operations: tuple[NewOperation, ...] = ()
    proposal: Decided | None = None
    concluded: OutcomeView | None = None

    @property
    def said(self) -> OutcomeView | None:
        """What the policy itself said; None if it had no say."""
        return self.concluded or (self.outcome if self.digest else None)


class PolicyFailed(Exception):
    """The policy raised or concluded something that cannot be carried out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = clean_text(message)


def decide(engine: Engine, run: Run, packet: Packet, readings: Mapping[str, Reading]) -> Decided | NeedMore:
    """One round of the policy. Raises `PolicyFailed`."""
    run.rounds += 1
    with run.stage("decide"):
        try:
            outcome = run_policy(run.type, run.input, packet, _record(run))
        except PolicyFailed as error:
            trace_id = telemetry.trace_id(run.traceparent)
            text = traceback_of(error)
            log.error("policy of %s failed, decision %s, trace %s: %s", run.type.name, run.id, trace_id, text)
            raise
    match outcome:
        case NeedMore():
            return outcome
        case Decline(reason):
            return _reasoned("declined", OutcomeView(kind="decline", reason=clean_text(reason)), outcome)
        case Review(reason, None):
            return _reasoned("in_review", OutcomeView(kind="review", reason=clean_text(reason)), outcome)
        case Review(reason, Commit() as commit):
            proposal = _committable(engine, run, commit, readings)
            decided = _reasoned("in_review", OutcomeView(kind="review", reason=clean_text(reason)), outcome)
            return msgspec.structs.replace(decided, proposal=proposal)
        case Commit():
            return _committable(engine, run, outcome, readings)
    raise AssertionError(f"run_policy lets no other outcome pass: {outcome!r:.200}")


def _reasoned(status: str, view: OutcomeView, outcome: Decline | Review) -> Decided:
    try:
        return Decided(status=status, outcome=view, digest=outcome_digest(outcome))
    except ValueError as error:
        raise PolicyFailed("outcome-not-json", "the reason is not text that JSON can hold") from error


def run_policy(
    declared: DecisionType[Any, Any], input: object, packet: Packet, record: Record[Any]
) -> Outcome:
    """The policy's outcome; `PolicyFailed` if it raises or returns something else. Pure, as long as the policy is."""
    try:
        outcome = declared.policy(input, packet, record)
    except THEIR_FAULTS as error:
        raise PolicyFailed("policy-raised", f"in {line_of(error)}: {description_of(error)}") from error
    if not isinstance(outcome, Commit | Decline | Review | NeedMore):
        raise PolicyFailed(
            "policy-returned-junk",
            f"a policy returns Commit, Decline, Review or NeedMore, not {outcome!r:.200}",
        )
    if isinstance(outcome, Decline | Review) and not isinstance(outcome.reason, str):
        raise PolicyFailed("policy-returned-junk", f"a reason is a text, not {outcome.reason!r:.200}")
    if isinstance(outcome, Review) and not isinstance(outcome.proposal, Commit | None):
        raise PolicyFailed("policy-returned-junk", f"a proposal is a Commit, not {outcome.proposal!r:.200}")
    return outcome


def outcome_digest(outcome: Outcome) -> str:
    return digest(canonical(as_json(outcome)))


def record_seen(
    type: DecisionType[Any, Any], kind: str, id: str, version: int, data: JsonValue
) -> Record[Any]:
    """A record as the policy sees it: typed, where the decision type declares the record's kind."""
    typed = data if data is None or type.record is None else msgspec.convert(data, type.record.data)
    return Record(kind, id, version, typed)


def _record(run: Run) -> Record[Any]:
    kind, id = run.record_key or ("", "")
    try:
        return record_seen(run.type, kind, id, run.record.version, run.record_data)
    except msgspec.ValidationError as error:
        raise PolicyFailed(
            "record-malformed", f"record {kind}/{id} is not a valid {kind}: {error}"
        ) from error


def _committable(engine: Engine, run: Run, outcome: Commit, readings: Mapping[str, Reading]) -> Decided:
    try:
        whole = as_json(outcome)
        check(whole)
        if (size := len(msgspec.json.encode(whole))) > engine.settings.max_outcome_bytes:
            limit = engine.settings.max_outcome_bytes
            raise PolicyFailed("outcome-too-large", f"the outcome has {size} bytes; at most {limit}")
        changes = tuple(
            NewVersion(
                change.kind,
                change.id,
                _base(run, change.kind, change.id, readings),
                canonical(as_json(change.data)),
            )
            for change in outcome.changes
        )
        operations = _operations(engine, run, outcome)
        view = OutcomeView(kind="commit", terms=as_json(outcome.terms))
    except (InvalidJson, TypeError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise PolicyFailed("outcome-not-json", f"the outcome is not JSON: {error}") from error
    if len({(change.kind, change.id) for change in changes}) != len(changes):
        raise PolicyFailed("record-changed-twice", "the outcome changes one record twice")
    return Decided(
        status="committed",
        outcome=view,
        digest=digest(canonical(whole)),
        changes=changes,
        operations=operations,
    )


def _base(run: Run, kind: str, id: str, readings: Mapping[str, Reading]) -> int:
    """The version that this decision read the record at: what was not read cannot be changed."""
    if run.record_key == (kind, id):
        return run.record.version
    for reading in readings.values():
        if reading.local and reading.local[0] == (kind, id):
            return reading.local[1].version
    raise PolicyFailed(
        "record-not-read", f"the outcome changes record {kind}/{id}, which is not among the evidence"
    )


def _operations(engine: Engine, run: Run, outcome: Commit) -> tuple[NewOperation, ...]:
    linked = len(outcome.effects) > 1 or any(effect.compensation is not None for effect in outcome.effects)
    operations = []
    for ordinal, effect in enumerate(outcome.effects):
        plain = _operation(engine, run, effect, ordinal)
        compensation = None
        if effect.compensation is not None:
            undo = _operation(engine, run, effect.compensation, ordinal + COMPENSATION_ORDINALS)
            compensation = msgspec.json.encode(undo)
        operations.append(
            msgspec.structs.replace(
                plain,
                linked=linked,
                after=_after(outcome.effects[:ordinal], effect),
                on_failure=outcome.on_failure,
                compensation=compensation,
            )
        )
    return tuple(operations)


def _after(earlier: Sequence[Effect], effect: Effect) -> tuple[int, ...]:
    """The ordinals of all effects before it that have one of those names."""
    names = {other.sink for other in earlier}
    for name in effect.after:
        if name not in names:
            detail = f"effect {effect.sink!r} comes after {name!r}, which is not listed before it"
            raise PolicyFailed("unknown-effect", detail)
    return tuple(ordinal for ordinal, other in enumerate(earlier) if other.sink in effect.after)


def _operation(engine: Engine, run: Run, effect: Effect, ordinal: int) -> NewOperation:
    sink = run.type.sinks.get(effect.sink)
    if sink is None:
        raise PolicyFailed(
            "unknown-effect", f"effect {effect.sink!r} is not among the effects of {run.type.name}"
        )
    payload = canonical(as_json(effect.payload))
    return NewOperation(
        id=engine.new_id(),
        effect=effect.sink,
        ordinal=ordinal,
        key=operation_key(str(run.id), effect.sink, ordinal),
        payload=payload,
        payload_hash=digest(payload),
        guarantee=msgspec.json.encode(sink.guarantee),
        linked=False,
        after=(),
        on_failure="keep",
        compensation=None,
    )
