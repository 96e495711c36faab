"""What the conformance kit is given, and how it says what it found. See `coordinator.testing.conformance`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from coordinator.core.effect import Sink
from coordinator.core.evidence import Source

S = TypeVar("S")
R = TypeVar("R")
Promise: TypeAlias = "Callable[[S], Awaitable[None]]"


class BrokenPromise(AssertionError):
    """The adapter said what is not so. The text is one or two sentences for its author."""


class NotPromised(Exception):
    """The sink's guarantee does not go that far."""


async def bounded(work: Coroutine[Any, Any, R], seconds: float, what: str) -> R:
    """What the adapter returns within ``seconds``. Raises `BrokenPromise` if it raises or has not ended by then, even if it keeps
    being cancelled to itself."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not task.done():
        raise BrokenPromise(f"{what} still ran after {seconds:.1f} s")
    if (error := task.exception()) is not None:
        raise BrokenPromise(f"{what} raised {error!r}: what is expected is returned, never raised") from error
    return task.result()


@dataclass(frozen=True, kw_only=True)
class SinkSubject:
    """A sink and the provider behind it.

    ``build(host, port)`` makes the sink as it is in production, but with its provider at this address (the proxy's) and with a
    ``timeout_ms`` of a second or less; it is called for each promise. ``provider`` is where the real one listens. ``count(key)``
    asks it how often the effect with this key really happened, past the sink. ``payload`` is one that the provider accepts,
    ``refused_payload`` one that it refuses for good. ``decisive``: bytes that go over the wire last before the provider acts (see
    `coordinator.testing.proxy`); by default the operation's key, which suits HTTP.
    """

    build: Callable[[str, int], Sink]
    provider: tuple[str, int]
    count: Callable[[str], Awaitable[int]]
    payload: bytes = b"{}"
    refused_payload: bytes | None = None
    decisive: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class SourceSubject:
    """A source and the provider behind it, which has a value for ``input`` that stands still meanwhile.

    ``build(host, port)`` makes the source with its provider at this address. ``decisive`` is as in `SinkSubject`; by default the
    first bytes that the source sends.
    """

    build: Callable[[str, int], Source[Any]]
    provider: tuple[str, int]
    input: object
    decisive: bytes = b""
