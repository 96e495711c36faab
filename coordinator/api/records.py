"""`/v1/records`: the business objects that decisions change, their history, and the explicit PUT."""

from __future__ import annotations

import msgspec

from coordinator.api import examples, paging
from coordinator.api.answer import Answer
from coordinator.api.endpoint import READERS, Call, Parameter, Sent, Shown, endpoint, nothing_here
from coordinator.api.headers import expected_version
from coordinator.api.parameters import KIND, PAGE, RECORD_ID
from coordinator.api.views import RecordShown, VersionShown, encode, version_shown
from coordinator.errors import (
    MalformedRequest,
    NotFound,
    PreconditionFailed,
    PreconditionRequired,
    TransitionRefused,
)
from coordinator.store import records

WRITERS = frozenset({"decide", "admin"})
ETAG = {"ETag": 'The version, such as `"8"`.'}


@endpoint(
    "GET",
    "/v1/records/{kind}/{id}",
    "Show a record",
    scopes=READERS,
    parameters=[KIND, RECORD_ID],
    answers={200: Shown("The record at its present version.", RecordShown, headers=ETAG)},
    problems=[NotFound],
)
async def show(call: Call) -> Answer:
    """The record as it is now. One that does not exist yet is at version 0, and is not found."""
    key = _key(call)
    async with call.service.database.transaction(call.tenant) as connection:
        found = (await records.read_records(connection, call.tenant, [key])).get(key)
    if found is None or found.data is None:
        raise nothing_here()
    return _shown(200, key, found.version, found.data)


@endpoint(
    "GET",
    "/v1/records/{kind}/{id}/history",
    "List a record's versions",
    scopes=READERS,
    parameters=[KIND, RECORD_ID, *PAGE],
    answers={200: Shown("A page of versions, the newest first.", VersionShown, page=True)},
    problems=[NotFound, MalformedRequest],
)
async def history(call: Call) -> Answer:
    """Every version that was committed, and the decision or the key that made it."""
    key, limit = _key(call), paging.limit_of(call.query)
    below = paging.index_after(call.query, "history")
    async with call.service.database.transaction(call.tenant) as connection:
        rows = await records.history(connection, call.tenant, key, below=below, limit=limit + 1)
    if not rows and below is None:
        raise nothing_here()
    following = paging.cursor("history", rows[limit - 1].version) if len(rows) > limit else None
    return Answer(200, paging.page(map(version_shown, rows[:limit]), following))


@endpoint(
    "PUT",
    "/v1/records/{kind}/{id}",
    "Replace a record",
    scopes=WRITERS,
    parameters=[
        KIND,
        RECORD_ID,
        Parameter("If-Match", "header", 'The version to replace, such as `"8"`.', example='"8"'),
        Parameter("If-None-Match", "header", "`*`: only if the record does not exist yet.", example="*"),
    ],
    body=Sent(None, examples.RECORD),
    answers={
        200: Shown("Replaced.", RecordShown, headers=ETAG),
        201: Shown("Created.", RecordShown, headers=ETAG),
    },
    problems=[
        MalformedRequest,
        NotFound,
        PreconditionFailed,
        PreconditionRequired,
        TransitionRefused,
    ],
)
async def put(call: Call) -> Answer:
    """The body is the record's data, whole. One of If-Match and If-None-Match is required."""
    key = _key(call)
    expected = expected_version(call.scope)
    data = await call.body()
    if not isinstance(data, dict):
        raise MalformedRequest("A record's data is a JSON object.")
    version = await call.service.put_record(call.caller, *key, expected, data)
    return _shown(201 if expected == 0 else 200, key, version, msgspec.json.encode(data))


def _key(call: Call) -> tuple[str, str]:
    kind, id = call.segment(3), call.segment(4)
    if not 1 <= len(kind) <= 255 or not 1 <= len(id) <= 255:
        raise nothing_here()
    return kind, id


def _shown(status: int, key: tuple[str, str], version: int, data: bytes) -> Answer:
    body = encode(RecordShown(kind=key[0], id=key[1], version=version, data=msgspec.Raw(data)))
    return Answer(status, body, [(b"etag", b'"%d"' % version)])


ENDPOINTS = (show, history, put)
