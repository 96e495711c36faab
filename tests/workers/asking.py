"""A server with short leases, questions that are asked of it, and workers that a test plays by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coordinator.config import Settings
from tests.api.serving import Client, Reply, new_key, server, tenant
from tests.support.postgres import Databases

LEASE_MS = 1_500
COORDINATOR = "tests.workers.research:coordinator"


@dataclass(frozen=True)
class Service:
    """``client`` has every scope."""

    url: str
    address: str
    client: Client
    pid: int

    @property
    def key(self) -> str:
        assert self.client.key is not None
        return self.client.key

    def register(self, name: str = "w1", **more: Any) -> ByHand:
        body = {"name": name, "capabilities": ["research"], "max_tasks": 3} | more
        reply = self.client.call("POST", "/v1/workers", body)
        assert reply.status in (200, 201), reply.body
        return ByHand(self.client, reply.json["id"], reply)

    def ask(
        self,
        topic: str | None = None,
        type: str = "question",
        ceiling: dict[str, Any] | None = None,
        **input: str,
    ) -> Question:
        """About something of its own unless a topic is given: the same question asked twice at once would be one reading."""
        body = {"type": type, "input": {"topic": topic or new_key()} | input}
        return Question(self.client, body if ceiling is None else body | {"ceiling": ceiling})

    def workers(self) -> dict[str, Any]:
        return {item["name"]: item for item in self.client.get("/v1/workers?limit=200").json["items"]}

    def receipts(self, kind: str) -> list[dict[str, Any]]:
        items = self.client.get(f"/v1/receipts?kind={kind}&limit=200").json["items"]
        return [item["body"] for item in items]


@contextmanager
def serving(postgres: Databases, **settings: Any) -> Iterator[Service]:
    url = postgres.create()
    _, key = asyncio.run(tenant(url, "first"))
    limits = Settings(**{"worker_lease_ms": LEASE_MS, "worker_poll_ms": 50, "drain_s": 1, **settings})
    with server(url, limits, path=COORDINATOR) as (address, pid):
        yield Service(url, address, Client(address, key), pid)
    postgres.drop(url)


@dataclass
class ByHand:
    """A worker whose every step a test makes."""

    client: Client
    id: str
    registered: Reply

    def claim(self, wait: int = 20, **query: object) -> list[dict[str, Any]]:
        tasks: list[dict[str, Any]] = self.polled(wait, **query).json["tasks"]
        return tasks

    def polled(self, wait: int = 20, **query: object) -> Reply:
        more = "".join(f"&{name}={value}" for name, value in query.items())
        return self.client.call("POST", f"/v1/workers/{self.id}/claim?wait={wait}{more}")

    def one(self) -> dict[str, Any]:
        (task,) = self.claim(limit=1)
        return task

    def heartbeat(self, task: dict[str, Any], *progress: str) -> Reply:
        return self._say("heartbeat", task, progress=list(progress))

    def complete(self, task: dict[str, Any], summary: str = "buzz", **more: Any) -> Reply:
        return self._say("complete", task, **{"result": {"summary": summary}} | more)

    def fail(self, task: dict[str, Any], **more: Any) -> Reply:
        return self._say("fail", task, **more)

    def drain(self, limit_ms: int) -> Reply:
        return self.client.call("POST", f"/v1/workers/{self.id}/drain", {"limit_ms": limit_ms})

    def _say(self, verb: str, task: dict[str, Any], **more: Any) -> Reply:
        body = {"fencing_token": task["fencing_token"]} | more
        return self.client.call("POST", f"/v1/tasks/{task['id']}/{verb}", body)


@dataclass
class Question:
    """A decision that somebody waits for in a thread."""

    client: Client
    body: dict[str, Any]
    key: str = field(default_factory=new_key)

    def __post_init__(self) -> None:
        self._reply: list[Reply] = []
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self._reply.append(self.client.decide(self.body, key=self.key, prefer="wait=60"))

    @property
    def answered(self) -> bool:
        return bool(self._reply)

    def answer(self) -> Any:
        self._thread.join(60)
        assert self._reply, "no answer within 60 s"
        return self._reply[0].json

    def findings(self) -> Any:
        """The evidence that the workers gave."""
        (item,) = self.answer()["evidence"]
        return item
