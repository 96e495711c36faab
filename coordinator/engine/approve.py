"""Approve: the fence again, then what the reviewer was shown is committed; or the review goes on with what is there now.

    reserve   what reading again and the effects may cost; there is no money for it                                   -> stays as it is
    lock      the named locks of its type, which the review did not keep
    confirm   MaxAge evidence that is too old by now, and everything decisive, is read again     all as it was shown   -> commit
              something could not be read, or not in time                                         nobody knows          -> stays as it is
    renew     what moved is taken as it is now, and the policy runs again over the fresh packet
                  Commit, Review      a new proposal, still for a person                                                -> in_review
                  Decline             there is nothing left to approve                                                  -> declined
                  it cannot conclude  nothing is proposed; a person can only reject                                     -> in_review
              the caller named a version of its record, and that is gone                                                -> conflicted
    commit    one transaction: versions, operations, the reviewer's receipt and the decision's own                      -> committed
              the record kind refuses the change                                                                        -> failed

An approval counts for what was shown, never for anything else: whatever moved, somebody has to look again. A type that is declared
with another policy version by now has moved as a whole, and all of its evidence is read anew.

If the process dies before COMMIT, nothing has happened: the lease runs out, and the review can be approved again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec

from coordinator.core.canonical import canonical
from coordinator.core.evidence import Decisive, Item, MaxAge
from coordinator.core.fence import Check, ReadCheck, all_hold, compare_items, moved, with_dependants
from coordinator.core.outcome import NeedMore
from coordinator.core.packet import Packet
from coordinator.core.view import DecisionView, OutcomeView
from coordinator.engine.commit import Rest, commit, rest_without_commit
from coordinator.engine.decide import Decided
from coordinator.engine.fence import Fenced, fence, read_set, still_fresh
from coordinator.engine.gather import Readings, at_once, freeze, gather, missing
from coordinator.engine.items import record_reading
from coordinator.engine.locks import take
from coordinator.engine.path import OutOfTime, check_time, conclude
from coordinator.engine.read import read
from coordinator.engine.reserve import reserve_again
from coordinator.engine.reviewing import Kept
from coordinator.engine.run import Engine, Reading, Run
from coordinator.failpoints import failpoint
from coordinator.store.commit import (
    Committed,
    LockLost,
    Moved,
    NewOperation,
    NotAllowed,
    OutOfDate,
    Result,
    Superseded,
)
from coordinator.store.records import Locked

log = logging.getLogger(__name__)
FENCES = 3
"""How often the fence is made again when the commit came too late for it."""
KNOWN = ("found", "absent")
"""States of a reading that tell how things are; any other says nothing."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the reviewer approved, as the engine works with it. ``base`` is the version of the record that it was made for."""

    kept: Kept
    packet: Packet
    readings: Readings
    base: int


@dataclass(slots=True)
class Confirmation:
    """What reading again has found: ``readings`` in place of those that moved, ``stale`` to be gathered anew because of it."""

    checks: list[Check] = field(default_factory=list)
    confirmed: dict[str, float] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    fenced: Fenced | None = None


def shown(run: Run, kept: Kept, view: DecisionView, older_ms: int, began: float) -> Shown:
    """What was stored. The evidence is ``older_ms`` older than the view says, at ``began`` on this process's monotonic clock."""
    assert view.review is not msgspec.UNSET
    ages = view.review.evidence_age_ms
    readings: Readings = {}
    for item in msgspec.json.decode(view.evidence, type=list[Item]):
        local = None
        if item.name in kept.read_as:
            kind, id, version = kept.read_as[item.name]
            local = (kind, id), Locked(version, None if item.value is None else canonical(item.value))
        age_s = (ages.get(item.name, 0) + older_ms) / 1000
        readings[item.name] = Reading(item, began - age_s, local)
    packet = Packet([reading.item for reading in readings.values()], run.type.types)
    return Shown(kept, packet, readings, (view.record.base_version or 0) if view.record else 0)


async def approve(engine: Engine, run: Run, was: Shown) -> Committed | Superseded:
    """Carry out an approval that this process has claimed. Whatever happens, the claim is over afterwards."""
    with engine.lines.places_of(run.tenant) as run.places:
        return await _in_time(engine, run, was)


async def _in_time(engine: Engine, run: Run, was: Shown) -> Committed | Superseded:
    unread = Check(evidence="time-limit", field="", then=run.type.time_limit_ms, now=None, held=False)
    try:
        with anyio.move_on_after(run.ends_at - time.monotonic()), suppress(OutOfTime):
            return await _approve(engine, run, was)
    except Exception:  # a fault of ours must not keep the review from everybody else; it is logged
        log.exception("approving decision %s", run.id)
        unread = Check(evidence="internal-error", field="", then=None, now=None, held=False)
    return await _stays(engine, run, was, [unread])


async def _approve(engine: Engine, run: Run, was: Shown) -> Committed | Superseded:
    if (unpaid := await reserve_again(engine, run)) is not None:
        return await _stays(engine, run, was, [unpaid])
    if changed := _declaration(run, was):
        names = {name for name, declared in run.type.evidence.items() if not declared.on_demand}
        return await _renew(engine, run, was, Confirmation(changed, stale=names), {})
    for _ in range(FENCES):
        if run.lock_names and not await take(engine, run):
            return Superseded()
        readings = {**was.readings}
        found = await _confirm(engine, run, was, readings)
        await failpoint("fence.after")
        check_time(run)
        if not all_hold(found.checks):
            return await _renew(engine, run, was, found, readings)
        result = await commit(engine, run, _as_shown(engine, run, was, readings, found))
        match result:
            case Committed() | Superseded():
                return result
            case NotAllowed(reason):
                return await _refused(engine, run, was, reason)
            case Moved():
                return await _renew(engine, run, was, _under_lock(engine, run, readings, result), readings)
            case OutOfDate() | LockLost():
                continue
    late = Check(evidence="the confirmation", field="age_ms", then=None, now=None, held=False)
    return await _stays(engine, run, was, [late])


def _declaration(run: Run, was: Shown) -> list[Check]:
    """What is declared differently from what the proposal was made by."""
    checks = []
    if was.kept.policy_version != run.type.policy_version:
        then, now = was.kept.policy_version, run.type.policy_version
        checks.append(Check(evidence="policy_version", field="", then=then, now=now, held=False))
    for name in was.readings.keys() - run.type.evidence.keys():
        checks.append(Check(evidence=name, field="", then="declared", now=None, held=False))
    proposal = was.kept.decided.proposal
    for op in proposal.operations if proposal else ():
        if op.effect not in run.type.sinks:
            checks.append(Check(evidence=op.effect, field="", then="declared", now=None, held=False))
    return checks


async def _confirm(engine: Engine, run: Run, was: Shown, readings: Readings) -> Confirmation:
    """Read again. ``readings`` that were too old and are the same now count from now on."""
    found = await _refresh(engine, run, readings)
    if run.record.version != was.base:
        found.checks += ReadCheck("record", "", "", was.base, None).compare(run.record.version, None)
    fenced = found.fenced = await fence(engine, run, readings)
    found.checks += fenced.checks
    found.confirmed |= fenced.confirmed
    found.readings |= fenced.readings
    found.stale = _stale(run, found, readings)
    return found


def _stale(run: Run, found: Confirmation, readings: Readings) -> set[str]:
    """What has to be gathered anew: what moved and was not read anew already, and what was read after any of it."""
    return (with_dependants(moved(found.checks), run.type.evidence) & readings.keys()) - found.readings.keys()


async def _refresh(engine: Engine, run: Run, readings: Readings) -> Confirmation:
    """Evidence that is too old for its `MaxAge` by now is read again, and has to be what it was."""
    now: Readings = {}
    found = Confirmation()

    async def again(name: str, traceparent: str, others: anyio.CancelScope) -> None:
        then, declared = readings[name], run.type.evidence[name]
        now[name] = await read(
            engine, run, declared, readings, traceparent=traceparent, then=then, not_before=then.ended
        )

    aged = [name for name, reading in readings.items() if _too_old(run, name, reading)]
    if aged:
        with run.stage("fence") as traceparent:
            await at_once(aged, partial(again, traceparent=traceparent))
    for name, reading in now.items():
        checks = compare_items(Decisive(), readings[name].item, reading.item)
        found.checks += checks
        found.confirmed[name] = reading.began
        if all_hold(checks):
            readings[name] = Reading(readings[name].item, reading.began, reading.local)
        else:
            found.readings[name] = reading
    return found


def _too_old(run: Run, name: str, reading: Reading) -> bool:
    freshness = run.type.evidence[name].freshness
    return (
        isinstance(freshness, MaxAge)
        and reading.item.state == "found"
        and reading.age_ms() > freshness.max_age_ms
    )


def _as_shown(engine: Engine, run: Run, was: Shown, readings: Readings, found: Confirmation) -> Rest:
    """The commit of what was proposed, and nothing else."""
    decided, proposal = was.kept.decided, was.kept.decided.proposal
    assert proposal is not None, "judged before it was claimed"
    assert found.fenced is not None
    frozen, fenced = {**readings}, found.fenced
    return Rest(
        decided=msgspec.structs.replace(
            proposal,
            digest=decided.digest,
            concluded=decided.said,
            operations=tuple(_now(engine, run, op) for op in proposal.operations),
        ),
        packet=was.packet,
        readings=frozen,
        checks=found.checks,
        confirmed=found.confirmed,
        reads=read_set(run, frozen),
        fresh=lambda: still_fresh(engine.settings, run, frozen, fenced, time.monotonic()),
    )


def _now(engine: Engine, run: Run, op: NewOperation) -> NewOperation:
    """An operation as it is born now. Its id is its place among all operations; its key is what it was shown with."""
    guarantee = msgspec.json.encode(run.type.sinks[op.effect].guarantee)
    return msgspec.structs.replace(op, id=engine.new_id(), guarantee=guarantee)


def _under_lock(engine: Engine, run: Run, readings: Readings, result: Moved) -> Confirmation:
    """Our own records had moved when the commit locked them."""
    found = Confirmation(checks=result.checks)
    if run.record_key is not None:
        run.record = result.locked.get(run.record_key, run.record)
    for name in moved(result.checks) & readings.keys():
        if (local := readings[name].local) is not None:
            key = local[0]
            declared = run.type.evidence[name]
            found.readings[name] = record_reading(engine, declared, key, result.locked[key], time.monotonic())
    found.stale = _stale(run, found, readings)
    return found


async def _renew(
    engine: Engine, run: Run, was: Shown, found: Confirmation, readings: Readings
) -> Committed | Superseded:
    """What was shown does not hold any more: conclude anew, for a person to look at."""
    if any(reading.item.state not in KNOWN for reading in found.readings.values()):
        return await _stays(engine, run, was, found.checks)
    readings |= found.readings
    run.readings = readings
    wanted: Collection[str] = found.stale
    while True:
        await gather(engine, run, wanted)
        packet = freeze(run, readings)
        check_time(run)
        if run.expects_another(run.record.version):
            return await _conflicted(engine, run, packet, found)
        if unread := _unread(run, packet):
            return await _stays(engine, run, was, [*found.checks, *unread])
        concluded = conclude(engine, run, packet, readings)
        if not isinstance(concluded, NeedMore):
            break
        wanted = concluded.evidence
    decided = concluded if isinstance(concluded, Decided) else concluded.decided
    rest = Rest(
        decided=_for_a_person(decided, found.checks), packet=packet, readings=readings, checks=found.checks
    )
    return await _rest(engine, run, rest)


def _unread(run: Run, packet: Packet) -> list[Check]:
    """Required evidence that could not be read just now. If some of it is known to be absent, that is an answer, and what hangs on
    it needs none."""
    states = {name: packet.item(name).state for name in missing(run, packet)}
    if "absent" in states.values():
        return []
    return [
        Check(evidence=name, field="", then="found", now=state, held=False) for name, state in states.items()
    ]


def _for_a_person(decided: Decided, checks: list[Check]) -> Decided:
    """A conclusion drawn while a person was looking is for a person too; only a refusal needs nobody."""
    if decided.status in ("in_review", "declined"):
        return decided
    names = ", ".join(sorted(moved(checks)))
    if decided.status == "committed":
        reason = f"{names} moved while this was in review; the policy would commit now what is proposed here"
        return Decided(
            status="in_review",
            outcome=OutcomeView(kind="review", reason=reason, code="evidence-moved"),
            digest=decided.digest,
            proposal=decided,
            concluded=decided.outcome,
        )
    reason = f"{names} moved while this was in review, and nothing can be proposed: {decided.outcome.reason}"
    outcome = OutcomeView(kind="review", reason=reason, code=decided.outcome.code)
    return Decided(status="in_review", outcome=outcome, digest="")


async def _stays(engine: Engine, run: Run, was: Shown, checks: list[Check]) -> Committed | Superseded:
    """Nobody knows whether what was shown still holds: it is as it was, and the same verdict may be given again."""
    assert run.review is not None
    run.review.unconfirmed = True
    run.record = Locked(was.base, None)
    kept = was.kept
    rest = Rest(
        decided=kept.decided,
        packet=was.packet,
        readings=was.readings,
        checks=checks,
        policy_version=kept.policy_version,
    )
    return await _rest(engine, run, rest)


async def _refused(engine: Engine, run: Run, was: Shown, reason: str) -> Committed | Superseded:
    kept = was.kept.decided
    rest = rest_without_commit("failed", "transition-refused", reason, was.packet, readings=was.readings)
    decided = msgspec.structs.replace(rest.decided, digest=kept.digest, concluded=kept.said)
    return await _rest(engine, run, msgspec.structs.replace(rest, decided=decided))


async def _conflicted(
    engine: Engine, run: Run, packet: Packet, found: Confirmation
) -> Committed | Superseded:
    kind, id = run.record_key or ("", "")
    reason = f"record {kind}/{id} is at version {run.record.version} by now, not the one that was asked for; nothing was changed"
    return await _rest(
        engine, run, rest_without_commit("conflicted", "stale-version", reason, packet, checks=found.checks)
    )


async def _rest(engine: Engine, run: Run, rest: Rest) -> Committed | Superseded:
    result: Result = await commit(engine, run, rest)
    if not isinstance(result, Committed | Superseded):
        raise AssertionError(f"a rest that changes nothing was refused: {result}")
    return result
