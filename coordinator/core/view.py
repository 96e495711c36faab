"""A decision as the outside sees it. The same structs are shown over HTTP, stored with the decision, and read back by `show`."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.fence import Check
from coordinator.core.graph import Graph
from coordinator.core.money import Money


class RecordView(msgspec.Struct, kw_only=True):
    kind: str
    id: str
    base_version: int | None
    committed_version: int | None = None


class OutcomeView(msgspec.Struct, kw_only=True, omit_defaults=True):
    kind: str
    terms: JsonValue = None
    reason: str | None = None
    code: str | None = None


class FenceView(msgspec.Struct, kw_only=True):
    """``rounds`` is how often the policy ran. ``checks`` are those that did not hold in earlier rounds, then those of the last."""

    rounds: int
    checks: list[Check]


class OperationView(msgspec.Struct, kw_only=True):
    """``receipt`` is the index of the receipt of the operation's latest state; null while it is not known yet."""

    id: str
    effect: str
    state: str
    receipt: int | None = None


class BudgetView(msgspec.Struct, kw_only=True):
    """As of its rest: what the decision type reserves, what its readings say they cost, and what was reserved for readings that were
    begun and whose cost nobody had reported. All in the type's one currency; null where there is nothing. What its effects cost and
    what was billed later is in its reservations (``/v1/reservations?decision=ID``)."""

    reserved: Money | None = None
    settled: Money | None = None
    uncertain: Money | None = None


class Stage(msgspec.Struct, kw_only=True):
    """One stage of the path: when it began and how many ms it took."""

    at: str
    stage: str
    ms: int


class ProposedChange(msgspec.Struct, kw_only=True):
    """``version`` is the one that the approval would make."""

    kind: str
    id: str
    version: int
    data: msgspec.Raw


class ProposedEffect(msgspec.Struct, kw_only=True):
    """``payload`` is exactly what the sink would be given, under ``key``. ``after`` are the indices of the effects that have to
    succeed first; ``compensation`` is what would undo it."""

    effect: str
    key: str
    payload: msgspec.Raw
    payload_hash: str
    after: list[int]
    compensation: ProposedEffect | None = None


class ProposalView(msgspec.Struct, kw_only=True):
    """What an approval would commit."""

    terms: JsonValue
    changes: list[ProposedChange]
    effects: list[ProposedEffect]
    on_failure: str


class VerdictView(msgspec.Struct, kw_only=True):
    """``by`` is the reviewer's key."""

    verdict: str
    by: str
    note: str
    at: str


class ReviewView(msgspec.Struct, kw_only=True):
    """What a reviewer needs beside the decision itself. ``etag`` goes into If-Match; null once the review is over. The ages are as
    of ``as_of``, by the database's clock. ``moved`` is what did not hold at the latest approval; ``unconfirmed`` is what that could
    not confirm: then nobody knows, and the review is as it was. ``concluded`` is what the policy itself said of the packet that is
    shown; null if it had no say."""

    reason: str
    code: str | None
    etag: str | None
    requested_by: str
    since: str
    expires_at: str
    as_of: str
    evidence_age_ms: dict[str, int]
    proposal: ProposalView | None
    moved: list[Check]
    unconfirmed: list[Check] = []
    concluded: OutcomeView | None
    verdict: VerdictView | None = None


class DecisionView(msgspec.Struct, kw_only=True):
    """``evidence`` is the packet's canonical bytes, verbatim. ``review`` is there if the decision is or was in review,
    ``graph`` if anything was read."""

    id: str
    type: str
    policy_version: str
    status: str
    class_: str = msgspec.field(name="class")
    input: JsonValue
    record: RecordView | None
    outcome: OutcomeView | None
    packet_digest: str | None
    evidence: msgspec.Raw
    fence: FenceView
    operations: list[OperationView]
    budget: BudgetView
    timeline: list[Stage]
    trace_id: str
    created_at: str
    finished_at: str | None
    review: ReviewView | msgspec.UnsetType = msgspec.UNSET
    graph: Graph | msgspec.UnsetType = msgspec.UNSET


encode_view = msgspec.json.Encoder().encode
decode_view = msgspec.json.Decoder(DecisionView).decode


def timestamp(at: datetime) -> str:
    """RFC 3339 in UTC, to the microsecond."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
