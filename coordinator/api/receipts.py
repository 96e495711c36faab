"""`/v1/receipts`: the append-only record of every state change, in the order of the log."""

from __future__ import annotations

import re

from coordinator.api import paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import Call, Parameter, Shown, endpoint, nothing_here
from coordinator.api.parameters import PAGE
from coordinator.api.views import ReceiptShown, receipt_shown
from coordinator.errors import MalformedRequest, NotFound
from coordinator.store import reading

AUDITORS = frozenset({"audit"})
_INDEX = re.compile(r"(0|[1-9][0-9]{0,15})\Z")
_UUID = {"type": "string", "format": "uuid"}
_TIME = {"type": "string", "format": "date-time"}


@endpoint(
    "GET",
    "/v1/receipts",
    "List receipts",
    scopes=AUDITORS,
    parameters=[
        Parameter("decision", "query", "Only those of this decision.", _UUID),
        Parameter("operation", "query", "Only those of this operation.", _UUID),
        Parameter("kind", "query", "Only those of this kind.", example="operation.succeeded"),
        Parameter("since", "query", "Only those at or after this time.", _TIME),
        Parameter("until", "query", "Only those before this time.", _TIME),
        *PAGE,
    ],
    answers={200: Shown("A page of receipts, in the order of the log.", ReceiptShown, page=True)},
    problems=[MalformedRequest],
)
async def index(call: Call) -> Answer:
    """In the order of the log, the first first."""
    query, limit = call.query, paging.limit_of(call.query)
    after = paging.index_after(query, "receipts")
    since, until = paging.time_of(query, "since"), paging.time_of(query, "until")
    decision, operation = paging.uuid_of(query, "decision"), paging.uuid_of(query, "operation")
    async with call.service.database.transaction(call.tenant) as connection:
        rows = await reading.receipts(
            connection,
            call.tenant,
            decision_id=decision,
            operation_id=operation,
            kind=query.get("kind"),
            since=since,
            until=until,
            after=-1 if after is None else after,
            limit=limit + 1,
        )
    following = paging.cursor("receipts", rows[limit - 1].index) if len(rows) > limit else None
    return Answer(200, paging.page(map(receipt_shown, rows[:limit]), following))


@endpoint(
    "GET",
    "/v1/receipts/{index}",
    "Show a receipt",
    scopes=AUDITORS,
    parameters=[
        Parameter(
            "index",
            "path",
            "Its place in the log.",
            {"type": "integer", "minimum": 0},
            required=True,
            example=0,
        )
    ],
    answers={200: Shown("The receipt.", ReceiptShown)},
    problems=[NotFound],
)
async def show(call: Call) -> Answer:
    """One receipt, by its index."""
    text = call.segment(3)
    if not _INDEX.match(text):
        raise nothing_here()
    index = int(text)
    async with call.service.database.transaction(call.tenant) as connection:
        rows = await reading.receipts(connection, call.tenant, after=index - 1, limit=1)
    if not rows or rows[0].index != index:
        raise nothing_here()
    return Answer(200, receipt_shown(rows[0]))


ENDPOINTS = (index, show)
