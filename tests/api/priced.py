"""A decision type that costs money, and a bill that the caller chooses: ``bill`` is what the source says it cost, null says nothing."""

from __future__ import annotations

import msgspec

from coordinator import Commit, Coordinator, Evidence, Outcome, Packet, Record, decision_type
from coordinator.core.evidence import Found, ReadRequest
from coordinator.core.money import Money, money


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bill: int | None = 25


class Answer(msgspec.Struct, frozen=True):
    text: str


class Oracle:
    name = "oracle"
    provider = "oracle"
    returns = Answer

    async def read(self, request: ReadRequest) -> Found[Answer]:
        assert isinstance(request.input, Question)
        bill = request.input.bill
        return Found(Answer("42"), cost=None if bill is None else Money(bill, "SGD"))


answer = Evidence("answer", Oracle(), deadline_ms=20_000, reserves=money("0.40 SGD"))


def tell(question: Question, packet: Packet, record: Record[None]) -> Outcome:
    return Commit({"text": packet[answer].text})


priced = decision_type("priced", request=Question, policy=tell, policy_version="1", evidence=[answer])
coordinator = Coordinator([priced])
