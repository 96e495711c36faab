"""`/v1/locks`: the named locks that are held now."""

from __future__ import annotations

from urllib.parse import quote, unquote

import msgspec

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Shown, endpoint
from coordinator.api.parameters import PAGE
from coordinator.api.views import encode
from coordinator.core.view import timestamp
from coordinator.errors import MalformedRequest
from coordinator.store.locks import HeldLock, held_locks


class LockShown(msgspec.Struct, frozen=True, kw_only=True):
    """``decision``, of type ``decision_type``, has the lock ``since`` then, under a fencing token that rises whenever the lock changes
    hands. If nobody ends that decision, the lock is anybody's after ``expires``."""

    name: str
    decision: str
    decision_type: str
    fencing_token: int
    since: str
    expires: str


@endpoint(
    "GET",
    "/v1/locks",
    "List named locks that are held",
    scopes=READERS,
    parameters=PAGE,
    answers={200: Shown("Locks of unfinished decisions, by name.", LockShown, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """Those of the caller's tenant. What is not listed is free."""
    limit, after = paging.limit_of(call.query), paging.position_of(call.query, "locks")
    async with call.service.database.transaction(call.tenant) as connection:
        rows = await held_locks(connection, call.tenant, after=unquote(after or ""), limit=limit + 1)
    following = paging.cursor("locks", quote(rows[limit - 1].name)) if len(rows) > limit else None
    return Answer(200, paging.page((encode(_shown(row)) for row in rows[:limit]), following))


def _shown(row: HeldLock) -> LockShown:
    return LockShown(
        name=row.name,
        decision=str(row.decision_id),
        decision_type=row.type,
        fencing_token=row.fencing_token,
        since=timestamp(row.taken_at),
        expires=timestamp(row.expires_at),
    )


ENDPOINTS = (index,)
