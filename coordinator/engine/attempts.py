"""Attempts: a call whose failure says that a repeat may help is repeated, and the pause before that holds no slot."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import tenacity

from coordinator.core.evidence import Answer, Failed

_JITTER = tenacity.wait_random_exponential(multiplier=0.05, max=5)


class Attempts:
    """Up to ``limit`` calls; ``count`` is how many there were. The calls know their own limit in time; ``until`` is that of the
    pauses, on this process's monotonic clock."""

    __slots__ = ("count", "limit", "until")

    def __init__(self, limit: int, until: float) -> None:
        self.limit = limit
        self.until = until
        self.count = 0

    async def run(self, call: Callable[[], Awaitable[Answer[Any]]]) -> Answer[Any] | None:
        """None if time ran out between two of them."""
        answer = await self._once(call)
        if self.limit == 1 or not _worth_repeating(answer):
            return answer
        with anyio.move_on_after(self.until - time.monotonic()):
            return await self._repeated(call, answer)
        return None

    async def _repeated(self, call: Callable[[], Awaitable[Answer[Any]]], answer: Answer[Any]) -> Answer[Any]:
        known = [answer]

        async def attempt() -> Answer[Any]:
            return known.pop() if known else await self._once(call)

        repeated = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_result(_worth_repeating),
            stop=tenacity.stop_after_attempt(self.limit),
            wait=_pause,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else answer,
        )
        last: Answer[Any] = await repeated(attempt)
        return last

    async def _once(self, call: Callable[[], Awaitable[Answer[Any]]]) -> Answer[Any]:
        self.count += 1
        return await call()


def _pause(state: tenacity.RetryCallState) -> float:
    """What the provider asked for, else exponential with full jitter; in seconds."""
    answer = state.outcome.result() if state.outcome else None
    if isinstance(answer, Failed) and answer.retry_after_ms:
        return answer.retry_after_ms / 1000
    return _JITTER(state)


def _worth_repeating(answer: Answer[Any]) -> bool:
    return isinstance(answer, Failed) and answer.retryable
