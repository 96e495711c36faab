"""The composition root: a coordinator, a database and the limits become an application, and the application a running server.

`create_app` makes the ASGI application for any server; `serve` runs it on uvicorn, in this process or in several that share one
socket. This module, run as a program, is one of those several.
"""

from __future__ import annotations

import importlib
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from litestar import Litestar

from coordinator import telemetry
from coordinator.api import (
    budgets,
    decisions,
    effects,
    events,
    health,
    locks,
    notices,
    operations,
    pools,
    queues,
    receipts,
    records,
    reference,
    reviews,
    sessions,
    tasks,
    workers,
)
from coordinator.api.auth import Keys
from coordinator.api.endpoint import Api, Endpoint, by_path, raw_path, route
from coordinator.api.openapi import openapi
from coordinator.api.problems import framework_error, render
from coordinator.api.server import Server, listen
from coordinator.api.supervisor import Supervisor
from coordinator.config import Settings
from coordinator.core.decision import Coordinator
from coordinator.engine.service import run_service
from coordinator.errors import ConfigurationError

ENDPOINTS: tuple[Endpoint, ...] = (
    *decisions.ENDPOINTS,
    *events.ENDPOINTS,
    *reviews.ENDPOINTS,
    *sessions.ENDPOINTS,
    *records.ENDPOINTS,
    *operations.ENDPOINTS,
    *effects.ENDPOINTS,
    *notices.ENDPOINTS,
    *pools.ENDPOINTS,
    *queues.ENDPOINTS,
    *budgets.ENDPOINTS,
    *locks.ENDPOINTS,
    *receipts.ENDPOINTS,
    *workers.ENDPOINTS,
    *tasks.ENDPOINTS,
    *health.ENDPOINTS,
)
MAX_PROCESSES = 64


class App(Litestar):
    """Routes by the raw path where it holds an encoded slash, so that a record's id may contain one."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and "%2f" in raw_path(scope).lower():
            scope["path"] = raw_path(scope)
        await super().__call__(scope, receive, send)


def create_app(coordinator: Coordinator, url: str, settings: Settings) -> Litestar:
    """The application. It serves ``coordinator`` on the database at ``url`` for as long as its lifespan lasts."""

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with run_service(coordinator, url, settings, render_refusal=render) as service:
            app.state.api = Api(service, Keys(service.database, settings.key_cache_s))
            yield

    return App(
        [
            *(route(path, group) for path, group in by_path(ENDPOINTS).items()),
            *reference.routes(openapi(ENDPOINTS)),
        ],
        lifespan=[lifespan],
        exception_handlers={Exception: framework_error},
        openapi_config=None,
        logging_config=None,
    )


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a server process serves: ``path`` is MODULE:NAME, ``fd`` the listening socket."""

    path: str
    url: str
    settings: Settings
    fd: int


def serve(
    path: str,
    *,
    url: str,
    settings: Settings,
    host: str = "127.0.0.1",
    port: int = 8000,
    processes: int = 1,
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the `Coordinator` at ``path`` (MODULE:NAME) until SIGTERM or SIGINT, then drain and return. Port 0 takes a free one;
    ``on_ready`` gets the address once connections are accepted. Raises `ConfigurationError`."""
    if not 1 <= processes <= MAX_PROCESSES:
        raise ConfigurationError(f"processes must be within 1..{MAX_PROCESSES}, not {processes}")
    settings = msgspec.structs.replace(settings, processes=max(settings.processes, processes))
    coordinator = load(path)
    with listen(host, port) as listener:
        bound = listener.getsockname()[1]
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

        def ready() -> None:
            on_ready(address)

        if processes == 1:
            run(coordinator, url, settings, listener, ready)
        else:
            each = msgspec.structs.replace(settings, max_streams=max(1, settings.max_streams // processes))
            spec = msgspec.json.encode(Spec(path=path, url=url, settings=each, fd=listener.fileno()))
            command = [sys.executable, "-m", "coordinator.app"]
            supervisor = Supervisor(command, spec, listener, processes, settings.drain_s, ready)
            anyio.run(supervisor.run)


def run(
    coordinator: Coordinator,
    url: str,
    settings: Settings,
    listener: socket.socket,
    on_started: Callable[[], None],
    lifeline: socket.socket | None = None,
) -> None:
    """Serve in this process, until a signal comes or the other end of ``lifeline`` closes."""

    async def main() -> None:
        app = create_app(coordinator, url, settings)
        async with app.lifespan():
            server = Server(app, app.state.api.service, on_started)
            async with anyio.create_task_group() as tasks:
                if lifeline is not None:
                    tasks.start_soon(_stop_at_end_of_line, lifeline, server)
                await server.serve(sockets=[listener])
                tasks.cancel_scope.cancel()

    _allow_many_connections()
    telemetry.export_spans_if_configured()
    anyio.run(main, backend_options={"use_uvloop": True})


async def _stop_at_end_of_line(lifeline: socket.socket, server: Server) -> None:
    await anyio.wait_readable(lifeline)
    server.stop()


def _allow_many_connections() -> None:
    """Each connection is a file; the usual soft limit of 1024 is below what one process can serve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def load(path: str) -> Coordinator:
    """The `Coordinator` at ``MODULE:NAME``, looked up from the current folder too. Raises `ConfigurationError`."""
    module_name, colon, name = path.partition(":")
    if (
        not colon
        or not name.isidentifier()
        or not all(part.isidentifier() for part in module_name.split("."))
    ):
        raise ConfigurationError(f"{path!r} is not MODULE:NAME, such as quotes:coordinator")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(
            f"there is no module {error.name!r}, neither installed nor in {here}"
        ) from None
    found = getattr(module, name, None)
    if not isinstance(found, Coordinator):
        others = [key for key, value in vars(module).items() if isinstance(value, Coordinator)]
        hint = f"; there is {', '.join(f'{module_name}:{other}' for other in others)}" if others else ""
        what = "nothing" if found is None else f"a {type(found).__name__}, not a Coordinator,"
        raise ConfigurationError(f"there is {what} at {path}{hint}")
    return found


def _child() -> None:
    """One of several processes: reads its `Spec` from the lifeline, its standard input."""
    lifeline = socket.socket(fileno=os.dup(0))
    with lifeline.makefile("rb") as lines:
        spec = msgspec.json.decode(lines.readline(), type=Spec)
    listener = socket.socket(fileno=spec.fd)
    listener.setblocking(False)
    run(load(spec.path), spec.url, spec.settings, listener, lambda: lifeline.sendall(b"ready\n"), lifeline)


if __name__ == "__main__":
    _child()
