"""Clean-ups: what a source registered to be undone if its reading is cancelled, the last one first.

All of them run, and none can hold up the end of the decision: each has an equal part of the time that is left, what is too slow is
cancelled, and what does not end even then is left alone. Whatever did not go well is logged and counted. Each runs in a task of its own,
awaited here: only so can one be left that shields itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio

from coordinator import telemetry
from coordinator.logs import THEIR_FAULTS, traceback_of

log = logging.getLogger(__name__)
Cleanup = Callable[[], Awaitable[None]]
Outcome = Literal["done", "failed", "hung"]
LAST_CHANCE_S = 0.1
"""How long one that was cancelled may take to end."""

left_alone: set[asyncio.Task[bool]] = set()
"""Clean-ups that were cancelled and go on: none, unless somebody's code never lets itself be stopped."""


class Cleanups(list[Cleanup]):
    """Of the reading called ``name``; together they may take so many ``seconds``."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._name = name
        self._seconds = seconds

    async def run(self) -> None:
        until = time.monotonic() + self._seconds
        with anyio.CancelScope(shield=True):
            while self:
                part = (until - time.monotonic()) / len(self)
                outcome = await self._undo(self.pop(), max(0.0, part))
                telemetry.CLEANUPS.labels(self._name, outcome).inc()

    async def _undo(self, cleanup: Cleanup, seconds: float) -> Outcome:
        task = asyncio.ensure_future(self._called(cleanup))
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return "done" if task.result() else "failed"
        task.cancel()
        await asyncio.wait([task], timeout=LAST_CHANCE_S)
        how = "was cancelled" if task.done() else "cannot be stopped: it is left alone"
        log.error("a clean-up of evidence %s took longer than %.3f s and %s", self._name, seconds, how)
        if not task.done():
            left_alone.add(task)
            task.add_done_callback(left_alone.discard)
        return "hung"

    async def _called(self, cleanup: Cleanup) -> bool:
        """Whether it ended without an error."""
        try:
            await cleanup()
            return True
        except THEIR_FAULTS as error:  # the boundary to adapters; logged
            log.error("a clean-up of evidence %s failed: %s", self._name, traceback_of(error))
            return False
