"""The example bodies that the OpenAPI document shows. Each works against the demo as it stands."""

from __future__ import annotations

from typing import Any

DECISION: dict[str, Any] = {
    "type": "proposal-quote",
    "input": {"customer": "c-7", "site": "sg-1", "hours": 16, "currency": "SGD"},
    "record": {"kind": "proposal", "id": "p-1"},
}
"""The body of ``POST /v1/decisions``."""

RECORD: dict[str, Any] = {"state": "draft"}
"""The body of ``PUT /v1/records/proposal/p-1``."""
