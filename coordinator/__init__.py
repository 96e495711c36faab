"""The decision coordinator: many read, one decides, the commit is fenced, each effect happens once or is openly uncertain.

This is what a module that declares decisions imports.
"""

from coordinator.core.child import Concluded
from coordinator.core.decision import Coordinator, DecisionType, decision_type
from coordinator.core.each import Each, One
from coordinator.core.effect import Keyed, Lookup, Unguarded, keyed
from coordinator.core.evidence import (
    Absent,
    Decisive,
    Evidence,
    Failed,
    Found,
    MaxAge,
    Part,
    ReadRequest,
    Skip,
    Snapshot,
    Unchanged,
)
from coordinator.core.money import Money, money
from coordinator.core.outcome import Commit, Decline, Effect, NeedMore, Outcome, Review
from coordinator.core.packet import Missing, Packet, Present
from coordinator.core.pool import Pool
from coordinator.core.record import Change, Record, RecordKind

__all__ = [
    "Absent",
    "Change",
    "Commit",
    "Concluded",
    "Coordinator",
    "DecisionType",
    "Decisive",
    "Decline",
    "Each",
    "Effect",
    "Evidence",
    "Failed",
    "Found",
    "Keyed",
    "Lookup",
    "MaxAge",
    "Missing",
    "Money",
    "NeedMore",
    "One",
    "Outcome",
    "Packet",
    "Part",
    "Pool",
    "Present",
    "ReadRequest",
    "Record",
    "RecordKind",
    "Review",
    "Skip",
    "Snapshot",
    "Unchanged",
    "Unguarded",
    "decision_type",
    "keyed",
    "money",
]
