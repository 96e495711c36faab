"""The path of one admitted decision: gather -> decide -> fence -> commit, round again if something moved, at most `max_rounds`.

    lock      its named locks, if its type has some      the decision is another's          -> held by that one
    gather    evidence, concurrently                     required evidence missing          -> unresolved
    decide    the policy over the frozen packet          Decline / Review                   -> declined / in_review
                                                         it raised                          -> failed
    fence     decisive evidence again                    moved: that and what hangs on it   -> gather
    commit    one transaction                            a record moved                     -> reread, decide again
                                                         the caller named its version       -> conflicted (409 stale-version)
                                                         a lock of ours is another's now    -> lock

Every limit ends in an answer, with everything gathered so far in its packet:

    time      the decision's own: the policy has not run yet -> expired; it has -> in_review, `time-limit`
    rounds    the type's: things kept moving -> conflicted; the policy kept asking for more -> in_review, `round-limit`
    cost      the request's ceiling: the next reading may cost more than is left -> in_review, `cost-limit`

Whatever happens, `walk` ends with the decision at rest, or held by another process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress

import anyio
import msgspec

from coordinator import telemetry
from coordinator.core.fence import moved, with_dependants
from coordinator.core.outcome import NeedMore
from coordinator.core.packet import Packet
from coordinator.engine.chains import Chain
from coordinator.engine.commit import Rest, commit, propose, rest_without_commit, settled
from coordinator.engine.decide import Decided, PolicyFailed, decide
from coordinator.engine.fence import Fenced, fence, read_set, still_fresh
from coordinator.engine.gather import Readings, freeze, gather, missing
from coordinator.engine.items import record_reading
from coordinator.engine.locks import take
from coordinator.engine.reserve import reserve_before_work
from coordinator.engine.run import Engine, Run
from coordinator.errors import StaleVersion
from coordinator.failpoints import failpoint
from coordinator.store.commit import Committed, LockLost, Moved, NotAllowed, OutOfDate, Result, Superseded
from coordinator.store.records import Locked


class OutOfTime(Exception):
    """The time limit is over. Cancellation says so only to what awaits; a policy that computes, for one, does not."""


def check_time(run: Run) -> None:
    if time.monotonic() >= run.ends_at:
        raise OutOfTime


async def walk(engine: Engine, run: Run) -> Committed | Superseded:
    """Bring the decision to rest."""
    with engine.lines.places_of(run.tenant) as run.places:
        return await _walk(engine, run)


async def _walk(engine: Engine, run: Run) -> Committed | Superseded:
    with anyio.CancelScope() as on_request, anyio.move_on_after(run.ends_at - time.monotonic()):
        run.cancel = on_request.cancel
        if not run.cancelled:
            run.tell_start()
            with suppress(OutOfTime):
                return await _rounds(engine, run)
    return await _rest(engine, run, _cut_short(run, run.cancelled or on_request.cancel_called))


def _cut_short(run: Run, on_request: bool) -> Rest:
    """With everything gathered so far."""
    packet = freeze(run, run.readings) if run.readings else None
    if on_request:
        reason = "cancelled on request; nothing was changed, nothing was sent"
        return rest_without_commit("cancelled", "cancelled", reason, packet)
    reason = f"the time limit ran out {_when(run)}"
    status = "in_review" if run.rounds else "expired"
    return rest_without_commit(status, "time-limit", reason, packet, readings={**run.readings})


def _when(run: Run) -> str:
    if run.waits_for is not None:
        return f"while it waited for the lock {run.waits_for!r}"
    return "before the decision could be committed"


async def _rounds(engine: Engine, run: Run) -> Committed | Superseded:
    if (instead := await reserve_before_work(engine, run)) is not None:
        return await _rest(engine, run, instead)
    if run.lock_names and not await take(engine, run):
        return Superseded()
    if run.expects_another(run.record.version):
        return await _rest(engine, run, _stale(run, run.record.version))
    readings = run.readings
    wanted: Iterable[str] = [name for name, declared in run.type.evidence.items() if not declared.on_demand]
    while True:
        await gather(engine, run, wanted)
        packet = freeze(run, readings)
        await failpoint("gather.after")
        check_time(run)
        concluded = conclude(engine, run, packet, readings)
        await failpoint("decide.after")
        if isinstance(concluded, NeedMore):
            wanted = concluded.evidence
            continue
        result = await _apply(engine, run, packet, readings, concluded)
        if isinstance(result, Committed | Superseded):
            return result
        wanted = result


async def _apply(
    engine: Engine, run: Run, packet: Packet, readings: Readings, concluded: Decided | Rest
) -> Committed | Superseded | Iterable[str]:
    """Fence and commit what was concluded; or bring ``readings`` up to date and say what to gather again."""
    check_time(run)
    if isinstance(concluded, Rest):
        return await _rest(engine, run, concluded)
    fenced = await fence(engine, run, readings)
    run.events.add("fence", {"rounds": run.rounds, "held": fenced.held, "checks": fenced.checks})
    await failpoint("fence.after")
    if run.cost_limited:
        return await _rest(engine, run, _beyond_ceiling(packet, readings))
    if not fenced.held:
        if run.out_of_rounds:
            return await _rest(engine, run, _evidence_moved(packet, fenced))
        run.moves += [check for check in fenced.checks if not check.held]
        readings |= fenced.readings
        for reading in fenced.readings.values():
            run.events.add("evidence", reading.item)
        return fenced.stale
    result = await _commit_in_chain(engine, run, packet, readings, concluded, fenced)
    match result:
        case Committed() | Superseded():
            return result
        case NotAllowed(reason):
            return await _rest(
                engine, run, rest_without_commit("failed", "transition-refused", reason, packet)
            )
        case NeedMore(evidence):
            return evidence
        case OutOfDate():
            return () if not run.out_of_rounds else await _rest(engine, run, _evidence_moved(packet, fenced))
        case Moved():
            return await _after_move(engine, run, packet, readings, result)
        case LockLost(names):
            return await _after_loss(engine, run, packet, readings, names)
    raise AssertionError(f"an unknown result of the commit: {result}")


def conclude(engine: Engine, run: Run, packet: Packet, readings: Readings) -> Decided | Rest | NeedMore:
    """What follows from the packet: something to commit, a rest, or the names of further evidence."""
    concluded = _conclude(engine, run, packet, readings)
    match concluded:
        case NeedMore(evidence):
            run.events.add("outcome", {"kind": "need-more", "evidence": list(evidence)})
        case Decided(outcome=outcome) | Rest(decided=Decided(outcome=outcome)):
            run.events.add("outcome", outcome)
    return concluded


def _conclude(engine: Engine, run: Run, packet: Packet, readings: Readings) -> Decided | Rest | NeedMore:
    if run.cost_limited:
        return _beyond_ceiling(packet, readings)
    if lacking := missing(run, packet):
        states = ", ".join(f"{name} ({packet.item(name).state})" for name in lacking)
        return rest_without_commit(
            "unresolved", "evidence-missing", f"required evidence is missing: {states}", packet
        )
    try:
        decided = decide(engine, run, packet, readings)
    except PolicyFailed as error:
        return rest_without_commit("failed", error.code, error.message, packet)
    if isinstance(decided, Decided):
        if decided.status == "committed":
            return decided
        return Rest(decided=decided, packet=packet, readings={**readings})
    if unknown := [name for name in decided.evidence if name not in run.type.evidence]:
        return rest_without_commit(
            "failed", "unknown-evidence", f"the policy asked for {', '.join(unknown)}", packet
        )
    if run.out_of_rounds or all(name in readings for name in decided.evidence):
        asked = ", ".join(decided.evidence)
        reason = f"the policy keeps asking for more evidence: {asked}"
        return rest_without_commit("in_review", "round-limit", reason, packet, readings={**readings})
    return decided


def _beyond_ceiling(packet: Packet, readings: Readings) -> Rest:
    reason = "another reading may cost more than what is left of the decision's ceiling"
    return rest_without_commit("in_review", "cost-limit", reason, packet, readings={**readings})


async def _commit_in_chain(
    engine: Engine, run: Run, packet: Packet, readings: Readings, decided: Decided, fenced: Fenced
) -> Result | NeedMore:
    """Commit behind whoever proposed to change this record before us in this process, on what it proposed: its commit and ours
    may then share a transaction. If it failed, or the record moved otherwise and nothing else did, the policy reconsiders on
    the spot: the packet is the same, and so are its confirmations."""
    key = run.record_key
    conclusion: Decided | Rest | NeedMore = decided
    with engine.chains.of((run.tenant, key)) if key else nullcontext(Chain()) as chain:
        if chain.latest and chain.latest.version > run.record.version and run.may_reconsider:
            run.record = chain.latest
            conclusion = conclude(engine, run, packet, readings)
        while not isinstance(conclusion, NeedMore):
            rest = _as_rest(engine, run, packet, readings, conclusion, fenced)
            check_time(run)
            generation, proposed = chain.generation, propose(engine, run, rest)
            chain.latest = _made(rest.decided, key) or chain.latest
            result = await settled(engine, run, proposed)
            present = result.locked.get(key) if isinstance(result, Moved) and key else None
            if not isinstance(result, Committed):
                chain.broke(generation, present)
            if not isinstance(result, Moved) or present is None or moved(result.checks) != {"record"}:
                return result
            if not run.may_reconsider:
                return result
            run.moves += [check for check in result.checks if not check.held]
            run.record = chain.newest(present)
            conclusion = conclude(engine, run, packet, readings)
        return conclusion


def _as_rest(
    engine: Engine, run: Run, packet: Packet, readings: Readings, conclusion: Decided | Rest, fenced: Fenced
) -> Rest:
    """With everything that has to hold under lock. A conclusion that changes nothing may rest on what another decision has only
    proposed: then at least that has to hold."""
    frozen = dict(readings)
    if isinstance(conclusion, Rest):
        return msgspec.structs.replace(conclusion, reads=read_set(run, {}))
    return Rest(
        decided=conclusion,
        packet=packet,
        checks=fenced.checks,
        confirmed=fenced.confirmed,
        reads=read_set(run, frozen),
        fresh=lambda: still_fresh(engine.settings, run, frozen, fenced, time.monotonic()),
    )


def _made(decided: Decided, key: tuple[str, str] | None) -> Locked | None:
    return next(
        (Locked(new.base + 1, new.data) for new in decided.changes if (new.kind, new.id) == key), None
    )


async def _after_move(
    engine: Engine, run: Run, packet: Packet, readings: Readings, result: Moved
) -> Committed | Superseded | Iterable[str]:
    """Records moved between reading and commit: refuse where the caller named its version, else take them as they are now."""
    present = result.locked.get(run.record_key) if run.record_key else None
    if present and (
        run.expects_another(present.version) or (run.out_of_rounds and present.version != run.record.version)
    ):
        return await _rest(engine, run, _stale(run, present.version, packet, checks=result.checks))
    if run.out_of_rounds:
        rest = rest_without_commit(
            "conflicted", "evidence-moved", "records moved in every round", packet, checks=result.checks
        )
        return await _rest(engine, run, rest)
    run.moves += [check for check in result.checks if not check.held]
    run.record = present or run.record
    names = moved(result.checks) & readings.keys()
    for name in names:
        declared, local = run.type.evidence[name], readings[name].local
        if local is not None:
            readings[name] = record_reading(
                engine, declared, local[0], result.locked[local[0]], time.monotonic()
            )
    return with_dependants(names, run.type.evidence) - names


async def _after_loss(
    engine: Engine, run: Run, packet: Packet, readings: Readings, names: Sequence[str]
) -> Committed | Superseded | Iterable[str]:
    """Others had locks of ours meanwhile: what was read under them counts no more."""
    telemetry.LOCKS_LOST.labels(run.type.name).inc()
    if run.out_of_rounds:
        reason = f"lost while it ran: {', '.join(names)}; nothing was changed and nothing was sent"
        return await _rest(engine, run, rest_without_commit("conflicted", "lock-lost", reason, packet))
    return list(readings) if await take(engine, run) else Superseded()


def _stale(run: Run, version: int, packet: Packet | None = None, **more: object) -> Rest:
    kind, id = run.record_key or ("", "")
    seen = run.request.record.expected_version if run.request.record else None
    base = run.record.version if seen is None else seen
    reason = (
        f"record {kind}/{id} is at version {version}, not {base}; nothing was changed and nothing was sent"
    )
    refusal = StaleVersion(reason, current_version=version, decision=str(run.id))
    return rest_without_commit("conflicted", "stale-version", reason, packet, refusal=refusal, **more)


def _evidence_moved(packet: Packet, fenced: Fenced) -> Rest:
    names = ", ".join(sorted(moved(fenced.checks))) or "the confirmation"
    reason = f"{names} kept moving between reading and commit; nothing was changed and nothing was sent"
    return rest_without_commit(
        "conflicted", "evidence-moved", reason, packet, checks=fenced.checks, confirmed=fenced.confirmed
    )


async def _rest(engine: Engine, run: Run, rest: Rest) -> Committed | Superseded:
    result = await commit(engine, run, rest)
    if not isinstance(result, Committed | Superseded):
        raise AssertionError(f"a rest that changes nothing was refused: {result}")
    return result
