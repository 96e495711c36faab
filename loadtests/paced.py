"""A decision that takes as long as it is told: for measuring queues, where what counts is who has a slot and for how long.

`paced` waits ``ms`` for its one source. `holding` waits until the file at LOADTEST_GATE is there: it fills the slots while a queue is
made to grow behind them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec

from adapters.function import FunctionSource
from coordinator import Commit, Coordinator, Evidence, Packet, Record, decision_type
from coordinator.core.canonical import JsonValue
from coordinator.core.outcome import Outcome

GATE = "LOADTEST_GATE"


class Ask(msgspec.Struct, frozen=True):
    ms: int = 0


class Done(msgspec.Struct, frozen=True):
    ms: int


async def wait(ask: Ask, _: Mapping[str, JsonValue]) -> Done:
    await anyio.sleep(ask.ms / 1000)
    return Done(ask.ms)


async def hold(ask: Ask, _: Mapping[str, JsonValue]) -> Done:
    gate = Path(os.environ[GATE])
    while not gate.exists():  # noqa: ASYNC110 - another process makes it
        await anyio.sleep(0.02)
    return Done(0)


def done(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    return Commit({"ms": ask.ms})


def declared(name: str, source: FunctionSource[Ask, Done]) -> Any:
    return decision_type(
        name,
        request=Ask,
        policy=done,
        policy_version="1",
        evidence=[Evidence("wait", source, deadline_ms=600_000)],
        time_limit_ms=600_000,
    )


coordinator = Coordinator(
    [
        declared("paced", FunctionSource("pace", wait, returns=Done)),
        declared("holding", FunctionSource("gate", hold, returns=Done)),
    ]
)
