"""Receipts: what is written down for each state change, in the transaction of the change itself.

A receipt is canonical JSON (RFC 8785) of the change: its kind, what it belongs to, and the facts that an auditor needs to check
it. Its place in the tenant's log (`index`, contiguous from 0) and its time (`at`, the database's clock) are given by the
transaction that appends it.
"""

from __future__ import annotations

import msgspec

from coordinator.core.canonical import canonical


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """``kind`` is ``<thing>.<new state>``, such as ``decision.committed`` or ``operation.succeeded``."""

    kind: str
    decision_id: str | None
    operation_id: str | None
    body: bytes


def receipt(
    kind: str, *, decision_id: str | None, operation_id: str | None = None, **facts: object
) -> Receipt:
    """``facts`` with the value None are left out."""
    body = {name: value for name, value in facts.items() if value is not None}
    return Receipt(kind=kind, decision_id=decision_id, operation_id=operation_id, body=canonical(body))
