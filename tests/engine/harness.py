"""A service in this process, and sources and sinks whose every step a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from coordinator import Commit, Coordinator, Effect, Evidence, Record, RecordKind, decision_type
from coordinator.config import Settings
from coordinator.core.decision import DecisionType
from coordinator.core.effect import (
    Accepted,
    Guarantee,
    LookupResult,
    NotFound,
    Operation,
    SendResult,
    Unguarded,
)
from coordinator.core.evidence import Answer, Found, ReadRequest
from coordinator.core.fairness import ClassLimits
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from coordinator.core.request import DecisionRequest
from coordinator.engine.service import Pending, Rested, Service, run_service
from coordinator.errors import RequestRefused
from coordinator.store.keys import Key
from tests.store.given import new_tenant

QUIET = {"poll_ms": 60_000, "lease_ms": 60_000}
"""No sweep and no renewal comes in between."""
ONE_CLASS = {"interactive": ClassLimits(weight=1, reserved=0, queue_depth=2)}


class Ask(msgspec.Struct, frozen=True):
    value: int = 0


class Number(msgspec.Struct, frozen=True):
    value: int
    note: str = ""


class Fact:
    """A source of `Number`s. ``answer(request, n)`` is its n-th reading, counted from 1."""

    returns = Number

    def __init__(
        self,
        name: str,
        answer: Callable[[ReadRequest, int], Awaitable[Any]] | int = 1,
        *,
        provider: str | None = None,
    ) -> None:
        self.name = name
        self.provider = provider or name
        self.requests: list[ReadRequest] = []
        self._answer = answer

    @property
    def reads(self) -> int:
        return len(self.requests)

    async def read(self, request: ReadRequest) -> Answer[Number]:
        self.requests.append(request)
        if isinstance(self._answer, int):
            return Found(Number(self._answer))
        answer: Answer[Number] = await self._answer(request, self.reads)
        return answer


def values(*numbers: int) -> Callable[[ReadRequest, int], Awaitable[Found[Number]]]:
    """The n-th reading is the n-th of these, then the last one for ever."""

    async def answer(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(numbers[min(n, len(numbers)) - 1]))

    return answer


class Sent:
    """A sink. ``perform(operation, n)`` answers its n-th send; ``lookup`` its lookups. Keeps what it was asked."""

    def __init__(
        self,
        guarantee: Guarantee | None = None,
        perform: Callable[[Operation, int], Awaitable[SendResult]] | None = None,
        lookup: Callable[[Operation, int], Awaitable[LookupResult]] | None = None,
        *,
        name: str = "send",
        timeout_ms: int = 1_000,
    ) -> None:
        self.name = name
        self.provider = name
        self.guarantee: Guarantee = guarantee or Unguarded()
        self.timeout_ms = timeout_ms
        self.sends: list[Operation] = []
        self.lookups: list[Operation] = []
        self._perform = perform
        self._lookup = lookup

    async def perform(self, operation: Operation) -> SendResult:
        self.sends.append(operation)
        return await self._perform(operation, len(self.sends)) if self._perform else Accepted("ref")

    async def lookup(self, operation: Operation) -> LookupResult:
        self.lookups.append(operation)
        return await self._lookup(operation, len(self.lookups)) if self._lookup else NotFound()


class Gate:
    """A place where many wait; a test learns that somebody is ``inside`` and lets all of them go on with `open`."""

    def __init__(self) -> None:
        self.inside = 0
        self.arrived = asyncio.Event()
        self._open = asyncio.Event()

    async def __call__(self) -> None:
        self.inside += 1
        self.arrived.set()
        try:
            await self._open.wait()
        finally:
            self.inside -= 1

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        self.arrived.clear()

    def answering(self, value: int = 1) -> Callable[[ReadRequest, int], Awaitable[Found[Number]]]:
        async def answer(_: ReadRequest, __: int) -> Found[Number]:
            await self()
            return Found(Number(value))

        return answer


PROPOSAL: RecordKind[Number] = RecordKind("proposal", Number)


def sum_up(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    """Commits the sum of all that was found."""
    found = [item.value["value"] for item in packet.items if isinstance(item.value, dict)]
    total = ask.value + sum(int(str(value)) for value in found)
    changes = [record.becomes(Number(total))] if record.kind else []
    return Commit({"total": total}, changes=changes)


def sending(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
    return Commit({"ok": True}, effects=[Effect("send", {"value": ask.value})])


def service_of(
    *evidence: Evidence[Any, Any],
    policy: Callable[[Ask, Packet, Record[Any]], Outcome] = sum_up,
    effects: Sequence[Sent] = (),
    record: RecordKind[Any] | None = None,
    records: Sequence[RecordKind[Any]] = (),
    **limits: Any,
) -> Coordinator:
    """A coordinator with the one decision type ``quote``."""
    declared: DecisionType[Ask, Any] = decision_type(
        "quote",
        request=Ask,
        policy=policy,
        policy_version="1",
        evidence=evidence,
        effects=effects,
        record=record,
        **limits,
    )
    return Coordinator([declared], records=records)


def render(error: RequestRefused) -> tuple[int, bytes]:
    return 409, msgspec.json.encode({"code": error.code, **error.extra})


@dataclass(frozen=True)
class Running:
    """A service, and a caller of it."""

    service: Service
    caller: Key
    url: str

    async def of_another_tenant(self) -> Running:
        key = Key(await new_tenant(self.url, "another"), uuid7(), frozenset({"decide"}))
        return Running(self.service, key, self.url)

    @property
    def tenant(self) -> UUID:
        return self.caller.tenant

    async def post(
        self, key: str = "k", value: int = 0, *, wait: float = 20, traceparent: str | None = None, **more: Any
    ) -> Rested | Pending:
        body = {"type": "quote", "input": {"value": value}} | more
        request = msgspec.convert(body, DecisionRequest)
        return await self.service.decide(
            self.caller, key, request, body, wait_s=wait, traceparent=traceparent
        )

    async def decided(self, key: str = "k", value: int = 0, *, class_: str | None = None, **more: Any) -> Any:
        """The decision, which has to come to rest, as a client sees it."""
        if class_ is not None:
            more["class"] = class_
        answer = await self.post(key, value, **more)
        assert isinstance(answer, Rested)
        return json.loads(answer.body)

    async def shown(self, id: UUID | str) -> Any:
        body = await self.service.show(self.tenant, UUID(str(id)))
        assert body is not None
        return json.loads(body)


@asynccontextmanager
async def running(coordinator: Coordinator, url: str, **settings: Any) -> AsyncIterator[Running]:
    limits = Settings(**{"pool_size": 4, **QUIET, **settings})
    async with run_service(coordinator, url, limits, render_refusal=render) as service:
        yield Running(service, Key(await caller_tenant(url), uuid7(), frozenset({"decide"})), url)


async def caller_tenant(url: str) -> UUID:
    """The tenant of every caller here; asked for past any proxy, by name."""
    return await new_tenant(url, "one")


def evidence_of(decision: Mapping[str, Any], name: str) -> Any:
    return next(item for item in decision["evidence"] if item["name"] == name)
