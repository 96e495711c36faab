"""What these tests serve: decisions whose evidence is research by remote workers."""

from __future__ import annotations

import msgspec

from adapters.worker import WorkerSource
from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Record, decision_type


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    secret: str = "not for workers"
    worker: str = "w1"


class Findings(msgspec.Struct, frozen=True):
    summary: str


findings = Evidence(
    "findings",
    WorkerSource("research", returns=Findings, sends=["topic"]),
    deadline_ms=60_000,
    attempts=1,
)


def conclude(question: Question, packet: Packet, record: Record[Findings]) -> Outcome:
    return Commit({"topic": question.topic, "summary": packet[findings].summary})


question = decision_type(
    "question",
    request=Question,
    policy=conclude,
    policy_version="1",
    evidence=[findings],
    time_limit_ms=120_000,
)
coordinator = Coordinator([question])
