"""Clean-ups: all of them run, none holds up the end, and what hangs is reported (I15, I17)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from uuid import uuid4

import anyio
import pytest
from prometheus_client import REGISTRY

from coordinator.engine.cleanups import Cleanups, left_alone
from tests.support import eventually

Cleanup = Callable[[], Awaitable[None]]


class Undone:
    """Keeps the order in which its clean-ups came to their end."""

    def __init__(self, seconds: float = 0.2) -> None:
        self.name = f"evidence-{uuid4().hex[:8]}"
        self.order: list[str] = []
        self.stop = asyncio.Event()
        self.cleanups = Cleanups(self.name, seconds)

    def well(self, name: str) -> Cleanup:
        async def cleanup() -> None:
            await anyio.lowlevel.checkpoint()
            self.order.append(name)

        return cleanup

    async def hangs(self) -> None:
        await anyio.sleep_forever()

    async def raises(self) -> None:
        raise RuntimeError("fails")

    async def exits(self) -> None:
        raise SystemExit

    async def never_lets_itself_be_stopped(self) -> None:
        with anyio.CancelScope(shield=True):
            while not self.stop.is_set():
                try:
                    await self.stop.wait()
                except asyncio.CancelledError:
                    continue

    def counted(self, outcome: str) -> float:
        labels = {"evidence": self.name, "outcome": outcome}
        return REGISTRY.get_sample_value("coordinator_cleanups_total", labels) or 0.0


async def test_they_run_the_last_one_first_and_each_once() -> None:
    undone = Undone()
    undone.cleanups += [undone.well("first"), undone.well("second")]
    await undone.cleanups.run()
    await undone.cleanups.run()
    assert undone.order == ["second", "first"]
    assert undone.counted("done") == 2


async def test_one_that_fails_is_logged_and_counted_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    undone = Undone()
    undone.cleanups += [undone.well("first"), undone.raises, undone.exits]
    with caplog.at_level(logging.ERROR):
        await undone.cleanups.run()
    assert undone.order == ["first"]
    assert (undone.counted("failed"), undone.counted("done")) == (2, 1)
    assert "RuntimeError: fails" in caplog.text


@pytest.mark.parametrize("how", ["hangs", "never_lets_itself_be_stopped"])
async def test_one_that_hangs_is_reported_and_leaves_the_others_their_time(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    undone = Undone()
    undone.cleanups += [undone.well("first"), getattr(undone, how), undone.well("third")]
    began = time.monotonic()
    with caplog.at_level(logging.ERROR):
        await undone.cleanups.run()
    assert time.monotonic() - began < 2
    assert undone.order == ["third", "first"]
    assert (undone.counted("hung"), undone.counted("done")) == (1, 2)
    assert f"a clean-up of evidence {undone.name} took longer" in caplog.text
    undone.stop.set()
    await eventually(lambda: not left_alone)


async def test_they_run_to_their_end_while_their_reading_is_being_cancelled() -> None:
    undone = Undone()
    undone.cleanups += [undone.well("first"), undone.well("second")]

    async def reading() -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            await undone.cleanups.run()
            raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reading)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert undone.order == ["second", "first"]
