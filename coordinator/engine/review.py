"""Review: a person approves or rejects what is in review; nobody reviews what they asked for themselves.

    reject      one transaction: declined
    approve     one transaction claims it, under lease and a new fencing token; then `approve`, which ends the claim
    withdraw    whoever may cancel a decision may take it back from review
    expire      nobody came in time (`expire`)

What a caller is answered is always read back from the row, never remembered here: so a repeat, here or in another process, is
answered like the call whose answer was lost. An approval goes on if its caller goes away.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Literal
from uuid import UUID

import anyio
import msgspec

from coordinator.core.decision import Coordinator
from coordinator.core.evidence import clean_text
from coordinator.core.receipt import receipt
from coordinator.core.request import DecisionRequest
from coordinator.core.review import (
    Asked,
    Done,
    Go,
    NothingProposed,
    NotOpen,
    Stale,
    Standing,
    Verdict,
    Wait,
    judge,
)
from coordinator.core.view import DecisionView, OutcomeView, ReviewView, Stage, decode_view
from coordinator.engine.admit import check_request
from coordinator.engine.approve import Shown, approve, shown
from coordinator.engine.holdings import Holdings
from coordinator.engine.reviewing import MILLISECOND, Ended, count_end, decode_kept, end
from coordinator.engine.run import Run, UnderReview
from coordinator.errors import (
    CommitUnknown,
    DecisionInFlight,
    Draining,
    NotFound,
    Overloaded,
    OwnRequest,
    RequestRefused,
    ReviewUnconfirmed,
    StaleReview,
    StateConflict,
)
from coordinator.failpoints import failpoint
from coordinator.store import reviews
from coordinator.store.database import Connection
from coordinator.store.keys import Key
from coordinator.store.records import Locked, read_records
from coordinator.store.reviews import Place, ReviewRow

REMEMBERED = 100
"""Stages and failed checks of earlier approvals that a decision still shows."""
LOOK_S = 0.1
INSTEAD = "nothing is proposed that could be approved: reject it, and ask again under a new key once what was missing is there"


@dataclass(frozen=True, slots=True)
class Claimed:
    """An approval that this process has to carry out; its lease is good ``until`` then, on the monotonic clock."""

    run: Run
    was: Shown
    until: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one look at the review did. ``over``: the verdict was carried out, now or before."""

    over: bool = False
    rejected: Ended | None = None
    claimed: Claimed | None = None


Progress = Literal["asked", "waited", "begun"]
"""Of one verdict: nothing was done yet; somebody carried it out meanwhile; this call itself has begun to."""


class Reviews:
    """The reviews of one service, for the api."""

    def __init__(self, coordinator: Coordinator, holdings: Holdings) -> None:
        self._coordinator = coordinator
        self._holdings = holdings
        self._engine = holdings.engine
        self._claiming: dict[UUID, Asked] = {}
        """Whose claim is on its way to the database and back; then it is among the approvals."""

    async def review(self, caller: Key, id: UUID, verdict: Verdict, etag: str, note: str) -> None:
        """Carry out a verdict: afterwards the decision rests by it. Raises `NotFound`, `OwnRequest`, `StateConflict`, `StaleReview`,
        `ReviewUnconfirmed`, and `DecisionInFlight` if that takes longer than a caller waits."""
        asked = Asked(by=str(caller.id), verdict=verdict, etag=etag)
        until = time.monotonic() + self._engine.settings.default_wait_s
        so_far: Progress = "asked"
        while True:
            try:
                stepped = await self._step(caller, id, asked, clean_text(note), so_far)
                if stepped.over:
                    return
                so_far = "waited"
                if stepped.claimed is not None:
                    so_far = "begun"
                    self._carry(stepped.claimed)
            finally:
                if self._claiming.get(id) is asked:
                    del self._claiming[id]
            await self._look_again(id, until)

    async def withdraw(self, tenant: UUID, id: UUID) -> None:
        """Cancel a decision that is in review, unless somebody approves it just now."""
        reason = "cancelled on request while it was in review; nothing was changed, nothing was sent"
        outcome = OutcomeView(kind="cancelled", reason=reason, code="cancelled")

        async def withdrawn(connection: Connection) -> Ended | None:
            row = await reviews.lock(connection, tenant, id)
            if row is None or row.status != "in_review" or self._held(row):
                return None
            return await end(connection, tenant, row, "cancelled", outcome)

        if (ended := await self._engine.boundary.database.run(tenant, withdrawn)) is not None:
            count_end(ended)

    async def by_urgency(
        self, tenant: UUID, *, after: Place | None, limit: int
    ) -> tuple[list[tuple[ReviewRow, DecisionView]], Place | None]:
        """A page of open reviews, the most urgent first, and where the next one begins."""
        async with self._engine.boundary.database.transaction(tenant) as connection:
            classes = list(self._engine.settings.classes)
            found = await reviews.by_urgency(
                connection, tenant, classes=classes, after=after, limit=limit + 1
            )
        page = [(row, decode_view(row.view)) for _, row in found[:limit] if row.view is not None]
        return page, found[limit - 1][0] if len(found) > limit else None

    async def _step(self, caller: Key, id: UUID, asked: Asked, note: str, so_far: Progress) -> Stepped:
        async def look(connection: Connection) -> Stepped:
            stepped = await self._judged(connection, caller, id, asked, note, so_far)
            if stepped.rejected or stepped.claimed:
                await failpoint("review.before")
            return stepped

        try:
            stepped = await self._engine.boundary.database.run(caller.tenant, look)
            if stepped.rejected or stepped.claimed:
                await failpoint("review.after")
        except CommitUnknown as unknown:
            detail = "the database went away during the commit; repeat the same request"
            raise Overloaded(detail, retry_after_ms=1000) from unknown
        if stepped.rejected is not None:
            count_end(stepped.rejected)
        return stepped

    async def _judged(
        self,
        connection: Connection,
        caller: Key,
        id: UUID,
        asked: Asked,
        note: str,
        so_far: Progress,
    ) -> Stepped:
        began = time.monotonic()
        row = await reviews.lock(connection, caller.tenant, id)
        if row is None:
            raise NotFound("there is no such decision")
        if row.requested_by == caller.id:
            raise OwnRequest("the key that asked for a decision may not review it: somebody else has to look")
        view = None if row.view is None else decode_view(row.view)
        review = view.review if view and view.review is not msgspec.UNSET else None
        standing = self._standing(row, review)
        judged = judge(standing, asked)
        match judged:
            case Done():
                return Stepped(over=True)
            case Wait():
                return Stepped()
            case Stale(why):
                raise _stale(row, review, why)
            case NotOpen():
                raise StateConflict(
                    f"the decision is {row.status}, not in review", decision_status=row.status
                )
            case NothingProposed():
                raise StateConflict(INSTEAD, decision_status=row.status)
            case Go() if asked.verdict == "reject":
                reason = f"rejected in review: {note}" if note else "rejected in review"
                outcome = OutcomeView(kind="decline", reason=reason, code="rejected")
                ended = await end(connection, caller.tenant, row, "declined", outcome, asked=asked, note=note)
                return Stepped(over=True, rejected=ended)
            case Go() if (
                so_far != "asked"
                and standing.unconfirmed
                and standing.latest == asked
                and not standing.abandoned
            ):
                raise _unconfirmed(row, review)
            case Go() if so_far == "begun":
                raise Overloaded(
                    "the approval was not carried out; repeat the same request", retry_after_ms=1000
                )
            case Go():
                assert view is not None
                return Stepped(claimed=await self._claim(connection, caller, row, view, asked, note, began))

    def _standing(self, row: ReviewRow, review: ReviewView | None) -> Standing:
        held = self._held(row)
        return Standing(
            status=row.status,
            etag=str(row.fencing_token),
            was_in_review=review is not None,
            has_proposal=review is not None and review.proposal is not None,
            held=held,
            abandoned=row.lease_owner is not None and not held,
            unconfirmed=review is not None and bool(review.unconfirmed),
            over=row.review_expires_at is not None and row.review_expires_at <= row.now,
            latest=None if row.reviewed is None else msgspec.json.decode(row.reviewed, type=Asked),
        )

    def _held(self, row: ReviewRow) -> bool:
        """Whether somebody carries out an approval of it. A claim of ours whose COMMIT was unknown is carried out by nobody."""
        ours_and_lost = row.lease_owner == self._engine.owner and not (
            row.id in self._holdings.approvals or row.id in self._claiming
        )
        return row.held and not ours_and_lost

    async def _claim(
        self,
        connection: Connection,
        caller: Key,
        row: ReviewRow,
        view: DecisionView,
        asked: Asked,
        note: str,
        began: float,
    ) -> Claimed:
        if self._holdings.draining:
            raise Draining("this process is stopping; another one will approve it", retry_after_ms=1000)
        if len(self._holdings.approvals) + len(self._claiming) >= self._engine.settings.max_approving:
            raise Overloaded("too many approvals are being carried out", retry_after_ms=1000)
        self._claiming[row.id] = asked
        run = self._run(caller, row, view, asked, note, began)
        claimed = receipt(
            "decision.approving",
            decision_id=str(row.id),
            reviewed_by=asked.by,
            etag=asked.etag,
            fencing_token=run.token,
        )
        lease_ms = self._engine.settings.lease_ms
        await reviews.claim(
            connection,
            caller.tenant,
            row,
            owner=self._engine.owner,
            lease_ms=lease_ms,
            reviewed=msgspec.json.encode(asked),
            receipts=[claimed],
        )
        if run.record_key is not None:
            records = await read_records(connection, caller.tenant, {run.record_key})
            run.record = records.get(run.record_key, run.record)
        kept = decode_kept(row.review or b"")
        run.spent, run.silent_before = {**kept.spent}, frozenset(kept.silent)
        run.settled = {name: len(costs) for name, costs in kept.spent.items()}
        run.calls.update(run.settled)
        assert view.review is not msgspec.UNSET
        older_ms = max(0, (row.now - datetime.fromisoformat(view.review.as_of)) // MILLISECOND)
        was = shown(run, kept, view, older_ms, began)
        return Claimed(run, was, began + lease_ms / 1000)

    def _run(
        self, caller: Key, row: ReviewRow, view: DecisionView, asked: Asked, note: str, began: float
    ) -> Run:
        """The decision on its way again, from where it came into review."""
        request = msgspec.json.decode(row.request, type=DecisionRequest)
        try:
            declared, input = check_request(self._coordinator, request)
        except RequestRefused as refused:
            detail = (
                f"what was asked for is not decided here any more ({refused.code}): reject it, and ask again"
            )
            raise StateConflict(detail, decision_status=row.status) from None
        review = view.review
        assert review is not msgspec.UNSET
        assert row.review_expires_at is not None
        since = datetime.fromisoformat(review.since)
        waited = Stage(at=review.since, stage="review", ms=(row.now - since) // MILLISECOND)
        stages = [stage for stage in view.timeline if stage.stage != "review"]
        return Run(
            tenant=caller.tenant,
            id=row.id,
            token=row.fencing_token + 1,
            type=declared,
            request=request,
            input=input,
            traceparent=row.traceparent,
            created_at=row.created_at,
            ends_at=began + declared.time_limit_ms / 1000,
            record=Locked(0, None),
            requested_by=row.requested_by,
            rounds=view.fence.rounds,
            stages=[*stages[-REMEMBERED:], waited],
            moves=[check for check in view.fence.checks if not check.held][-REMEMBERED:],
            review=UnderReview(
                reviewer=caller.id,
                note=note,
                etag=asked.etag,
                reason=review.reason,
                since=since,
                expires_at=row.review_expires_at,
            ),
        )

    def _carry(self, claimed: Claimed) -> None:
        run, was = claimed.run, claimed.was
        self._holdings.carry(run, claimed.until, partial(approve, self._engine, run, was))

    async def _look_again(self, id: UUID, until: float) -> None:
        """Returns when it is time to look at the review again: whoever carries it out may have done so."""
        left = until - time.monotonic()
        if left <= 0:
            detail = "the approval is still being carried out: repeat the same request"
            raise DecisionInFlight(detail, decision=str(id), retry_after_ms=1000)
        if (carried := self._holdings.approvals.get(id)) is not None:
            with anyio.move_on_after(left):
                await carried.wait()
        else:
            await anyio.sleep(min(LOOK_S, left))


def _stale(row: ReviewRow, review: ReviewView | None, why: str) -> StaleReview:
    moved = sorted({check.evidence for check in review.moved}) if review else []
    etag = str(row.fencing_token) if row.status == "in_review" else None
    told = f"; moved: {', '.join(moved)}" if moved and etag else ""
    return StaleReview(
        f"the decision {why}{told}; nothing was changed by this verdict",
        etag=etag,
        decision_status=row.status,
        moved=moved or None,
        decision=str(row.id),
    )


def _unconfirmed(row: ReviewRow, review: ReviewView | None) -> ReviewUnconfirmed:
    names = sorted({check.evidence for check in review.unconfirmed}) if review else []
    return ReviewUnconfirmed(
        f"not confirmed just now: {', '.join(names)}; nothing was changed, and the review is as it was: repeat the same request "
        f'(for another verdict its ETag is "{row.fencing_token}" now)',
        etag=str(row.fencing_token),
        unconfirmed=names,
        decision=str(row.id),
        retry_after_ms=1000,
    )
