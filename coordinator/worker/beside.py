"""The worker's end of its pulse: starts the process, tells it what is held, and hears what is lost. One that dies is started again
and told everything anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec

from coordinator.worker import pulse
from coordinator.worker.pulse import News, Order, Start

log = logging.getLogger(__name__)
END_S = 3.0
FLUSH_S = 2.0


class Beside:
    """``on_news`` is called in the event loop. `hold`, `say` and `drop` may be called from any thread."""

    def __init__(self, url: str, key: str, on_news: Callable[[News], None]) -> None:
        self._url = url
        self._key = key
        self._on_news = on_news
        self._held: dict[str, Order] = {}
        self._process: Process | None = None
        self._told = asyncio.Event()
        """There is a process, and it knows everything that is held."""
        self._loop = asyncio.get_running_loop()
        self._said: set[str] = set()
        self._flushed: dict[str, asyncio.Event] = {}

    async def run(self, lease_ms: int) -> None:
        """Until cancelled; then the process ends."""
        start = Start(url=self._url, key=self._key, parent=os.getpid(), lease_ms=lease_ms)
        try:
            while True:
                await self._beat(start)
                log.error("the process that sends heartbeats ended; it is started again")
        finally:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
                with anyio.move_on_after(END_S, shield=True):
                    await self._process.wait()

    async def _beat(self, start: Start) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(Path(pulse.__file__))),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.transport.set_write_buffer_limits(high=0)  # what is drained is in the pipe
        self._write(start)
        for order in self._held.values():
            self._write(order)
        self._told.set()
        async for line in self._process.stdout:
            news = msgspec.json.decode(line, type=News)
            for id in (news.flushed, news.lost):
                if id is not None and id in self._flushed:
                    self._flushed[id].set()
            self._on_news(news)
        self._told.clear()
        await self._process.wait()

    def hold(self, task: str, token: int) -> None:
        """Heartbeats for a task from now on."""
        order = self._held[task] = Order(hold=task, token=token)
        self._order(order)

    async def hold_group(self, task: str, token: int, group: int) -> None:
        """``group`` is the process group that does the task: when this returns, it will not outlive the worker, even one that is
        killed."""
        order = self._held[task] = Order(hold=task, token=token, group=group)
        self._write(order)
        told = False
        while not told:
            await self._told.wait()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            try:
                await process.stdin.drain()
                told = True
            except ConnectionError:  # it has died; the next one is told everything
                if process is self._process:
                    self._told.clear()

    def say(self, task: str, lines: Sequence[str]) -> None:
        if lines:
            self._said.add(task)
            self._order(Order(say=task, lines=list(lines)))

    async def flush(self, task: str) -> None:
        """Until what was said of a task has been sent, but not for long: a report must not overtake it."""
        if task in self._held and task in self._said:
            flushed = self._flushed[task] = asyncio.Event()
            self._order(Order(flush=task))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flushed.wait(), FLUSH_S)
            del self._flushed[task]

    def drop(self, task: str) -> None:
        self._held.pop(task, None)
        self._said.discard(task)
        self._order(Order(drop=task))

    def _order(self, order: Order) -> None:
        with contextlib.suppress(RuntimeError):  # a thread that outlives the loop has nobody to tell
            self._loop.call_soon_threadsafe(self._write, order)

    def _write(self, message: Start | Order) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(msgspec.json.encode(message) + b"\n")
