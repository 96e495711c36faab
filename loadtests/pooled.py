"""Decision types whose providers have limits, served for `loadtests.pools`: one limits calls at once, the other calls per minute.

`crowded` reads a capacity, `hurried` a cost; a reading that does not get its turn in time is left out.
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from adapters.http import HttpSource
from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Pool, Record, decision_type
from loadtests.serve import PROVIDERS

CONCURRENCY: Final = 20
PER_MINUTE: Final = 600
DEADLINE_MS: Final = 3_000
PROVIDERS_URL = os.environ.get(PROVIDERS, "http://127.0.0.1:9")


class Ask(msgspec.Struct, frozen=True):
    subject: str


class Capacity(msgspec.Struct, frozen=True):
    available_hours: int


class Cost(msgspec.Struct, frozen=True):
    estimate_minor: int


def agree(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    return Commit({})


crowded = decision_type(
    "crowded",
    request=Ask,
    policy=agree,
    policy_version="1",
    evidence=[
        Evidence(
            "capacity",
            HttpSource(
                "capacity",
                f"{PROVIDERS_URL}/capacity/{{input.subject}}",
                returns=Capacity,
                provider="planner",
            ),
            deadline_ms=DEADLINE_MS,
            required=False,
        )
    ],
)
hurried = decision_type(
    "hurried",
    request=Ask,
    policy=agree,
    policy_version="1",
    evidence=[
        Evidence(
            "cost",
            HttpSource(
                "cost", f"{PROVIDERS_URL}/costs/{{input.subject}}", returns=Cost, provider="estimator"
            ),
            deadline_ms=DEADLINE_MS,
            required=False,
        )
    ],
)
coordinator = Coordinator(
    [crowded, hurried],
    pools=[Pool("planner", concurrency=CONCURRENCY), Pool("estimator", requests_per_min=PER_MINUTE)],
)
