"""A decision type whose evidence streams, for these tests: ``parts`` parts of ``size`` bytes, once the file ``gate`` exists."""

from __future__ import annotations

from pathlib import Path

import msgspec

from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Record, decision_type
from coordinator.core.evidence import Found, ReadRequest
from tests.support import eventually


class Wanted(msgspec.Struct, frozen=True):
    parts: int = 3
    size: int = 10
    gate: str = ""
    then: str = ""


class Text(msgspec.Struct, frozen=True):
    parts: int


class Streaming:
    name = provider = "text"
    returns = Text

    async def read(self, request: ReadRequest) -> Found[Text]:
        wanted = msgspec.convert(request.input, Wanted, from_attributes=True)
        if wanted.gate:
            await eventually(Path(wanted.gate).exists, timeout=60)
        for n in range(wanted.parts):
            await request.emit({"n": n, "text": "x" * wanted.size})
        if wanted.then:
            await eventually(Path(wanted.then).exists, timeout=60)
        return Found(Text(wanted.parts))


text = Evidence("text", Streaming(), deadline_ms=120_000)


def policy(request: Wanted, packet: Packet, record: Record[None]) -> Outcome:
    return Commit({"parts": packet[text].parts})


coordinator = Coordinator(
    [
        decision_type(
            "text", request=Wanted, policy=policy, policy_version="1", evidence=[text], time_limit_ms=200_000
        )
    ]
)
