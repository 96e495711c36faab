"""The HTTP server of one process: uvicorn, and how it stops.

    signal      readyz answers 503 and new decisions are refused, while the process still listens: callers can fetch what they
                wait for, and a load balancer sees the change
    idle        or `drain_s` later: it stops listening, lets the requests that are still there finish, and returns
    2nd signal  skips the waiting

`run` returns instead of dying by the signal, so that whoever called it can close what it opened.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from litestar.types import ASGIApp

from coordinator.api.protocol import PatientProtocol
from coordinator.engine.service import Service

KEEP_ALIVE_S = 75
"""Longer than the idle time-out of the usual load balancers, so that it is they who close."""
BACKLOG = 2048
FINISH_S = 5
"""How long requests may take to finish once the process has stopped listening."""


class Server(uvicorn.Server):
    """Serves until a signal comes, then drains. ``on_started`` is called once connections are accepted."""

    def __init__(self, app: ASGIApp, service: Service, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                loop="uvloop",
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FINISH_S,
                backlog=BACKLOG,
            )
        )
        self.service = service
        self.on_started = on_started
        self.drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not look at it again
        self.on_started()

    def stop(self) -> None:
        """Drain, then return from `serve`."""
        self.drain_until = time.monotonic() + self.service.settings.drain_s
        self.service.stop_taking()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.drain_until is None:
            self.stop()
        else:
            super().handle_exit(sig, frame)
            self._captured_signals.clear()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks this ten times a second."""
        if self.drain_until is not None and (self._idle() or time.monotonic() > self.drain_until):
            self.should_exit = True
        return await super().on_tick(counter)

    def _idle(self) -> bool:
        return not self.server_state.tasks and self.service.idle


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Shared by all processes that inherit it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
