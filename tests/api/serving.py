"""The server as a process of its own, a client for it, and tenants with keys."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import msgspec
from uuid_utils.compat import uuid7

from coordinator.app import serve
from coordinator.config import Settings
from coordinator.store.database import open_database
from coordinator.store.keys import SCOPES, create_key, tenant_named

ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem document, whose shape is checked on the way."""
        assert self.headers["content-type"] == "application/problem+json", self.body
        problem = self.json
        assert problem["status"] == self.status
        assert problem["type"] == f"urn:coordinator:problem:{problem['code']}"
        assert problem["title"]
        assert problem["detail"]
        assert problem["retry"] in {"same-key", "new-key", "never"}
        code: str = problem["code"]
        return code


@dataclass(frozen=True)
class Client:
    """Calls one server with one key; every call is a connection of its own."""

    address: str
    key: str | None

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Reply:
        """``body``: bytes as they are, a generator for a chunked body, anything else as JSON."""
        place = urlsplit(self.address)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        raw = body if body is None or isinstance(body, bytes | Iterator) else json.dumps(body).encode()
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            sent = list(headers)
            if self.key is not None:
                sent.append(("Authorization", f"Bearer {self.key}"))
            if isinstance(raw, bytes):
                sent.append(("Content-Length", str(len(raw))))
            elif raw is not None:
                sent.append(("Transfer-Encoding", "chunked"))
            for name, value in sent:
                connection.putheader(name, value)
            connection.endheaders(raw, encode_chunked=isinstance(raw, Iterator))
            answer = connection.getresponse()
            return Reply(
                answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.call("GET", path)

    def decide(self, body: object, *, key: str | None = None, prefer: str | None = None) -> Reply:
        headers = [("Idempotency-Key", key or new_key()), ("Content-Type", "application/json")]
        return self.call("POST", "/v1/decisions", body, [*headers, ("Prefer", prefer)] if prefer else headers)


def new_key() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


def quote(record: str | None = None, *, hours: int = 8, **more: object) -> dict[str, Any]:
    """A request for a quote, of a record of its own unless one is named."""
    input = {"site": "sg-1", "hours": hours} | more
    return {"type": "quote", "input": input, "record": {"kind": "quote", "id": record or new_key()}}


@contextmanager
def server(
    url: str,
    settings: Settings | None = None,
    *,
    processes: int = 1,
    code: int = 0,
    path: str = "tests.api.quotes:coordinator",
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, int]]:
    """Its address and process id. It is stopped at the end with SIGTERM, and has to end with ``code``. ``path`` is what it
    serves, ``env`` is added to its environment."""
    spec = msgspec.json.encode([path, url, settings or Settings(), processes]).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.api.serving"],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdout:
        try:
            process.stdin.write(spec)
            process.stdin.close()
            address = process.stdout.readline().strip()
            assert address, f"the server ended with {process.wait(10)} before it was ready"
            yield address, process.pid
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == code
        finally:
            process.kill()


async def tenant(url: str, name: str, *scopes: str) -> tuple[UUID, str]:
    """A tenant and a key with these scopes; all of them if none is named."""
    async with open_database(url, Settings(pool_size=1)) as database:
        async with database.pool.acquire() as connection:
            found = await tenant_named(connection, name, uuid7())
        async with database.transaction(found) as connection:
            return found, await create_key(connection, found, uuid7(), name, scopes or SCOPES)


async def rows(url: str) -> dict[str, int]:
    """How many rows each table has, of all tenants together, as the tenants themselves see them."""
    counts = dict.fromkeys(("decisions", "operations", "receipts", "records", "record_versions"), 0)
    connection = await asyncpg.connect(url)
    try:
        for [id] in await connection.fetch("SELECT tenant_id FROM tenants"):
            async with connection.transaction():
                await connection.execute(
                    f"SET LOCAL ROLE coordinator_app; SET LOCAL coordinator.tenant = '{id}'"
                )
                for table in counts:
                    counts[table] += await connection.fetchval(f"SELECT count(*) FROM {table}")
    finally:
        await connection.close()
    return counts


def main() -> None:
    path, url, settings, processes = msgspec.json.decode(
        sys.stdin.read(), type=tuple[str, str, Settings, int]
    )

    def ready(address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()

    serve(
        path,
        url=url,
        settings=settings,
        port=0,
        processes=processes,
        on_ready=ready,
    )


if __name__ == "__main__":
    main()
