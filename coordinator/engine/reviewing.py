"""The review packet: what a reviewer is shown, and what is kept so that an approval commits exactly that.

Shown, in the decision's view: why, what would be committed (terms, changes, the very payloads), how old each evidence is, who
asked, until when, and in the end the verdict. Kept beside it, for the engine: the conclusion in the form in which it is committed,
which versions of our own records were read, and what was spent. The packet itself is the shown evidence, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from coordinator import telemetry
from coordinator.core.fence import Check
from coordinator.core.money import Money
from coordinator.core.packet import Packet
from coordinator.core.receipt import Receipt, receipt
from coordinator.core.review import Asked
from coordinator.core.view import (
    OutcomeView,
    ProposalView,
    ProposedChange,
    ProposedEffect,
    ReviewView,
    VerdictView,
    decode_view,
    encode_view,
    timestamp,
)
from coordinator.engine.decide import Decided
from coordinator.engine.run import Reading, Run, UnderReview
from coordinator.store import reviews
from coordinator.store.commit import KeptReview, NewOperation
from coordinator.store.database import Connection
from coordinator.store.reviews import ReviewRow

APPROVED = ("committed", "failed")
"""How an approval that was carried out can end: the record kind may refuse what the policy proposed."""
MILLISECOND = timedelta(milliseconds=1)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """``decided`` is what came into review, its proposal inside, as that ``policy_version`` concluded it. ``read_as`` maps record
    evidence to the (kind, id, version) that was read."""

    decided: Decided
    policy_version: str
    read_as: dict[str, tuple[str, str, int]]
    spent: dict[str, list[Money]]
    silent: list[str]


encode_kept = msgspec.json.Encoder().encode
decode_kept = msgspec.json.Decoder(Kept).decode


def keep(
    run: Run, decided: Decided, policy_version: str, readings: Mapping[str, Reading], now: datetime
) -> KeptReview | None:
    """What is kept of a decision that comes into review at ``now``, or stays there; None for any other."""
    if decided.status != "in_review":
        return None
    kept = Kept(
        decided=decided,
        policy_version=policy_version,
        read_as={
            name: (*reading.local[0], reading.local[1].version)
            for name, reading in readings.items()
            if reading.local is not None
        },
        spent=run.spent,
        silent=sorted(run.silent | run.silent_before),
    )
    return KeptReview(encode_kept(kept), _expires_at(run, now))


def review_view(
    run: Run,
    decided: Decided,
    packet: Packet | None,
    readings: Mapping[str, Reading],
    checks: Sequence[Check],
    now: datetime,
) -> ReviewView | msgspec.UnsetType:
    """The review of a decision that comes to rest at ``now``, if it is or was in one."""
    under, waits = run.review, decided.status == "in_review"
    verdict, failing = None, [check for check in checks if not check.held]
    if under is None and not waits:
        return msgspec.UNSET
    if under is not None and decided.status in APPROVED:
        verdict = VerdictView(verdict="approve", by=str(under.reviewer), note=under.note, at=timestamp(now))
    proposal = decided.proposal or (decided if decided.status == "committed" else None)
    return ReviewView(
        reason=under.reason if under and not waits else decided.outcome.reason or "",
        code=decided.outcome.code if waits else None,
        etag=str(run.token) if waits else None,
        requested_by=str(run.requested_by),
        since=timestamp(under.since if under else now),
        expires_at=timestamp(_expires_at(run, now)),
        as_of=timestamp(now),
        evidence_age_ms=_ages(packet, readings),
        proposal=None if proposal is None else _proposal_view(proposal),
        moved=[] if under and under.unconfirmed else failing,
        unconfirmed=failing if under and under.unconfirmed else [],
        concluded=decided.said,
        verdict=verdict,
    )


class Ended(msgspec.Struct, frozen=True):
    """For the metrics, once the transaction is committed. ``verdict`` may be that time ran out."""

    type: str
    status: str
    verdict: str
    waited_s: float


async def end(
    connection: Connection,
    tenant: UUID,
    row: ReviewRow,
    status: str,
    outcome: OutcomeView,
    *,
    asked: Asked | None = None,
    note: str = "",
) -> Ended:
    """Bring a locked review that nobody holds to its end: nothing is changed, nothing is sent. ``asked`` is the rejection."""
    view, kept = decode_view(row.view or b""), decode_kept(row.review or b"")
    at, said, token = timestamp(row.now), [], row.fencing_token + 1
    assert view.review is not msgspec.UNSET
    view.status, view.outcome, view.finished_at, view.review.etag = status, outcome, at, None
    by = None if asked is None else asked.by
    if asked is not None:
        view.review.verdict = VerdictView(verdict=asked.verdict, by=asked.by, note=note, at=at)
        said = [_said("decision.rejected", view.id, asked.by, note, asked.etag, token)]
    own = receipt(
        f"decision.{status}",
        decision_id=view.id,
        packet_digest=view.packet_digest,
        outcome_digest=kept.decided.digest or None,
        code=outcome.code,
        reviewed_by=by,
        fencing_token=token,
        trace_id=view.trace_id,
    )
    await reviews.end(
        connection,
        tenant,
        row,
        status=status,
        view=encode_view(view),
        reviewed=None if asked is None else msgspec.json.encode(asked),
        receipts=[*said, own],
    )
    waited = row.now - datetime.fromisoformat(view.review.since)
    return Ended(row.type, status, "rejected" if asked else status, waited.total_seconds())


def _said(kind: str, decision: str, by: str, note: str, etag: str, token: int) -> Receipt:
    """The receipt of a reviewer's word."""
    return receipt(kind, decision_id=decision, reviewed_by=by, note=note, etag=etag, fencing_token=token)


def count_end(ended: Ended) -> None:
    telemetry.REVIEWS.labels(ended.type, ended.verdict).inc()
    if ended.status != "in_review":
        telemetry.DECISIONS.labels(ended.type, ended.status).inc()
    if ended.verdict in ("approved", "rejected"):
        telemetry.REVIEW_AGE_SECONDS.labels(ended.type).observe(ended.waited_s)


def count(run: Run, status: str) -> None:
    """A decision came to rest: by its path, or by an approval, which may leave it in review."""
    if run.review is None:
        telemetry.DECISIONS.labels(run.type.name, status).inc()
        return
    waited = (datetime.now(UTC) - run.review.since).total_seconds()
    count_end(
        Ended(
            run.type.name, status, "approved" if status in APPROVED else _not_carried_out(run.review), waited
        )
    )


def present(view: ReviewView, token: int, now: datetime) -> ReviewView:
    """A stored review as it is at ``now``."""
    older_ms = max(0, (now - datetime.fromisoformat(view.as_of)) // MILLISECOND)
    ages = {name: age + older_ms for name, age in view.evidence_age_ms.items()}
    return msgspec.structs.replace(view, etag=str(token), as_of=timestamp(now), evidence_age_ms=ages)


def rest_kind(run: Run, status: str) -> str:
    """The kind of the receipt of a rest: an approval that was not carried out leaves the decision in the state it had."""
    if run.review is not None and status == "in_review":
        return f"decision.review-{_not_carried_out(run.review)}"
    return f"decision.{status}"


def _not_carried_out(under: UnderReview) -> str:
    """Why an approval was not."""
    return "unconfirmed" if under.unconfirmed else "moved"


def approvals(run: Run, status: str) -> list[Receipt]:
    """The receipt of the reviewer's word, if the rest is the approval carried out."""
    under = run.review
    if under is None or status not in APPROVED:
        return []
    return [_said("decision.approved", str(run.id), str(under.reviewer), under.note, under.etag, run.token)]


def _expires_at(run: Run, now: datetime) -> datetime:
    return run.review.expires_at if run.review else now + run.type.review_within


def _ages(packet: Packet | None, readings: Mapping[str, Reading]) -> dict[str, int]:
    wall = datetime.now(UTC)
    return {
        item.name: readings[item.name].age_ms()
        if item.name in readings
        else max(0, (wall - datetime.fromisoformat(item.observed_at)) // MILLISECOND)
        for item in (packet.items if packet else ())
    }


def _proposal_view(proposal: Decided) -> ProposalView:
    return ProposalView(
        terms=proposal.outcome.terms,
        changes=[
            ProposedChange(
                kind=change.kind, id=change.id, version=change.base + 1, data=msgspec.Raw(change.data)
            )
            for change in proposal.changes
        ],
        effects=[_effect_view(op) for op in proposal.operations],
        on_failure=proposal.operations[0].on_failure if proposal.operations else "keep",
    )


def _effect_view(op: NewOperation) -> ProposedEffect:
    undo = None if op.compensation is None else msgspec.json.decode(op.compensation, type=NewOperation)
    return ProposedEffect(
        effect=op.effect,
        key=op.key,
        payload=msgspec.Raw(op.payload),
        payload_hash=op.payload_hash,
        after=list(op.after),
        compensation=None if undo is None else _effect_view(undo),
    )
