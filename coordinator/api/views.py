"""What the api shows besides decisions: records, operations, receipts, and the envelopes around them.

Stored JSON (a record's data, an operation's payload, a receipt's body) is passed on byte for byte.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from coordinator.core.view import timestamp
from coordinator.store.reading import OperationRow, ReceiptRow
from coordinator.store.records import Version


class RecordShown(msgspec.Struct, kw_only=True):
    kind: str
    id: str
    version: int
    data: msgspec.Raw


class VersionShown(msgspec.Struct, kw_only=True):
    """One committed version: made by a decision, or by a key with an explicit PUT."""

    version: int
    data: msgspec.Raw
    decision: str | None
    key: str | None
    at: str


class OperationShown(msgspec.Struct, kw_only=True):
    """``attempts`` counts the sends, ``lookups`` how often the provider was asked by key; ``receipt`` is the index of the receipt
    of the latest state; ``due_at`` is when something is planned next.

    ``ordinal`` numbers the operations of one decision: ``after`` are the ordinals of those that have to succeed before this one is
    sent, ``compensates`` is the ordinal of the one that this one undoes. ``in_doubt``: an attempt may have been acted upon."""

    id: str
    decision: str
    effect: str
    ordinal: int
    after: list[int]
    compensates: int | None
    has_compensation: bool
    state: str
    in_doubt: bool
    cancel_requested: bool
    reason: str | None
    key: str
    guarantee: msgspec.Raw
    payload: msgspec.Raw
    payload_hash: str
    reference: str | None
    attempts: int
    lookups: int
    fencing_token: int
    receipt: int | None
    created_at: str
    last_sent_at: str | None
    due_at: str | None
    settled_at: str | None


class ReceiptShown(msgspec.Struct, kw_only=True):
    """``index`` is the receipt's place in the tenant's log, contiguous from 0."""

    index: int
    at: str
    kind: str
    decision: str | None
    operation: str | None
    body: msgspec.Raw


encode = msgspec.json.Encoder().encode
OPEN = frozenset({"ready", "dispatching", "uncertain"})
"""States in which it is not known yet, or not for good, whether the provider acts: only then can there be doubt."""


def _text(id: UUID | None) -> str | None:
    return None if id is None else str(id)


def _time(at: datetime | None) -> str | None:
    return None if at is None else timestamp(at)


def version_shown(row: Version) -> bytes:
    return encode(
        VersionShown(
            version=row.version,
            data=msgspec.Raw(row.data),
            decision=_text(row.decision_id),
            key=_text(row.key_id),
            at=timestamp(row.at),
        )
    )


def operation_shown(row: OperationRow) -> bytes:
    return encode(
        OperationShown(
            id=str(row.id),
            decision=str(row.decision_id),
            effect=row.effect,
            ordinal=row.ordinal,
            after=row.after,
            compensates=row.compensates,
            has_compensation=row.has_compensation,
            state=row.state,
            in_doubt=row.in_doubt and row.state in OPEN,
            cancel_requested=row.cancel_requested,
            reason=row.reason,
            key=row.key,
            guarantee=msgspec.Raw(row.guarantee),
            payload=msgspec.Raw(row.payload),
            payload_hash=row.payload_hash,
            reference=row.reference,
            attempts=row.sends,
            lookups=row.lookups,
            fencing_token=row.fencing_token,
            receipt=row.receipt,
            created_at=timestamp(row.created_at),
            last_sent_at=_time(row.last_sent_at),
            due_at=_time(row.due_at),
            settled_at=_time(row.settled_at),
        )
    )


def receipt_shown(row: ReceiptRow) -> bytes:
    return encode(
        ReceiptShown(
            index=row.index,
            at=timestamp(row.at),
            kind=row.kind,
            decision=_text(row.decision_id),
            operation=_text(row.operation_id),
            body=msgspec.Raw(row.body),
        )
    )
