"""Parameters that several endpoints share."""

from __future__ import annotations

from coordinator.api.endpoint import Parameter
from coordinator.api.paging import DEFAULT_LIMIT, MAX_LIMIT

ID = Parameter("id", "path", "A UUIDv7.", {"type": "string", "format": "uuid"}, required=True)
KIND = Parameter("kind", "path", "The kind of record.", required=True, example="proposal")
RECORD_ID = Parameter(
    "id", "path", "The record's id; a slash in it is sent as %2F.", required=True, example="p-1"
)
PAGE = (
    Parameter(
        "limit",
        "query",
        "How many items a page has at most.",
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    ),
    Parameter("cursor", "query", "The next_cursor of the page before. Opaque."),
)
