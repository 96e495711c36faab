"""The example bodies that the OpenAPI document shows. Each works against the demo as it stands."""

from __future__ import annotations

from typing import Any

DECISION: dict[str, Any] = {
    "type": "proposal-quote",
    "input": {"customer": "c-7", "site": "sg-1", "hours": 16, "currency": "SGD"},
    "record": {"kind": "proposal", "id": "p-1"},
}
"""The body of ``POST /v1/decisions``."""

RESOLUTION: dict[str, Any] = {
    "verdict": "happened",
    "reference": "crm-4711",
    "note": "seen in the provider's own records",
}
"""The body of ``POST /v1/operations/{id}/resolve``."""

NOTE: dict[str, Any] = {"note": "the provider has mended it"}
"""The body of what a person does to an operation without more to say."""

VERDICT: dict[str, Any] = {"verdict": "approve", "note": "agreed with the customer"}
"""The body of ``POST /v1/decisions/{id}/review``."""

BUDGET: dict[str, Any] = {
    "ceiling": {"amount_minor": 40000, "currency": "SGD"},
    "period": "day",
    "timezone": "Asia/Singapore",
}
"""The body of ``PUT /v1/budgets/tenant-day``."""

REAL_COST: dict[str, Any] = {
    "cost": {"amount_minor": 25, "currency": "SGD"},
    "note": "seen on the provider's bill",
}
"""The body of ``POST /v1/reservations/{id}/resolve``."""

LATE_BILL: dict[str, Any] = {
    "bill": "2026-11/4711",
    "cost": {"amount_minor": 25, "currency": "SGD"},
    "note": "came with the month's invoice",
}
"""The body of ``POST /v1/reservations/{id}/bills``."""

NOTHING: dict[str, Any] = {}

NOTICE: dict[str, Any] = {
    "key": "01a22969-a728-7669-8b99-5ac5ff272df1.send-quote.0",
    "happened": True,
    "reference": "crm-4711",
}
"""The body of ``POST /v1/notices/{tenant}/send-quote``, which its sender signs."""

RECORD: dict[str, Any] = {"state": "draft"}
"""The body of ``PUT /v1/records/proposal/p-1``."""

WORKER: dict[str, Any] = {"name": "worker-1", "capabilities": ["research"], "max_tasks": 3}
"""The body of ``POST /v1/workers``."""

DRAIN: dict[str, Any] = {"limit_ms": 30_000}
"""The body of ``POST /v1/workers/{id}/drain``, which may also be empty."""

HEARTBEAT: dict[str, Any] = {"fencing_token": 1, "progress": ["reading page 3 of 7"]}
"""The body of ``POST /v1/tasks/{id}/heartbeat``."""

COMPLETE: dict[str, Any] = {
    "fencing_token": 1,
    "result": {"summary": "two suppliers fit"},
    "cost": {"amount_minor": 12, "currency": "SGD"},
}
"""The body of ``POST /v1/tasks/{id}/complete``."""

FAIL: dict[str, Any] = {
    "fencing_token": 1,
    "code": "site-unreachable",
    "message": "the supplier's site did not answer",
    "retryable": True,
}
"""The body of ``POST /v1/tasks/{id}/fail``."""
