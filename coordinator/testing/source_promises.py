"""What every source has to keep to: read-only and repeatable, in time, and never a value that the provider did not send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from coordinator.core.decision import Closable
from coordinator.core.evidence import Answer, Failed, Found, ReadRequest, Source, Unchanged
from coordinator.testing.promises import BrokenPromise, Promise, SourceSubject, bounded
from coordinator.testing.proxy import CutReply, Fault, Junk, LoseReply, Pass, Proxy, Refuse, Swallow, proxied

TIMEOUT_S = 0.5
GRACE_S = 1.0
CLOSING_S = 5.0
SOURCE_PROMISES: dict[str, Promise[SourceSubject]] = {}


Emit = Callable[[object], Awaitable[None]]


async def _taken(value: object) -> None:
    """Whoever follows has room."""


class Stage:
    """One source and the proxy it talks through."""

    def __init__(self, subject: SourceSubject, source: Source[Any], proxy: Proxy) -> None:
        self.subject, self.source, self.proxy = subject, source, proxy

    def request(
        self, *, if_revision: str | None = None, timeout_s: float = 5.0, emit: Emit = _taken
    ) -> ReadRequest:
        return ReadRequest(
            tenant="conformance",
            input=self.subject.input,
            evidence={},
            record_kind="conformance",
            record_id="1",
            if_revision=if_revision,
            timeout_s=timeout_s,
            traceparent="",
            on_cancel=lambda clean_up: None,
            emit=emit,
        )

    async def read(
        self, *, if_revision: str | None = None, timeout_s: float = 5.0, emit: Emit = _taken
    ) -> Answer[Any]:
        reading = self.source.read(self.request(if_revision=if_revision, timeout_s=timeout_s, emit=emit))
        return await bounded(reading, timeout_s + GRACE_S, f"read, told to end within {timeout_s} s,")

    async def found(self) -> Found[Any]:
        answer = await self.read()
        if not isinstance(answer, Found):
            raise BrokenPromise(f"nothing was wrong, and read said {answer}")
        return answer


def _promise(name: str) -> Callable[[Callable[[Stage], Awaitable[None]]], Promise[SourceSubject]]:
    """Registers a promise under its name, to run on a stage of its own."""

    def register(keeps: Callable[[Stage], Awaitable[None]]) -> Promise[SourceSubject]:
        async def on_stage(subject: SourceSubject) -> None:
            async with _stage(subject) as stage:
                await keeps(stage)

        SOURCE_PROMISES[name] = on_stage
        return on_stage

    return register


@asynccontextmanager
async def _stage(subject: SourceSubject) -> AsyncIterator[Stage]:
    async with proxied(subject.provider, decisive=subject.decisive) as proxy:
        source = subject.build(proxy.host, proxy.port)
        try:
            yield Stage(subject, source, proxy)
        finally:
            if isinstance(source, Closable):
                await bounded(source.aclose(), CLOSING_S, "aclose")


@_promise("reading-twice-is-the-same-value-at-the-same-revision")
async def _twice(stage: Stage) -> None:
    first, second = await stage.found(), await stage.found()
    if first.revision is None:
        raise BrokenPromise("the reading has no revision: a fence could never tell whether it moved")
    if (first.revision, first.value) != (second.revision, second.value):
        raise BrokenPromise(
            f"nothing moved, and two readings differ: {first.revision} and {second.revision}; no fence would ever hold"
        )
    if not isinstance(first.value, stage.source.returns):
        raise BrokenPromise(f"the value is no {stage.source.returns.__name__}, which is what it declares")


@_promise("a-conditional-reading-knows-its-own-revision")
async def _conditional(stage: Stage) -> None:
    first = await stage.found()
    again = await stage.read(if_revision=first.revision)
    if not isinstance(again, Unchanged) and getattr(again, "revision", None) != first.revision:
        raise BrokenPromise(f"asked whether {first.revision} still stands, which it does, read said {again}")
    other = await stage.read(if_revision='"a revision that never was"')
    if not isinstance(other, Found):
        raise BrokenPromise(f"asked about a revision that never was, read said {other}")


@_promise("its-deadline-is-kept")
async def _deadline(stage: Stage) -> None:
    await stage.proxy.set(Swallow())
    answer = await stage.read(timeout_s=TIMEOUT_S)
    if not isinstance(answer, Failed):
        raise BrokenPromise(f"the provider never answered, and read said {answer}")


@_promise("a-part-that-finds-no-room-does-not-hold-it-for-ever")
async def _no_room(stage: Stage) -> None:
    async def never(value: object) -> None:
        await asyncio.get_running_loop().create_future()

    answer = await stage.read(timeout_s=TIMEOUT_S, emit=never)
    if not isinstance(answer, Found | Failed):
        raise BrokenPromise(f"nobody took its parts, and read said {answer}")


@_promise("cancelling-is-passed-on")
async def _cancelling(stage: Stage) -> None:
    await stage.proxy.set(Swallow())
    reading = asyncio.create_task(stage.source.read(stage.request()))
    async with asyncio.timeout(5):
        await stage.proxy.sent.wait()
    reading.cancel()
    await asyncio.wait({reading}, timeout=GRACE_S)
    if not reading.cancelled():
        reading.cancel()
        raise BrokenPromise(f"read was cancelled and kept it to itself: {reading}")


async def _fails_under(stage: Stage, fault: Fault) -> None:
    await stage.proxy.set(fault)
    answer = await stage.read(timeout_s=TIMEOUT_S)
    if not isinstance(answer, Failed):
        raise BrokenPromise(f"the provider's answer never arrived ({fault}), and read said {answer}")
    await stage.proxy.set(Pass())
    await stage.found()


@_promise("a-provider-out-of-reach-is-a-failure-and-soon-forgotten")
async def _unreachable(stage: Stage) -> None:
    await _fails_under(stage, Refuse())


@_promise("an-answer-that-breaks-off-is-a-failure")
async def _broken_off(stage: Stage) -> None:
    await _fails_under(stage, LoseReply())
    await _fails_under(stage, CutReply(1))


@_promise("an-answer-that-makes-no-sense-is-a-failure")
async def _junk(stage: Stage) -> None:
    await _fails_under(stage, Junk(b"*** this is no answer ***\r\n\r\n"))
