"""`/v1/sessions`: cancel together what one caller asked for under one `Coordinator-Session`."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from coordinator.api.answer import Answer
from coordinator.api.decisions import DECIDERS, Cancelled
from coordinator.api.endpoint import Call, Parameter, Shown, endpoint, raw_path
from coordinator.api.headers import session_name
from coordinator.engine.sessions import cancel_session
from coordinator.errors import MalformedRequest

SESSION = Parameter(
    "session",
    "path",
    "What the requests had as `Coordinator-Session`; percent-encoded.",
    required=True,
    example="agent-run-17",
)


class SessionCancelled(msgspec.Struct, kw_only=True):
    """``decisions`` are those that had not come to rest."""

    session: str
    decisions: list[msgspec.Raw]


class SessionCancelledShown(msgspec.Struct, kw_only=True):
    session: str
    decisions: list[Cancelled]


@endpoint(
    "POST",
    "/v1/sessions/{session}/cancel",
    "Cancel a session",
    scopes=DECIDERS,
    parameters=[SESSION],
    answers={
        200: Shown(
            "Of each unfinished decision: whether it was stopped, and what had happened.",
            SessionCancelledShown,
        )
    },
    problems=[MalformedRequest],
)
async def cancel(call: Call) -> Answer:
    """Cancels every decision of the session that has not come to rest, with all that it does: readings, connections, tasks of workers.
    A session that nobody ever named has none. What comes later under the same name is not stopped."""
    session = session_name(unquote(raw_path(call.scope).split("/")[3]))
    said = await cancel_session(call.service, call.caller, session)
    body = SessionCancelled(session=session, decisions=[msgspec.Raw(each) for each in said])
    return Answer(200, msgspec.json.encode(body))


ENDPOINTS = (cancel,)
