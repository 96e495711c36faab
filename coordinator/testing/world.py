"""The world of a drill: server processes that can be killed, stopped and started, the provider's ledger, and an HTTP client.

The drill only looks from outside: it posts, it reads, it asks the provider what really happened. What it starts itself, it can also
kill; against a service that somebody else runs, the scenarios that need that are left out, and the report says so.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aiohttp
import anyio
import asyncpg
import msgspec
from uuid_utils.compat import uuid7

from coordinator.config import Settings
from coordinator.demo.launch import Process, Providers, package_environment, python_module
from coordinator.store import keys
from coordinator.store.database import open_database
from coordinator.store.migrate import migrate

LEASE_MS = 1000


class Reply(msgspec.Struct, frozen=True):
    """``body`` is the parsed JSON, ``raw`` its bytes. ``status`` 0: the connection broke, nobody knows what happened."""

    status: int
    body: Any
    raw: bytes
    headers: Mapping[str, str]


def server_environment(database_url: str, providers_url: str) -> dict[str, str]:
    """The settings of the drill's servers."""
    return {
        "DATABASE_URL": database_url,
        "COORDINATOR_PROVIDERS_URL": providers_url,
        "COORDINATOR_LEASE_MS": str(LEASE_MS),
        "COORDINATOR_POLL_MS": "100",
    }


class ServerProcess(Process):
    """One server process on the drill's database. It dies with us, and comes back with `start`."""

    def __init__(
        self, database_url: str, providers_url: str, *, failpoints: str = "", log: Path | None = None
    ) -> None:
        env = package_environment() | server_environment(database_url, providers_url)
        env["COORDINATOR_FAILPOINTS"] = failpoints
        super().__init__(python_module("coordinator.testing.server"), env=env, log=log)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class World:
    """What scenarios act on. ``servers`` are base URLs; ``start`` is None and ``database_url`` empty where the drill does not own
    the processes; ``reviewer`` is a key of somebody else, if there is one."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: list[str],
        providers_url: str,
        key: str,
        start: Callable[[str], ServerProcess] | None,
        database_url: str = "",
        tenant: UUID | None = None,
        reviewer: str = "",
    ) -> None:
        self._session = session
        self.servers = servers
        self.providers_url = providers_url
        self.start = start
        self.database_url = database_url
        self.tenant = tenant
        self.reviewer = reviewer
        self._headers = {"Authorization": f"Bearer {key}"}
        self.run = uuid4().hex[:8]

    def name(self, text: str) -> str:
        """A name of this run's own, so that a drill can be repeated on one database."""
        return f"{text}-{self.run}"

    async def of_another_tenant(self) -> World:
        """The same world seen by a new tenant. Its servers are a list of its own."""
        tenant, key, reviewer = await _new_tenant(self.database_url)
        place = (self.start, self.database_url, tenant, reviewer)
        return World(self._session, [*self.servers], self.providers_url, key, *place)

    async def post(self, key: str, body: Mapping[str, Any], *, server: int = 0, wait_s: int = 15) -> Reply:
        """Ask for a decision."""
        headers = {"Idempotency-Key": key, "Prefer": f"wait={wait_s}"}
        return await self.call("POST", f"{self.servers[server]}/v1/decisions", body=body, headers=headers)

    async def quote(
        self, key: str, record: str, *, site: str, discount: int = 5, server: int = 0, **more: Any
    ) -> Reply:
        body = {
            "type": "drill-quote",
            "input": {"site": site, "hours": 1, "discount": discount},
            "record": {"kind": "drill-quote", "id": record, **more},
        }
        return await self.post(key, body, server=server)

    async def review(self, decision: str, verdict: str, etag: str = "1", *, server: int = 0) -> Reply:
        """The reviewer's verdict on what was shown under ``etag``."""
        headers = {"If-Match": f'"{etag}"', "Authorization": f"Bearer {self.reviewer}"}
        url = f"{self.servers[server]}/v1/decisions/{decision}/review"
        return await self.call("POST", url, body={"verdict": verdict, "note": "drill"}, headers=headers)

    async def get(self, path: str, *, server: int = 0) -> Any:
        reply = await self.call("GET", self.servers[server] + path)
        if reply.status != 200:
            raise AssertionError(f"GET {path} answered {reply.status}: {reply.raw[:300]!r}")
        return reply.body

    async def all_of(self, path: str) -> list[Any]:
        """Every item of a list, page by page."""
        items: list[Any] = []
        cursor = ""
        while True:
            page = await self.get(f"{path}{'&' if '?' in path else '?'}limit=200{cursor}")
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            cursor = f"&cursor={page['next_cursor']}"

    async def history(self, kind: str, id: str) -> list[Any]:
        """The versions of a record, oldest first; none of one that does not exist."""
        path = f"/v1/records/{kind}/{id}/history"
        if (await self.call("GET", self.servers[0] + path)).status == 404:
            return []
        return sorted(await self.all_of(path), key=lambda version: int(version["version"]))

    async def put_record(self, kind: str, id: str, data: Mapping[str, Any], version: int) -> Reply:
        headers = {"If-Match": f'"{version}"'} if version else {"If-None-Match": "*"}
        return await self.call("PUT", f"{self.servers[0]}/v1/records/{kind}/{id}", body=data, headers=headers)

    async def faults(self, **routes: Mapping[str, Any]) -> None:
        """Set the provider's faults; none clears them."""
        reply = await self.call("PUT", self.providers_url + "/control", body=routes)
        if reply.status >= 300:
            raise AssertionError(f"the provider refused the faults {routes}: {reply.raw!r}")

    async def ledger(self) -> dict[str, int]:
        """What really happened at the provider: how often, by key."""
        return {item["key"]: item["count"] for item in await self.happened()}

    async def happened(self, effect: str = "") -> list[Any]:
        """The provider's ledger with the payloads, of one effect if it is named."""
        reply = await self.call("GET", f"{self.providers_url}/ledger{effect and f'?name={effect}'}")
        items: list[Any] = reply.body["items"]
        return items

    async def call(
        self, method: str, url: str, *, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] = {}
    ) -> Reply:
        try:
            async with self._session.request(
                method, url, json=body, headers={**self._headers, **headers}
            ) as response:
                raw = await response.read()
                parsed = msgspec.json.decode(raw) if raw and "json" in response.content_type else None
                return Reply(response.status, parsed, raw, dict(response.headers))
        except (aiohttp.ClientError, TimeoutError) as error:
            return Reply(0, None, str(error).encode(), {})


async def until(condition: Callable[[], Any], *, seconds: float = 30) -> Any:
    """Ask again until ``condition`` (async) gives something true; that, or an `AssertionError` when the time is over."""
    with anyio.move_on_after(seconds):
        while True:
            if found := await condition():
                return found
            await anyio.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {condition.__doc__ or condition}")


@asynccontextmanager
async def own_world(
    database_url: str, log: Path | None = None, *, served_through: str | None = None
) -> AsyncIterator[World]:
    """A world on the caller's database, migrated, in a tenant of its own: a provider and two server processes, which reach the
    database through another URL (a pooler) if one is given."""
    await migrate(database_url)
    tenant, key, reviewer = await _new_tenant(database_url)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-"))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        )
        providers = await stack.enter_async_context(Providers(Path(folder), log=log))

        def start(failpoints: str) -> ServerProcess:
            url = served_through or database_url
            return ServerProcess(url, providers.url, failpoints=failpoints, log=log)

        servers = [await stack.enter_async_context(start("")) for _ in range(2)]
        urls = [server.url for server in servers]
        yield World(session, urls, providers.url, key, start, database_url, tenant, reviewer)


@asynccontextmanager
async def running_world(url: str, key: str, providers_url: str) -> AsyncIterator[World]:
    """A world around a service that somebody else runs."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield World(session, [url, url], providers_url, key, None)


async def _new_tenant(database_url: str) -> tuple[UUID, str, str]:
    """Its id, a key of it with all scopes, and one of a reviewer."""
    connection = await asyncpg.connect(database_url)
    try:
        tenant = await keys.tenant_named(connection, f"drill-{uuid4().hex[:8]}", uuid7())
    finally:
        await connection.close()
    async with (
        open_database(database_url, Settings(pool_size=1)) as database,
        database.transaction(tenant) as transaction,
    ):
        asks = await keys.create_key(transaction, tenant, uuid7(), "drill", keys.SCOPES)
        reviews = await keys.create_key(transaction, tenant, uuid7(), "drill reviewer", ["review"])
        return tenant, asks, reviews
