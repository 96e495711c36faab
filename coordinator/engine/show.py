"""A stored decision as it stands now: what it came to rest as, with its operations' present states."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from coordinator import telemetry
from coordinator.core.decision import Coordinator
from coordinator.core.request import decode_request
from coordinator.core.view import (
    BudgetView,
    DecisionView,
    FenceView,
    OperationView,
    RecordView,
    decode_view,
    encode_view,
    timestamp,
)
from coordinator.engine.reviewing import present
from coordinator.store.reading import DecisionRow, OperationRow

log = logging.getLogger(__name__)


class PendingView(DecisionView, kw_only=True):
    """A decision that does not rest yet. ``queue_position`` is 0 once it runs."""

    estimated_start_ms: int
    queue_position: int


def shown(coordinator: Coordinator, row: DecisionRow, operations: Sequence[OperationRow]) -> bytes:
    """The decision as JSON."""
    stored = row.view or row.answer
    try:
        view = decode_view(stored) if stored is not None else unfinished(coordinator, row)
    except msgspec.ValidationError:
        log.exception(
            "decision %s is not shown with its operations: what is stored does not fit this version", row.id
        )
        return stored or b"{}"
    view.status = row.status
    if row.status == "in_review" and view.review is not msgspec.UNSET:
        view.review = present(view.review, row.fencing_token, row.now)
    view.operations = [
        OperationView(id=str(op.id), effect=op.effect, state=op.state, receipt=op.receipt)
        for op in operations
    ]
    return encode_view(view)


def unfinished(coordinator: Coordinator, row: DecisionRow) -> DecisionView:
    """What can be said of a decision that does not rest yet."""
    request = decode_request(row.request)
    record = None
    if request.record:
        version = request.record.expected_version
        record = RecordView(kind=request.record.kind, id=request.record.id, base_version=version)
    declared = coordinator.types.get(row.type)
    return DecisionView(
        id=str(row.id),
        type=row.type,
        policy_version=declared.policy_version if declared else "",
        status=row.status,
        class_=row.class_,
        input=request.input,
        record=record,
        outcome=None,
        packet_digest=None,
        evidence=msgspec.Raw(b"[]"),
        fence=FenceView(rounds=0, checks=[]),
        operations=[],
        budget=BudgetView(),
        timeline=[],
        trace_id=telemetry.trace_id(row.traceparent),
        created_at=timestamp(row.created_at),
        finished_at=None,
    )


def pending(view: DecisionView, *, estimated_start_ms: int, queue_position: int) -> bytes:
    fields = msgspec.structs.asdict(view)
    return encode_view(
        PendingView(**fields, estimated_start_ms=estimated_start_ms, queue_position=queue_position)
    )
