"""`/v1/decisions/{id}/events`: the events of a decision as server-sent events, for as long as it takes and the client listens.

What is sent is bounded by the connection: while the client does not read, nothing more is written; if that takes longer than
`stream_stall_ms`, or the client lags too far behind, the connection is broken off. A client that goes away frees its slot at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, cast
from uuid import UUID

import anyio
from litestar.types import Receive, Scope, Send

from coordinator import telemetry
from coordinator.api.answer import NOT_SNIFFED, NOT_STORED, Answer
from coordinator.api.endpoint import READERS, Call, Parameter, Shown, endpoint
from coordinator.api.headers import last_event_id
from coordinator.api.parameters import ID
from coordinator.api.problems import answer_to
from coordinator.core import sse
from coordinator.core.events import Event
from coordinator.engine.follow import Batches, FollowerCut, Streams
from coordinator.errors import MalformedRequest, NotFound, StreamsFull

HEADERS = [(b"content-type", b"text/event-stream"), NOT_STORED, NOT_SNIFFED, (b"x-accel-buffering", b"no")]
WRITE_AT_ONCE = 65_536


class Stalled(Exception):
    """The client does not read."""


class EventStream(Answer):
    """An ASGI application that follows a decision. It takes its slot when it begins and gives it back however it ends."""

    __slots__ = ("_after", "_id", "_streams", "_tenant")

    def __init__(self, streams: Streams, tenant: UUID, id: UUID, after: int) -> None:
        super().__init__(204, b"")
        self._streams, self._tenant, self._id, self._after = streams, tenant, id, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            with self._streams.slot():
                async with aclosing(self._streams.follow(self._tenant, self._id, self._after)) as batches:
                    first = await anext(batches, None)
                    if (
                        first is None
                    ):  # there is nothing after what it saw, and never will be: 204 ends an EventSource
                        await super().__call__(scope, receive, send)
                        return
                    begun = True
                    await self._while_there(receive, send, first, batches)
        except (Stalled, FollowerCut):
            await _break_off(scope, receive)
        except Exception as error:  # noqa: BLE001  # the process boundary towards the client; answer_to records it
            answer = answer_to(scope, error)
            await (_break_off(scope, receive) if begun else answer(scope, receive, send))

    async def _while_there(self, receive: Receive, send: Send, first: Sequence[Event], rest: Batches) -> None:
        gone: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_gone, receive, tasks.cancel_scope.cancel)
            try:
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
                await self._send_events(send, first)
                async for batch in rest:
                    await self._send_events(send, batch)
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            except Exception as error:  # noqa: BLE001  # taken out of the group as it is
                gone = error
            tasks.cancel_scope.cancel()
        if gone is not None:
            raise gone

    async def _send_events(self, send: Send, batch: Sequence[Event]) -> None:
        frames = [sse.written(event.kind, event.data, event.number) for event in batch] or [sse.HEARTBEAT]
        body = b""
        for frame in frames:
            if body and len(body) + len(frame) > WRITE_AT_ONCE:
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
                body = b""
            body += frame
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: Any) -> None:
        """Waits while the client does not read. Raises `Stalled`."""
        with anyio.move_on_after(self._streams.settings.stream_stall_ms / 1000) as patience:
            await send(message)
        if patience.cancelled_caught:
            telemetry.STREAMS_CUT.labels("stalled").inc()
            raise Stalled


async def _until_gone(receive: Receive, gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


async def _break_off(scope: Scope, receive: Receive) -> None:
    """Without waiting for what is still to be sent. A client sees that the stream is not whole, and comes back."""
    abort: Callable[[], None] | None = cast("Any", scope).get("extensions", {}).get("coordinator.abort")
    if abort is not None:
        abort()
        await _until_gone(receive, lambda: None)


@endpoint(
    "GET",
    "/v1/decisions/{id}/events",
    "Follow a decision",
    scopes=READERS,
    parameters=[
        ID,
        Parameter(
            "Last-Event-ID",
            "header",
            "The id of the last event that was seen: the stream goes on behind it, in whichever process.",
            {"type": "integer", "minimum": 0},
        ),
    ],
    answers={
        200: Shown("Server-sent events, until the decision rests.", media_type="text/event-stream"),
        204: Shown("There is nothing after the event that was named, and there will be nothing."),
    },
    problems=[NotFound, MalformedRequest, StreamsFull],
)
async def follow(call: Call) -> Answer:
    """Server-sent events, as they happen, with rising ids: `queued`, `running`, `stage`, `part` (of a reading that streams),
    `progress` (lines of a worker), `evidence` (an item, as the decision shows it), `outcome`, `fence`, `rest`, `operation` and, at
    the end, `decision` with all of it. The stream ends when the decision rests and its operations have ended or are parked, or a
    minute later. A comment is sent every 15 seconds in which there is nothing else. A stream that breaks off is resumed with
    `Last-Event-ID`; nothing is lost."""
    return EventStream(call.service.streams, call.tenant, call.id(), last_event_id(call.scope))


ENDPOINTS = (follow,)
