"""What `loadtests.workers` serves: a decision whose one evidence is made by a remote worker."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.worker import WorkerSource
from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Record, decision_type


class Ask(msgspec.Struct, frozen=True):
    topic: int


class Findings(msgspec.Struct, frozen=True):
    topic: int


findings = Evidence("findings", WorkerSource("research", returns=Findings), deadline_ms=60_000)


def conclude(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    return Commit({"topic": packet[findings].topic})


coordinator = Coordinator(
    [
        decision_type(
            "research",
            request=Ask,
            policy=conclude,
            policy_version="1",
            evidence=[findings],
            time_limit_ms=120_000,
        )
    ]
)
"""Served by `loadtests.serve`."""
