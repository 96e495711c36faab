"""Requests and operations as the engine hands them to adapters, and the types that the tests read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from coordinator.core.canonical import JsonValue
from coordinator.core.effect import Operation
from coordinator.core.evidence import ReadRequest

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Site(msgspec.Struct, frozen=True):
    site: str = "sg-1"
    depth: int = 3


class Capacity(msgspec.Struct, frozen=True):
    site: str
    available_hours: float


def ask(
    input: object = None,
    *,
    evidence: Mapping[str, JsonValue] | None = None,
    record: tuple[str, str] = ("proposal", "p-1"),
    if_revision: str | None = None,
    timeout_s: float = 5.0,
    emit: Callable[[object], Awaitable[None]] | None = None,
) -> ReadRequest:
    def on_cancel(clean_up: Callable[[], Awaitable[None]]) -> None:
        raise AssertionError("no adapter here has anything to clean up")

    async def told_nobody(value: object) -> None:
        pass

    return ReadRequest(
        tenant="acme",
        input=Site() if input is None else input,
        evidence=evidence or {},
        record_kind=record[0],
        record_id=record[1],
        if_revision=if_revision,
        timeout_s=timeout_s,
        traceparent=TRACE,
        on_cancel=on_cancel,
        emit=emit or told_nobody,
    )


def operation(
    key: str = "d-1.send-quote.0", payload: bytes = b'{"amount_minor":1200,"b":"\xc3\xa9"}', attempt: int = 1
) -> Operation:
    return Operation(
        id="o-1",
        key=key,
        tenant="acme",
        decision_id="d-1",
        effect="send-quote",
        payload=payload,
        attempt=attempt,
        traceparent=TRACE,
    )
