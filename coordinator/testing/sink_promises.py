"""What every sink has to keep to, each promise against a real provider behind a proxy that breaks connections.

The worst that a sink can do is to say `NotSent` or `Rejected` of what was sent, to say `NotFound` of what happened, or to send
again by itself: each becomes a second effect, or a first one that nobody knows of. Everything else costs time at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

from coordinator.core.decision import Closable
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Keyed,
    LookupResult,
    NotFound,
    NotSent,
    Operation,
    Rejected,
    SendResult,
    Sink,
    lookup_lag_ms,
)
from coordinator.testing.promises import BrokenPromise, NotPromised, Promise, SinkSubject, bounded
from coordinator.testing.proxy import (
    CutReply,
    CutRequest,
    Delay,
    Fault,
    Junk,
    LoseReply,
    Proxy,
    Refuse,
    Swallow,
    proxied,
)

GRACE_S = 1.0
"""What the dispatcher allows beyond a sink's own timeout before it cuts it off."""
CLOSING_S = 5.0
FLICKER_MS = 250
"""Tolerance of a lag that is measured from outside."""
SINK_PROMISES: dict[str, Promise[SinkSubject]] = {}


class Stage:
    """One sink, the proxy it talks through, and the operation of this promise."""

    def __init__(self, subject: SinkSubject, sink: Sink, proxy: Proxy, key: str) -> None:
        self.subject, self.sink, self.proxy = subject, sink, proxy
        self.key = key

    def operation(self, *, attempt: int = 1, payload: bytes | None = None) -> Operation:
        return Operation(
            id=self.key,
            key=self.key,
            tenant="conformance",
            decision_id=self.key,
            effect=self.sink.name,
            payload=self.subject.payload if payload is None else payload,
            attempt=attempt,
            traceparent="",
        )

    async def perform(self, *, attempt: int = 1) -> SendResult:
        limit_s = self.sink.timeout_ms / 1000 + GRACE_S
        what = f"perform, whose timeout_ms is {self.sink.timeout_ms},"
        return await bounded(self.sink.perform(self.operation(attempt=attempt)), limit_s, what)

    async def performed(self) -> Accepted:
        """Raises `BrokenPromise` if it is not accepted, when nothing is wrong."""
        result = await self.perform()
        if not isinstance(result, Accepted):
            raise BrokenPromise(f"nothing was wrong, the effect was asked for, and perform said {result}")
        return result

    async def performed_under(self, fault: Fault) -> SendResult:
        await self.proxy.set(fault)
        result = await self.perform()
        if self.proxy.sends == 0 and not isinstance(fault, Refuse):
            raise BrokenPromise(
                f"{self.proxy.decisive!r} never went over the wire, so nothing was tried: give the subject decisive=... "
                f"(perform said {result})"
            )
        self.sent_once()
        return result

    def sent_once(self) -> None:
        if self.proxy.sends > 1:
            raise BrokenPromise(
                f"one call of perform sent {self.proxy.sends} times by itself: each sending has to be the dispatcher's, which "
                "knows whether the provider would recognise the key"
            )

    async def happened(self, times: int, why: str) -> None:
        really = await self.subject.count(self.key)
        if really != times:
            raise BrokenPromise(f"{why}: the effect happened {really} times, not {times}")

    async def looked_up(self) -> LookupResult:
        limit_s = self.sink.timeout_ms / 1000 + GRACE_S
        what = f"lookup, whose timeout_ms is {self.sink.timeout_ms},"
        return await bounded(self.sink.lookup(self.operation()), limit_s, what)

    async def shows_within_its_lag(self) -> None:
        """The effect has happened: a lookup has to say so, at the latest when its lag is over."""
        lag_ms = lookup_lag_ms(self.sink.guarantee) or 0
        until = time.monotonic() + (lag_ms + FLICKER_MS) / 1000
        while True:
            result = await self.looked_up()
            if isinstance(result, Accepted):
                return
            if time.monotonic() > until:
                raise BrokenPromise(
                    f"the effect happened, its lag of {lag_ms} ms is over, and lookup says {result}: it would be sent again"
                )
            await asyncio.sleep(0.02)


def _promise(name: str) -> Callable[[Callable[[Stage], Awaitable[None]]], Promise[SinkSubject]]:
    """Registers a promise under its name, to run on a stage of its own."""

    def register(keeps: Callable[[Stage], Awaitable[None]]) -> Promise[SinkSubject]:
        async def on_stage(subject: SinkSubject) -> None:
            async with _stage(subject) as stage:
                await keeps(stage)

        on_stage.__doc__ = keeps.__doc__
        SINK_PROMISES[name] = on_stage
        return on_stage

    return register


@asynccontextmanager
async def _stage(subject: SinkSubject) -> AsyncIterator[Stage]:
    key = f"conformance-{uuid4()}"
    decisive = key.encode() if subject.decisive is None else subject.decisive
    async with proxied(subject.provider, decisive=decisive) as proxy:
        sink = subject.build(proxy.host, proxy.port)
        try:
            yield Stage(subject, sink, proxy, key)
        finally:
            if isinstance(sink, Closable):
                await bounded(sink.aclose(), CLOSING_S, "aclose")


def _keyed(stage: Stage) -> None:
    if not isinstance(stage.sink.guarantee, Keyed):
        raise NotPromised("its provider does not recognise keys, and it does not say so")


def _askable(stage: Stage) -> None:
    if lookup_lag_ms(stage.sink.guarantee) is None:
        raise NotPromised("its provider can't be asked by key, and it does not say so")


@_promise("performing-once-is-one-effect")
async def _once(stage: Stage) -> None:
    await stage.performed()
    stage.sent_once()
    await stage.happened(1, "performed once")


@_promise("two-keys-are-two-effects")
async def _two_keys(stage: Stage) -> None:
    await stage.performed()
    async with _stage(stage.subject) as other:
        await other.performed()
        await other.happened(1, "performed once, after another operation with the same payload")
    await stage.happened(1, "performed once")


@_promise("a-known-key-is-not-a-second-effect")
async def _known_key(stage: Stage) -> None:
    _keyed(stage)
    await stage.performed()
    again = await stage.perform(attempt=2)
    await stage.happened(
        1, "the sink says that its provider recognises our key, and the same key was sent twice"
    )
    if not isinstance(again, Accepted):
        raise BrokenPromise(f"the key was known and the effect there, and the second perform said {again}")


@_promise("one-key-twice-at-once-is-one-effect")
async def _at_once(stage: Stage) -> None:
    _keyed(stage)
    await asyncio.gather(stage.perform(), stage.perform(attempt=2))
    await stage.happened(
        1, "the sink says that its provider recognises our key, and the same key was sent twice at once"
    )


@_promise("nobody-listening-is-not-sent")
async def _refused(stage: Stage) -> None:
    result = await stage.performed_under(Refuse())
    if not isinstance(result, NotSent):
        raise BrokenPromise(
            f"the connection was refused and perform said {result}: it is NotSent, which may safely be tried again"
        )
    await stage.happened(0, "the connection was refused")


@_promise("a-request-that-never-arrived-is-not-answered")
async def _cut_request(stage: Stage) -> None:
    result = await stage.performed_under(CutRequest())
    await stage.happened(0, "the request was cut off before the provider could act")
    if isinstance(result, Accepted | Rejected):
        raise BrokenPromise(f"the provider never saw the request, and perform said {result}")


async def _acted_but_unheard(stage: Stage, fault: Fault, what: str) -> None:
    result = await stage.performed_under(fault)
    await stage.happened(1, what)
    if isinstance(result, NotSent | Rejected):
        raise BrokenPromise(
            f"{what}, and perform said {result}: that is Ambiguous, for the provider did act. "
            + (
                "NotSent is sent again, so it would happen twice"
                if isinstance(result, NotSent)
                else "Rejected is final, so nobody would ever know"
            )
        )
    if isinstance(result, Accepted):
        raise BrokenPromise(f"{what}, and perform said {result}: it can't know that")


@_promise("a-lost-reply-is-ambiguous")
async def _lost_reply(stage: Stage) -> None:
    await _acted_but_unheard(
        stage, LoseReply(), "the provider acted and the connection was reset in place of its reply"
    )


@_promise("silence-is-ambiguous-and-ends-in-time")
async def _silence(stage: Stage) -> None:
    await _acted_but_unheard(stage, Swallow(), "the provider acted and its reply never came")


@_promise("a-reply-cut-short-is-ambiguous")
async def _cut_reply(stage: Stage) -> None:
    await _acted_but_unheard(stage, CutReply(1), "the provider acted and its reply ended after one byte")


@_promise("a-reply-that-makes-no-sense-is-ambiguous")
async def _junk(stage: Stage) -> None:
    junk = Junk(b"*** this is no reply ***\r\n\r\n")
    await _acted_but_unheard(stage, junk, "the provider acted and something unintelligible came back")


@_promise("a-slow-reply-is-waited-for")
async def _slow(stage: Stage) -> None:
    result = await stage.performed_under(Delay(stage.sink.timeout_ms / 4000))
    await stage.happened(1, "the reply took a quarter of timeout_ms")
    if not isinstance(result, Accepted):
        raise BrokenPromise(f"the reply took a quarter of timeout_ms, and perform said {result}")


@_promise("cancelling-is-passed-on")
async def _cancelling(stage: Stage) -> None:
    await stage.proxy.set(Swallow())
    sending = asyncio.create_task(stage.sink.perform(stage.operation()))
    sent = asyncio.create_task(stage.proxy.sent.wait())
    await asyncio.wait(
        {sending, sent}, return_when=asyncio.FIRST_COMPLETED, timeout=stage.sink.timeout_ms / 1000
    )
    sent.cancel()
    sending.cancel()
    await asyncio.wait({sending}, timeout=GRACE_S)
    if not sending.done():
        sending.cancel()
        raise BrokenPromise(f"perform was cancelled and still ran {GRACE_S:.0f} s later")
    if not sending.cancelled():
        raise BrokenPromise(
            "perform was cancelled and kept it to itself: a drain would wait for it for nothing"
        )
    stage.sent_once()


@_promise("a-key-sent-again-after-a-lost-reply-is-one-effect")
async def _resend(stage: Stage) -> None:
    _keyed(stage)
    await stage.performed_under(LoseReply())
    await stage.proxy.set(Delay(0))
    again = await stage.perform(attempt=2)
    await stage.happened(1, "the reply was lost and the same key was sent again")
    if not isinstance(again, Accepted):
        raise BrokenPromise(f"the effect was there, the same key was sent again, and perform said {again}")


@_promise("a-refusal-is-a-refusal")
async def _refusal(stage: Stage) -> None:
    if stage.subject.refused_payload is None:
        raise NotPromised("the subject has no refused_payload")
    result = await stage.sink.perform(stage.operation(payload=stage.subject.refused_payload))
    await stage.happened(0, "the provider refuses this payload")
    if not isinstance(result, Rejected):
        raise BrokenPromise(f"the provider refuses this payload for good, and perform said {result}")


@_promise("a-lookup-does-not-find-what-did-not-happen")
async def _not_there(stage: Stage) -> None:
    _askable(stage)
    result = await stage.looked_up()
    if not isinstance(result, NotFound):
        raise BrokenPromise(f"nothing was ever sent, and lookup says {result}")


@_promise("a-lookup-finds-what-happened-within-its-lag")
async def _there(stage: Stage) -> None:
    _askable(stage)
    await stage.performed()
    await stage.shows_within_its_lag()


@_promise("a-lookup-resolves-a-lost-reply")
async def _resolves(stage: Stage) -> None:
    _askable(stage)
    await stage.performed_under(LoseReply())
    await stage.proxy.set(Delay(0))
    await stage.shows_within_its_lag()


@_promise("a-lookup-that-was-not-answered-proves-nothing")
async def _unanswered(stage: Stage) -> None:
    _askable(stage)
    await stage.performed()
    for fault in (Refuse(), LoseReply(), CutReply(1), Junk(b"*** nonsense ***\r\n\r\n"), Swallow()):
        await stage.proxy.set(fault, decisive=b"")
        result = await stage.looked_up()
        if not isinstance(result, Ambiguous):
            raise BrokenPromise(
                f"the provider's answer to a lookup never arrived ({fault}), and lookup says {result}: that proves nothing"
            )
