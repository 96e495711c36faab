"""`/v1/reviews` and the verdicts: what waits for a person, and what a person says of it.

A verdict names the ETag that its reviewer looked at. Repeating the very same request is safe: by the same key, with the same verdict
and the same If-Match it has the same result, also if the answer to the first was lost.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import msgspec

from coordinator.api import examples, paging
from coordinator.api.answer import Answer
from coordinator.api.body import typed
from coordinator.api.decisions import as_it_is_now
from coordinator.api.endpoint import Call, Parameter, Sent, Shown, endpoint
from coordinator.api.headers import entity_tag
from coordinator.api.parameters import ID, PAGE
from coordinator.api.views import encode
from coordinator.core.canonical import JsonValue
from coordinator.core.review import Verdict
from coordinator.core.view import DecisionView, RecordView
from coordinator.engine.reviewing import MILLISECOND, present
from coordinator.errors import (
    DecisionInFlight,
    Draining,
    MalformedRequest,
    NotFound,
    Overloaded,
    OwnRequest,
    PreconditionRequired,
    ReviewUnconfirmed,
    StaleReview,
    StateConflict,
)
from coordinator.store.reviews import Place, ReviewRow

REVIEWERS = frozenset({"review"})
_PLACE = re.compile(r"(\d{1,9})\.(\d{1,18})\.([0-9a-f-]{36})")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = MILLISECOND / 1000


class VerdictGiven(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``note`` is shown with the decision, and goes into the receipt."""

    verdict: Verdict
    note: Annotated[str, msgspec.Meta(max_length=500)] = ""


class ReviewItem(msgspec.Struct, kw_only=True):
    """``id`` is the decision's. ``terms`` are what an approval would promise; null where nothing is proposed (``approvable`` is
    false, and the review can only be rejected). ``etag`` goes into If-Match."""

    id: str
    type: str
    class_: str = msgspec.field(name="class")
    record: RecordView | None
    reason: str
    code: str | None
    approvable: bool
    terms: JsonValue
    requested_by: str
    since: str
    age_ms: int
    expires_at: str
    expires_in_ms: int
    etag: str


@endpoint(
    "GET",
    "/v1/reviews",
    "List what waits for a person",
    scopes=REVIEWERS,
    parameters=PAGE,
    answers={200: Shown("A page of reviews, the most urgent first.", ReviewItem, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """By urgency: in the order of the configured classes, and inside a class the one first that expires first. A review keeps its
    place for as long as it is open, so pages stay the same whatever is added meanwhile."""
    items, following = await call.service.reviews.by_urgency(
        call.tenant, after=_place_after(call.query), limit=paging.limit_of(call.query)
    )
    cursor = None if following is None else paging.cursor("reviews", _place_text(following))
    return Answer(200, paging.page((_item(row, view) for row, view in items), cursor))


def _item(row: ReviewRow, view: DecisionView) -> bytes:
    assert view.review is not msgspec.UNSET
    review = present(view.review, row.fencing_token, row.now)
    expires = datetime.fromisoformat(review.expires_at)
    return encode(
        ReviewItem(
            id=view.id,
            type=row.type,
            class_=row.class_,
            record=view.record,
            reason=review.reason,
            code=review.code,
            approvable=review.proposal is not None,
            terms=review.proposal.terms if review.proposal else None,
            requested_by=review.requested_by,
            since=review.since,
            age_ms=(row.now - datetime.fromisoformat(review.since)) // MILLISECOND,
            expires_at=review.expires_at,
            expires_in_ms=max(0, (expires - row.now) // MILLISECOND),
            etag=review.etag or "",
        )
    )


def _place_text(place: Place) -> str:
    return f"{place.rank}.{(place.expires_at - _EPOCH) // MICROSECOND}.{place.id}"


def _place_after(query: paging.Query) -> Place | None:
    text = paging.position_of(query, "reviews")
    if text is None:
        return None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise paging.altered()
    return Place(int(found[1]), _EPOCH + int(found[2]) * MICROSECOND, UUID(found[3]))


@endpoint(
    "POST",
    "/v1/decisions/{id}/review",
    "Approve or reject what is in review",
    scopes=REVIEWERS,
    parameters=[
        ID,
        Parameter(
            "If-Match",
            "header",
            "The ETag that the decision was shown with.",
            {"type": "string"},
            required=True,
            example='"1"',
        ),
    ],
    body=Sent(VerdictGiven, examples.VERDICT),
    answers={200: Shown("The verdict was carried out; the decision as it is now.", DecisionView)},
    problems=[
        MalformedRequest,
        OwnRequest,
        NotFound,
        StateConflict,
        DecisionInFlight,
        StaleReview,
        ReviewUnconfirmed,
        PreconditionRequired,
        Draining,
        Overloaded,
    ],
)
async def review(call: Call) -> Answer:
    """An approval reads the decisive evidence again, and whatever is too old by now; if all of it is still what was shown, what was
    proposed is committed. If not, nothing is: the policy has concluded anew, and there is another packet, under another ETag, to
    look at (`stale-review`). If something could not be read just now, nobody knows (`review-unconfirmed`): the review is as it was, and
    the same request may be repeated. A rejection ends the decision as `declined`. The key that asked for the decision can do neither."""
    etag = entity_tag(call.scope)
    id, given = call.id(), typed(await call.body(), VerdictGiven)
    await call.service.reviews.review(call.caller, id, given.verdict, etag, given.note)
    return await as_it_is_now(call, id)


ENDPOINTS = (index, review)
