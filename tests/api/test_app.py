"""The whole process: how it starts, stops, keeps its siblings alive, and what it says without its database."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]  # a tool of the tests alone
import pytest

from coordinator.app import load, serve
from coordinator.config import Settings
from coordinator.embedded import EmbeddedPostgres
from coordinator.errors import ConfigurationError
from coordinator.store.migrate import migrate
from tests.api.conftest import Running
from tests.api.quotes import coordinator
from tests.api.serving import Client, Reply, new_key, quote, server, tenant
from tests.support.waiting import eventually_now


def owner_of(url: str) -> str:
    return asyncio.run(tenant(url, "only"))[1]


def listening(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(address).port or 0)) == 0


def test_a_running_service_is_alive_and_ready(client: Client) -> None:
    assert client.get("/healthz").status == 200
    assert client.get("/readyz").status == 200


def test_metrics_are_prometheus_text_without_a_key(running: Running, client: Client) -> None:
    client.decide(quote())
    metrics = Client(running.address, None).get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert b'coordinator_decisions_total{status="committed",type="quote"}' in metrics.body


def test_no_such_path_and_no_such_method_are_problems_too(client: Client) -> None:
    assert client.get("/v1/nothing").code == "not-found"
    assert client.get("/").code == "not-found"
    options = client.call("OPTIONS", "/v1/decisions")
    assert (options.status, options.headers["allow"], options.body) == (204, "GET, OPTIONS, POST", b"")
    refused = client.call("PUT", "/v1/decisions")
    assert (refused.status, refused.code) == (405, "method-not-allowed")
    assert "POST" in refused.headers["allow"]
    assert refused.headers["cache-control"] == "no-store"


def test_a_signal_lets_what_runs_finish_while_new_decisions_are_refused(
    database_url: str, tmp_path: Path
) -> None:
    key, gate = owner_of(database_url), tmp_path / "gate"
    with server(database_url) as (address, pid), ThreadPoolExecutor(1) as pool:
        client = Client(address, key)
        running = pool.submit(client.decide, quote(gate=str(gate)))
        eventually_now(lambda: client.get("/v1/decisions?status=running").json["items"])
        os.kill(pid, signal.SIGTERM)
        eventually_now(lambda: client.get("/readyz").status == 503)
        assert client.get("/readyz").code == "draining"
        refused = client.decide(quote())
        assert (refused.status, refused.code, refused.json["retry"]) == (503, "draining", "same-key")
        assert refused.headers["retry-after"] == "1"
        gate.touch()
        assert running.result().status == 201
        eventually_now(lambda: not listening(address))


def test_an_idle_process_stops_at_once(database_url: str) -> None:
    with server(database_url) as (_, pid):
        began = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        psutil.Process(pid).wait(10)
    assert time.monotonic() - began < 5


def test_a_dead_sibling_is_replaced(database_url: str) -> None:
    key = owner_of(database_url)
    with server(database_url, processes=2) as (address, pid):
        client = Client(address, key)
        before = psutil.Process(pid).children()
        assert len(before) == 2
        before[0].kill()

        def replaced() -> bool:
            now = psutil.Process(pid).children()
            return len(now) == 2 and before[0] not in now and before[1] in now

        eventually_now(replaced)
        assert client.decide(quote()).status == 201


def test_every_sibling_shows_the_metrics_of_all(database_url: str) -> None:
    key = owner_of(database_url)
    with server(database_url, processes=2) as (address, _):
        client = Client(address, key)
        for _ in range(10):
            client.decide(quote())
        shown = {
            line
            for _ in range(10)
            for line in client.get("/metrics").body.decode().splitlines()
            if "decisions_total{" in line
        }
    assert shown == {'coordinator_decisions_total{status="committed",type="quote"} 10.0'}


def test_siblings_end_with_their_supervisor_even_if_it_is_killed(database_url: str) -> None:
    with server(database_url, processes=2, code=-signal.SIGKILL) as (address, pid):
        siblings = psutil.Process(pid).children()
        os.kill(pid, signal.SIGKILL)
        assert psutil.wait_procs(siblings, timeout=20)[1] == []
        assert not listening(address)


def test_without_its_database_it_is_alive_but_not_ready(crashable_postgres: EmbeddedPostgres) -> None:
    asyncio.run(migrate(crashable_postgres.url))
    key = owner_of(crashable_postgres.url)
    with server(crashable_postgres.url, Settings(command_timeout_s=1.0)) as (address, _):
        client = Client(address, key)
        assert client.decide(quote()).status == 201
        crashable_postgres.stop()
        eventually_now(lambda: client.get("/readyz").status == 503)
        assert client.get("/readyz").code == "overloaded"
        assert client.get("/healthz").status == 200
        refusals: list[Reply] = [client.decide(quote()), client.get("/v1/decisions")]
        assert {reply.code for reply in refusals} == {"overloaded"}
        assert {reply.json["retry"] for reply in refusals} == {"same-key"}
        crashable_postgres.start()
        eventually_now(lambda: client.get("/readyz").status == 200)
        assert client.decide(quote()).status == 201


def test_on_a_database_that_was_not_migrated_it_is_not_ready(empty_database_url: str) -> None:
    with server(empty_database_url) as (address, _):
        said = Client(address, None).get("/readyz")
        assert said.status == 503
        assert "coordinator migrate" in said.json["detail"]


def test_a_coordinator_is_found_by_its_name() -> None:
    assert load("tests.api.quotes:coordinator") is coordinator


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("quotes", "not MODULE:NAME"),
        ("quotes:", "not MODULE:NAME"),
        ("a-b:c", "not MODULE:NAME"),
        ("no_such_module:coordinator", "no module 'no_such_module'"),
        ("tests.api.no_such:coordinator", "no module 'tests.api.no_such'"),
        ("tests.api.quotes:nothing", "there is tests.api.quotes:coordinator"),
        ("tests.api.quotes:quote", "a DecisionType, not a Coordinator"),
    ],
)
def test_what_is_no_coordinator_is_told_with_what_to_mend(path: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        load(path)


def test_a_module_that_cannot_be_imported_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load("broken_module:coordinator")
    sys.path.remove(str(tmp_path))


def test_the_number_of_processes_is_bounded() -> None:
    with pytest.raises(ConfigurationError, match="processes"):
        serve("tests.api.quotes:coordinator", url="", settings=Settings(), processes=65)


def test_a_key_that_was_used_here_replays_after_a_restart(database_url: str) -> None:
    key, idempotency_key, body = owner_of(database_url), new_key(), quote()
    with server(database_url) as (address, _):
        first = Client(address, key).decide(body, key=idempotency_key)
    with server(database_url) as (address, _):
        again = Client(address, key).decide(body, key=idempotency_key)
    assert (again.status, again.body) == (200, first.body)
