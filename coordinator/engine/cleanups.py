"""Clean-ups: what a source registered to be undone if its reading is cancelled, run in reverse and bounded in time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from coordinator.logs import THEIR_FAULTS, traceback_of

log = logging.getLogger(__name__)


class Cleanups(list[Callable[[], Awaitable[None]]]):
    """One that fails is logged and the rest still run; one that hangs is cut off and reported."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._name = name
        self._seconds = seconds

    async def run(self) -> None:
        if not self:
            return
        with anyio.move_on_after(self._seconds, shield=True) as scope:
            while self:
                cleanup = self.pop()
                try:
                    await cleanup()
                except THEIR_FAULTS as error:  # the boundary to adapters; logged
                    log.error("a clean-up of evidence %s failed: %s", self._name, traceback_of(error))
        if scope.cancelled_caught:
            log.error(
                "a clean-up of evidence %s took longer than %s s and was cancelled", self._name, self._seconds
            )
