"""What these tests serve: decisions whose evidence is research by remote workers."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.worker import WorkerSource
from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Record, decision_type, money
from coordinator.core.decision import DecisionType


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    secret: str = "not for workers"
    worker: str = "w1"


class Findings(msgspec.Struct, frozen=True):
    summary: str


def conclude(question: Question, packet: Packet, record: Record[Any]) -> Outcome:
    return Commit({"topic": question.topic, "found": [item.value for item in packet.items]})


def asking(
    name: str, source: WorkerSource[Findings], deadline_ms: int = 60_000, **more: Any
) -> DecisionType[Question, Any]:
    return decision_type(
        name,
        request=Question,
        policy=conclude,
        policy_version="1",
        evidence=[Evidence("findings", source, deadline_ms=deadline_ms, **{"attempts": 1} | more)],
        time_limit_ms=120_000,
    )


research = WorkerSource("research", returns=Findings, sends=["topic"])
pinned = WorkerSource("research", returns=Findings, worker="{input.worker}")
preferred = WorkerSource("research", returns=Findings, worker="{input.worker}", may_fall_back=True)
coordinator = Coordinator(
    [
        asking("question", research),
        asking("short-question", research, deadline_ms=1_500),
        asking("repeated-question", research, attempts=2),
        asking("pinned-question", pinned),
        asking("preferred-question", preferred),
        asking("paid-question", research, reserves=money("0.40 SGD")),
        asking("short-paid-question", research, deadline_ms=1_500, reserves=money("0.40 SGD")),
        asking("forecast", WorkerSource("forecasting", returns=Findings)),
    ]
)
