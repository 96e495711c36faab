"""The outside world of the demo, as one HTTP process: facts to read, effects to perform, faults on demand.

    GET  /customers/{id}  /capacity/{site}  /costs/{id}       facts with ETag revisions
    GET  /rates/{base}/{quote}                                 reference rates of the ECB
    GET  /calendar/{country}/{date}?working_days=N             public holidays
    POST /effects/{name}                                       performs once per Idempotency-Key
    GET  /effects/{name}/{key}                                 lookup
    GET  /ledger[?name=]                                       what really happened, and how often
    PUT  /control, GET /control                                faults: see `faults`
    PUT  /resources/{kind}/{id}                                moves a fact: some of its fields
    GET  /stats                                                requests and concurrency per route
    GET  /load, DELETE /load                                   calls at once and per minute, by route: see `load`; count anew

    python -m coordinator.demo.providers --port 0 --data DIR [--fsync] [--die-with-parent]

prints one line `{"url", "pid"}` once it listens on 127.0.0.1, serves until SIGTERM or SIGINT and exits 0.
What the ledger promises is said in `ledger`; everything else is in memory. It uses the low-level server of
aiohttp and a dictionary of routes, no router: load tests share a machine with this process.
"""

import argparse
import datetime
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

import anyio
import msgspec
import uvloop
from aiohttp import web

from coordinator.demo import published
from coordinator.demo.answers import allow, as_json, encoded, problem, problem_of, revision
from coordinator.demo.effects import Effects
from coordinator.demo.facts import FACTS, Facts
from coordinator.demo.faults import FAULTY_ROUTES, NO_FAULT, Control, Fault, Request
from coordinator.demo.launch import die_with_parent
from coordinator.demo.ledger import Ledger, LedgerCorrupt
from coordinator.demo.load import Load
from coordinator.demo.refusals import Refusal

_GRACE_S = 0.5
_CLIENT_GONE_POLL_S = 0.05

Route = Callable[[web.BaseRequest, str, Fault], Awaitable[web.Response]]


class Gauge(msgspec.Struct):
    """How many requests a route has had, has now, and had at most at one time."""

    requests: int = 0
    concurrent: int = 0
    max_concurrent: int = 0


class DemoProviders:
    """One instance per process; `answer` is the handler of every request."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._facts = Facts()
        self._control = Control()
        self._effects = Effects(ledger, self._control)
        self._routes: dict[str, Route] = {
            **{kind: self._fact_route(kind) for kind in FACTS},
            "calendar": self._calendar,
            "effects": self._effects.route,
            "ledger": self._read_ledger,
            "control": self._control_table,
            "resources": self._move_fact,
            "stats": self._stats,
            "load": self._show_load,
        }
        self._load = Load()
        self._gauges = {route: Gauge() for route in self._routes}

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Count the request and let it meet its fault, if there is one."""
        path = request.raw_path.partition("?")[0]
        route, _, rest = path[1:].partition("/")
        gauge = self._gauges.get(route)
        if gauge is None:
            return problem(Refusal("not-found", f"There is no {path}."))
        gauge.requests += 1
        gauge.concurrent += 1
        gauge.max_concurrent = max(gauge.max_concurrent, gauge.concurrent)
        try:
            if route not in FAULTY_ROUTES:
                return await self._act(request, route, rest, NO_FAULT)
            with self._load.of(route, rest).call():
                if self._control.quiet:
                    return await self._act(request, route, rest, NO_FAULT)
                return await self._under_faults(request, Request(request.method, unquote(path), route), rest)
        except web.HTTPRequestEntityTooLarge as error:
            return problem(Refusal("payload-too-large", error.text or ""))
        finally:
            gauge.concurrent -= 1

    async def _act(self, request: web.BaseRequest, route: str, rest: str, fault: Fault) -> web.Response:
        try:
            return await self._routes[route](request, rest, fault)
        except Refusal as refusal:
            return problem(refusal)

    async def _under_faults(self, request: web.BaseRequest, seen: Request, rest: str) -> web.Response:
        if request.method != "GET":
            await request.read()  # now: after the caller has gone it cannot be read, and we act all the same
        fault = self._control.claim(seen)
        if fault.delay_ms:
            await anyio.sleep(fault.delay_ms / 1000)
        if fault.hang and not fault.lose_answer:
            await self._hang(request)
            if request.transport is None:
                return _without_answer(request)
        if fault.status is not None:
            return _injected(fault.status, fault.retry_after_s)
        answer = await self._act(request, seen.route, rest, fault)
        if fault.lose_answer:
            if fault.hang:
                await self._hang(request)
            return _without_answer(request)
        return answer

    async def _hang(self, request: web.BaseRequest) -> None:
        replaced = self._control.replaced
        while request.transport is not None and not replaced.is_set():
            with anyio.move_on_after(_CLIENT_GONE_POLL_S):
                await replaced.wait()

    def _fact_route(self, kind: str) -> Route:
        async def read(request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
            allow(request, "GET")
            fact_id = unquote(rest) if "%" in rest else rest
            fact = self._facts.bump(kind, fact_id) if fault.bump_revision else self._facts.read(kind, fact_id)
            return revision(request, fact.body, fact.etag)

        return read

    async def _calendar(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        allow(request, "GET")
        country, _, day = unquote(rest).partition("/")
        working_days = request.query.get("working_days", "1")
        try:
            start, steps = datetime.date.fromisoformat(day), int(working_days)
        except ValueError as error:
            raise Refusal("malformed-request", f"/calendar/SG/2026-12-24?working_days=5: {error}.") from None
        answer, etag = published.working_day(country, start, steps)
        return revision(request, msgspec.json.encode(answer), etag)

    async def _read_ledger(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        allow(request, "GET")
        name = request.query.get("name")
        items = [
            {"key": effect.key, "name": effect.name, "count": effect.count, "payload": effect.payload}
            for effect in self._ledger.effects()
            if name is None or effect.name == name
        ]
        return as_json({"items": items})

    async def _control_table(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        allow(request, "GET", "PUT")
        if request.method == "PUT":
            self._control.replace(await request.read())
            self._effects.forget_lags()
        return as_json(self._control.in_force())

    async def _move_fact(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        allow(request, "PUT")
        kind, _, fact_id = unquote(rest).partition("/")
        if kind not in FACTS:
            raise Refusal("not-found", f"There is no {kind!r}; there are {tuple(FACTS)}.")
        try:
            fields = _FIELDS.decode(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal("malformed-request", f"The fields to set, as an object: {error}.") from None
        fact = self._facts.put(kind, fact_id, fields)
        return encoded(fact.body, headers={"ETag": fact.etag})

    async def _show_load(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        allow(request, "GET", "DELETE")
        if request.method == "DELETE":
            self._load.forget()
        return as_json({"items": self._load.items()})

    async def _stats(self, request: web.BaseRequest, rest: str, fault: Fault) -> web.Response:
        allow(request, "GET")
        return as_json(self._gauges)


_FIELDS = msgspec.json.Decoder(dict[str, object])


def _injected(status: int, retry_after_s: int | None) -> web.Response:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if status < 400:
        return web.Response(status=status, headers=headers)
    return problem_of(status, "injected", "This status was asked for in /control.", headers)


def _without_answer(request: web.BaseRequest) -> web.Response:
    """Drop the connection. The response returned is never sent: there is nothing left to write to."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def serve(port: int, data: Path, *, fsync: bool) -> None:
    """Serve until SIGTERM or SIGINT; prints the one line once connections are accepted."""
    ledger = Ledger(data, wait_for_sync=fsync)
    server = web.Server(DemoProviders(ledger).answer, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=_GRACE_S)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    try:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await site.start()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ledger.sync_forever)
                ready = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "pid": os.getpid()}
                print(msgspec.json.encode(ready).decode(), flush=True)
                await anext(signals)
                await runner.cleanup()
                tasks.cancel_scope.cancel()
    finally:
        ledger.close()


def main() -> None:
    """Command line of the process."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.demo.providers", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True, help="folder of the ledger")
    parser.add_argument("--fsync", action="store_true", help="answer an effect only after its fdatasync")
    parser.add_argument("--die-with-parent", type=int, nargs="?", const=0, metavar="PID")
    parser.add_argument("--json", action="store_true", help="one JSON line when ready (it always is)")
    options = parser.parse_args()
    if options.die_with_parent is not None:
        die_with_parent(options.die_with_parent)
    published.warm()
    gc.freeze()
    try:
        uvloop.run(serve(options.port, options.data, fsync=options.fsync))
    except (LedgerCorrupt, OSError) as error:
        sys.exit(f"demo providers: {error}")


if __name__ == "__main__":
    main()
