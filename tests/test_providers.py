"""The demo providers, from outside: a real process, a real client, each fault once."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from coordinator.demo.launch import LaunchFailed, Providers, launch, package_environment, python_module

pytestmark = pytest.mark.anyio


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: Any


class Client:
    """Calls the providers at `url`; `pay` performs the effect that most tests use."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 5,
    ) -> Answer:
        data = None if body is None else json.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, self._url + path, data=data, headers=headers, timeout=timeout
        ) as answer:
            text = await answer.text()
            return Answer(answer.status, answer.headers, json.loads(text) if text else None)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def pay(self, key: str, payload: Any = None, timeout_s: float = 5) -> Answer:
        body = {"amount_minor": 100} if payload is None else payload
        return await self.call("POST", "/effects/pay", body, {"Idempotency-Key": key}, timeout_s)

    async def control(self, table: Any) -> Answer:
        return await self.call("PUT", "/control", table)

    async def counts(self) -> dict[str, int]:
        ledger = (await self.get("/ledger")).body
        return {item["key"]: item["count"] for item in ledger["items"]}


@pytest.fixture(scope="module")
def shared_providers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Providers]:
    with Providers(tmp_path_factory.mktemp("ledger")) as providers:
        yield providers


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def client(shared_providers: Providers, session: aiohttp.ClientSession) -> AsyncIterator[Client]:
    """Of the shared process, without faults before and after; tests use ids and keys of their own."""
    client = Client(session, shared_providers.url)
    await client.control({})
    yield client
    await client.control({})


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 5) -> None:
    """Ask again and again: the process under test has no other way to tell us."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110  # another process holds the state
            await asyncio.sleep(0.01)


async def concurrent(client: Client, route: str) -> int:
    return int((await client.get("/stats")).body[route]["concurrent"])


# Facts


async def test_a_fact_keeps_its_data_and_revision(client: Client) -> None:
    first, again = await client.get("/capacity/sg-1"), await client.get("/capacity/sg-1")
    assert first.status == 200
    assert first.body.keys() == {"site", "available_hours", "crew"}
    assert (first.body, first.headers["ETag"]) == (again.body, again.headers["ETag"])


async def test_customers_and_costs_have_their_shapes(client: Client) -> None:
    customer = (await client.get("/customers/c-1")).body
    assert customer | {"name": "", "discount_percent": 0} == {
        "id": "c-1",
        "name": "",
        "segment": "maintenance",
        "country": "SG",
        "discount_percent": 0,
    }
    cost = (await client.get("/costs/p-1")).body
    assert cost.keys() == {"id", "estimate_minor", "currency"}
    assert cost["currency"] == "EUR"


@pytest.mark.parametrize("etag", ["{}", "W/{}", '"other", {}', "*"])
async def test_a_known_revision_is_not_sent_again(client: Client, etag: str) -> None:
    known = (await client.get("/costs/p-2")).headers["ETag"]
    answer = await client.get("/costs/p-2", If_None_Match=etag.format(known))
    assert (answer.status, answer.body, answer.headers["ETag"]) == (304, None, known)


async def test_another_revision_is_sent(client: Client) -> None:
    assert (await client.get("/costs/p-2", If_None_Match='"0"')).status == 200


@pytest.mark.parametrize("path", ["/customers/missing-1", "/capacity/missing-", "/costs/", "/nowhere"])
async def test_an_unknown_thing_is_a_404_problem(client: Client, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status, answer.body["code"]) == (404, "not-found")
    assert answer.headers["Content-Type"] == "application/problem+json"


async def test_a_fact_can_be_set_and_its_revision_rises_by_one(client: Client) -> None:
    before = await client.get("/capacity/moved")
    moved = await client.call("PUT", "/resources/capacity/moved", {"available_hours": 6})
    after = await client.get("/capacity/moved")
    assert after.body == moved.body == before.body | {"available_hours": 6}
    assert int(after.headers["ETag"].strip('"')) == int(before.headers["ETag"].strip('"')) + 1


@pytest.mark.parametrize(
    "fields", [{"hours": 6}, {"available_hours": "6"}, {"available_hours": -1}, {"site": "other"}, [6]]
)
async def test_a_fact_cannot_be_set_to_something_else(client: Client, fields: Any) -> None:
    answer = await client.call("PUT", "/resources/capacity/kept", fields)
    assert (answer.status, answer.body["code"]) == (400, "malformed-request")


async def test_a_wrong_method_is_refused(client: Client) -> None:
    assert (await client.call("POST", "/capacity/sg-1", {})).status == 405


# Published data


async def test_a_rate_from_the_euro_is_the_published_figure(client: Client) -> None:
    answer = await client.get("/rates/EUR/SGD")
    assert answer.body.keys() == {"base", "quote", "rate", "published"}
    assert 1 < float(answer.body["rate"]) < 3
    assert answer.headers["ETag"] == f'"{answer.body["published"]}"'
    assert (await client.get("/rates/EUR/SGD", If_None_Match=answer.headers["ETag"])).status == 304


async def test_a_cross_rate_agrees_with_both_published_rates(client: Client) -> None:
    to_sgd, to_usd, cross = [
        float((await client.get(f"/rates/{pair}")).body["rate"]) for pair in ("EUR/SGD", "EUR/USD", "USD/SGD")
    ]
    assert cross == pytest.approx(to_sgd / to_usd, rel=1e-5)


async def test_a_currency_that_is_no_longer_published_answers_with_its_last_day(client: Client) -> None:
    assert (await client.get("/rates/EUR/DEM")).status == 404
    assert (await client.get("/rates/EUR/RUB")).body["published"].startswith("2022-")


@pytest.mark.parametrize("pair", ["EUR/XXX", "eur/sgd", "EUR", "EUR/"])
async def test_an_unknown_currency_is_a_404_problem(client: Client, pair: str) -> None:
    assert (await client.get(f"/rates/{pair}")).status == 404


async def test_working_days_step_over_weekends_and_public_holidays(client: Client) -> None:
    answer = await client.get("/calendar/SG/2026-12-24?working_days=2")
    assert answer.body == {
        "country": "SG",
        "from": "2026-12-24",
        "working_days": 2,
        "date": "2026-12-29",
        "holidays_skipped": [{"date": "2026-12-25", "name": "Christmas Day"}],
    }
    same = await client.get("/calendar/SG/2026-12-24?working_days=2", If_None_Match=answer.headers["ETag"])
    assert same.status == 304


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("XX/2026-01-01", 404),
        ("SG/tomorrow", 400),
        ("SG/2026-01-01?working_days=x", 400),
        ("SG/2026-01-01?working_days=999", 400),
        ("SG/1066-01-01", 400),
    ],
)
async def test_a_calendar_refuses_what_it_does_not_know(client: Client, path: str, status: int) -> None:
    assert (await client.get(f"/calendar/{path}")).status == status


# Effects


async def test_an_effect_happens_once_per_key(client: Client) -> None:
    first, again = await client.pay("once"), await client.pay("once")
    assert (first.status, again.status) == (201, 200)
    assert first.body == again.body
    assert first.body | {"reference": ""} == {"key": "once", "name": "pay", "reference": "", "count": 1}
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    assert (await client.counts())["once"] == 1


async def test_concurrent_requests_with_one_key_are_one_effect(client: Client) -> None:
    await client.control({"/effects/pay": {"delay_ms": 50}})
    answers = await asyncio.gather(*(client.pay("crowded") for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [200] * 19 + [201]
    assert len({json.dumps(answer.body) for answer in answers}) == 1
    assert (await client.counts())["crowded"] == 1


async def test_a_lookup_shows_the_effect_with_its_payload(client: Client) -> None:
    performed = await client.pay("looked/up", {"amount_minor": 7})
    found = await client.get("/effects/pay/looked%2Fup")
    assert found.body == performed.body | {"payload": {"amount_minor": 7}}
    assert (await client.get("/effects/pay/never")).status == 404
    assert (await client.get("/effects/other/looked%2Fup")).status == 404


async def test_a_key_belongs_to_one_effect_name(client: Client) -> None:
    await client.pay("two-names")
    other = await client.call("POST", "/effects/ship", {}, {"Idempotency-Key": "two-names"})
    assert other.status == 201
    assert [item["name"] for item in (await client.get("/ledger?name=ship")).body["items"]] == ["ship"]


async def test_the_ledger_lists_effects_in_the_order_they_first_happened(client: Client) -> None:
    for key in ("order-b", "order-a", "order-b"):
        await client.pay(key, {"n": key})
    items = [item for item in (await client.get("/ledger")).body["items"] if item["key"].startswith("order-")]
    assert items == [
        {"key": "order-b", "name": "pay", "count": 1, "payload": {"n": "order-b"}},
        {"key": "order-a", "name": "pay", "count": 1, "payload": {"n": "order-a"}},
    ]


async def test_a_quoted_key_and_a_respelled_payload_are_the_same_request(client: Client) -> None:
    await client.pay("spelled", {"a": 1, "b": 2})
    assert (await client.pay('"spelled"', {"b": 2, "a": 1})).status == 200


async def test_a_key_with_another_payload_is_refused(client: Client) -> None:
    await client.pay("reused", {"amount_minor": 1})
    answer = await client.pay("reused", {"amount_minor": 2})
    assert (answer.status, answer.body["code"]) == (422, "idempotency-key-reused")
    assert (await client.get("/effects/pay/reused")).body["payload"] == {"amount_minor": 1}


@pytest.mark.parametrize("key", [None, "", "a b", "é", "k" * 256])
async def test_an_effect_without_a_usable_key_does_not_happen(client: Client, key: str | None) -> None:
    before = await client.counts()
    headers = {} if key is None else {"Idempotency-Key": key}
    assert (await client.call("POST", "/effects/pay", {}, headers)).status == 400
    assert await client.counts() == before


# Faults


async def test_a_delay_is_waited_before_acting(client: Client) -> None:
    await client.control({"/effects/pay": {"delay_ms": 300}})
    started = time.monotonic()
    slow = asyncio.create_task(client.pay("slow"))
    await until(lambda: _is_busy(client))
    assert "slow" not in await client.counts()
    assert (await slow).status == 201
    assert time.monotonic() - started >= 0.3


async def test_a_slow_provider_acts_although_its_caller_has_given_up(client: Client) -> None:
    await client.control({"/effects/pay": {"delay_ms": 200}})
    with pytest.raises(TimeoutError):
        await client.pay("given-up", timeout_s=0.05)
    await until(lambda: _has_happened(client, "given-up"))


async def test_an_injected_status_does_nothing_and_ends_after_its_times(client: Client) -> None:
    await client.control({"/effects/pay": {"status": 503, "retry_after_s": 2, "times": 1}})
    refused = await client.pay("refused")
    assert (refused.status, refused.headers["Retry-After"]) == (503, "2")
    assert "refused" not in await client.counts()
    assert (await client.pay("refused")).status == 201


async def test_times_are_counted_exactly_under_concurrency(client: Client) -> None:
    await client.control({"/costs": {"delay_ms": 20, "status": 429, "times": 5}})
    answers = await asyncio.gather(*(client.get(f"/costs/t-{n}") for n in range(12)))
    assert sorted(answer.status for answer in answers) == [200] * 7 + [429] * 5


async def test_a_hanging_provider_does_nothing_and_forgets_a_caller_who_left(client: Client) -> None:
    await client.control({"/effects/pay": {"hang": True}})
    with pytest.raises(TimeoutError):
        await client.pay("hung", timeout_s=0.1)
    await until(lambda: _is_idle(client))
    await client.control({})
    assert "hung" not in await client.counts()


async def test_clearing_the_control_releases_what_hangs(client: Client) -> None:
    await client.control({"/capacity": {"hang": True}})
    waiting = asyncio.create_task(client.get("/capacity/sg-1"))
    await until(lambda: _is_busy(client, "capacity"))
    assert not waiting.done()
    await client.control({})
    assert (await waiting).status == 200


async def test_a_lost_answer_has_happened_and_a_repeat_finds_out(client: Client) -> None:
    await client.control({"/effects/pay": {"lose_answer": True, "times": 1}})
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.pay("lost")
    assert (await client.counts())["lost"] == 1
    assert (await client.get("/effects/pay/lost")).status == 200
    again = await client.pay("lost")
    assert (again.status, again.body["count"]) == (200, 1)


async def test_a_refusal_can_be_lost_too(client: Client) -> None:
    await client.control({"/capacity": {"lose_answer": True}})
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.get("/capacity/missing-1")


async def test_an_answer_that_hangs_and_is_lost_has_happened(client: Client) -> None:
    await client.control({"/effects/pay": {"hang": True, "lose_answer": True}})
    with pytest.raises(TimeoutError):
        await client.pay("hung-after", timeout_s=0.2)
    assert (await client.counts())["hung-after"] == 1


async def test_a_key_is_forgotten_after_the_dedup_window(client: Client) -> None:
    first = await client.pay("window", {"n": 1})
    assert (await client.pay("window", {"n": 1})).status == 200
    await client.control({"/effects/pay": {"dedup_window_s": 0}})
    second = await client.pay("window", {"n": 2})
    assert (second.status, second.body["count"]) == (201, 2)
    assert second.body["reference"] != first.body["reference"]
    assert (await client.counts())["window"] == 2
    await client.control({"/effects/pay": {"dedup_window_s": 3600}})
    assert (await client.pay("window", {"n": 2})).status == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/capacity/bumped", "available_hours"),
        ("/customers/bumped", "discount_percent"),
        ("/costs/bumped", "estimate_minor"),
        ("/rates/EUR/USD", "rate"),
    ],
)
async def test_a_bump_moves_the_fact_on_each_read_until_its_times_are_over(
    client: Client, path: str, field: str
) -> None:
    await client.control({path: {"bump_revision": True, "times": 2}})
    reads = [await client.get(path) for _ in range(3)]
    first, second, third = [(read.headers["ETag"], read.body[field]) for read in reads]
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert second == third


async def test_a_bump_lowers_capacity_and_raises_its_revision_by_one(client: Client) -> None:
    before = await client.get("/capacity/one-less")
    await client.control({"/capacity": {"bump_revision": True, "times": 1}})
    after = await client.get("/capacity/one-less", If_None_Match=before.headers["ETag"])
    assert after.body["available_hours"] == before.body["available_hours"] - 1
    assert int(after.headers["ETag"].strip('"')) == int(before.headers["ETag"].strip('"')) + 1


async def test_a_lookup_lags_behind_a_lost_answer(client: Client) -> None:
    await client.control({"/effects/pay": {"lookup_lag_ms": 300, "lose_answer": True, "times": 1}})
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.pay("lagging")
    assert (await client.get("/effects/pay/lagging")).status == 404
    assert (await client.counts())["lagging"] == 1
    await until(lambda: _is_found(client, "lagging"))


async def test_clearing_the_control_ends_the_lag(client: Client) -> None:
    await client.control({"/effects": {"lookup_lag_ms": 600_000}})
    await client.pay("healed")
    assert (await client.get("/effects/pay/healed")).status == 404
    await client.control({})
    assert (await client.get("/effects/pay/healed")).status == 200


async def test_the_longest_prefix_wins_and_a_method_before_none(client: Client) -> None:
    table = {
        "/": {"status": 500},
        "/effects": {"status": 501},
        "/effects/pay": {"status": 502},
        "POST /effects/pay": {"status": 503},
    }
    await client.control(table)
    assert (await client.pay("prefixed")).status == 503
    assert (await client.get("/effects/pay/prefixed")).status == 502
    assert (await client.get("/effects/ship/prefixed")).status == 501
    assert (await client.get("/capacity/sg-1")).status == 500
    assert (await client.get("/ledger")).status == 200


async def test_the_control_shows_what_is_in_force_with_the_times_left(client: Client) -> None:
    await client.control({"/costs": {"status": 500, "times": 2}, "/capacity": {"delay_ms": 1, "times": 1}})
    await client.get("/costs/p-1")
    await client.get("/capacity/p-1")
    assert (await client.get("/control")).body == {"/costs": {"status": 500, "times": 1}}
    assert (await client.control({})).body == {}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"/costs": {"latency": 5}}, "latency"),
        ({"/costs": {"delay_ms": "5"}}, "delay_ms"),
        ({"/costs": {"delay_ms": -1}}, "delay_ms"),
        ({"/costs": {"times": 0}}, "times"),
        ({"/costs": {"status": 99}}, "status"),
        ({"/costs": {"status": 500, "hang": True}}, "hang"),
        ({"/costs": {"retry_after_s": 5}}, "retry_after_s"),
        ({"/costs": {"dedup_window_s": 5}}, "dedup_window_s"),
        ({"/effects": {"bump_revision": True}}, "bump_revision"),
        ({"/cots": {"hang": True}}, "/cots"),
        ({"DELETE /costs": {"hang": True}}, "DELETE"),
        ({"/ledger": {"hang": True}}, "/ledger"),
        (["/costs"], "control table"),
    ],
)
async def test_a_control_table_with_a_mistake_changes_nothing_and_says_why(
    client: Client, table: Any, named: str
) -> None:
    await client.control({"/rates": {"delay_ms": 1}})
    answer = await client.control(table)
    assert answer.status == 400
    assert named in answer.body["detail"]
    assert (await client.get("/control")).body == {"/rates": {"delay_ms": 1}}


async def test_a_body_over_one_mebibyte_is_refused(client: Client) -> None:
    assert (await client.pay("large", "x" * 1024 * 1024)).status == 413
    await client.control({"/effects": {"delay_ms": 1}})
    assert (await client.pay("large", "x" * 1024 * 1024)).status == 413
    assert "large" not in await client.counts()


async def test_load_counts_calls_at_once_and_per_minute_by_route_until_it_is_told_to_begin_anew(
    client: Client,
) -> None:
    assert (await client.call("DELETE", "/load")).status == 200
    await client.control({"/calendar": {"delay_ms": 100}})
    await asyncio.gather(*(client.get("/calendar/SG/2026-01-05") for _ in range(7)))
    await client.get("/calendar/SG/2026-01-05")
    await client.pay("load-1", {})
    await client.get("/effects/pay/load-1")
    seen = {item["route"]: item for item in (await client.get("/load")).body["items"] if item["calls"]}
    counted = {"concurrent_now": 0, "concurrent_max": 7, "per_minute_max": 8, "calls": 8}
    assert seen["calendar"] == {"route": "calendar", **counted}
    assert [route for route in seen if route.startswith("effects/")] == ["effects/pay"]
    assert seen["effects/pay"]["calls"] == 2
    fresh = (await client.call("DELETE", "/load")).body["items"]
    assert {item["calls"] for item in fresh} == {0}


async def test_load_counts_a_call_whose_caller_has_gone_until_its_answer_is_ready(client: Client) -> None:
    await client.control({"/costs": {"delay_ms": 200}})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.get("/costs/gone")

    async def now() -> int:
        items = (await client.get("/load")).body["items"]
        return int(next(item["concurrent_now"] for item in items if item["route"] == "costs"))

    assert await now() == 1
    await until(lambda: is_(now, 0))


async def is_(ask: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await ask() == wanted


async def test_stats_count_requests_and_the_most_at_one_time(client: Client) -> None:
    before = (await client.get("/stats")).body["calendar"]
    await client.control({"/calendar": {"delay_ms": 100}})
    await asyncio.gather(*(client.get("/calendar/SG/2026-01-05") for _ in range(7)))
    after = (await client.get("/stats")).body["calendar"]
    assert after["requests"] == before["requests"] + 7
    assert (after["concurrent"], after["max_concurrent"]) == (0, 7)


# The process


async def test_effects_survive_a_kill_at_any_point(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with Providers(tmp_path) as providers:
        url = providers.url
        client = Client(session, url)
        answered: list[str] = []
        async with asyncio.TaskGroup() as payers:
            for payer in range(8):
                payers.create_task(_pay_until_refused(client, f"k{payer}", answered))
            await until(lambda: _at_least(answered, 300))
            assert providers.kill() == -signal.SIGKILL
        await providers.start_async()
        assert providers.url == url
        counts = await client.counts()
        assert set(answered) <= set(counts)
        assert set(counts.values()) == {1}
        assert (await client.pay(answered[0])).status == 200


async def test_a_torn_last_line_is_dropped_and_its_effect_can_happen(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with Providers(tmp_path) as providers:
        await Client(session, providers.url).pay("whole")
    ledger = tmp_path / "ledger.jsonl"
    line = ledger.read_bytes()
    ledger.write_bytes(line + line.replace(b"whole", b"torn")[:-20])
    async with Providers(tmp_path) as providers:
        client = Client(session, providers.url)
        assert await client.counts() == {"whole": 1}
        assert (await client.pay("torn")).status == 201
    async with Providers(tmp_path) as providers:
        assert await Client(session, providers.url).counts() == {"whole": 1, "torn": 1}


def test_a_ledger_that_was_edited_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b'{"key": "not ours"}\n')
    with pytest.raises(LaunchFailed):
        Providers(tmp_path, log=tmp_path / "log").start()
    assert "line 1" in (tmp_path / "log").read_text()


def test_a_second_process_cannot_write_the_same_ledger(tmp_path: Path) -> None:
    with Providers(tmp_path), pytest.raises(LaunchFailed):
        Providers(tmp_path, log=tmp_path / "log").start()
    assert "another process" in (tmp_path / "log").read_text()


async def test_with_fsync_concurrent_effects_share_their_syncs(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with Providers(tmp_path, fsync=True) as providers:
        client = Client(session, providers.url)
        answers = await asyncio.gather(*(client.pay(f"synced-{n % 50}") for n in range(100)))
        assert sorted(answer.status for answer in answers) == [200] * 50 + [201] * 50


async def test_sigterm_ends_it_with_0_although_requests_hang(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with Providers(tmp_path) as providers:
        client = Client(session, providers.url)
        await client.control({"/effects": {"hang": True}})
        hung = asyncio.create_task(client.pay("at-the-end"))
        await until(lambda: _is_busy(client))
        assert await providers.stop_async() == 0
        with pytest.raises(aiohttp.ClientError):
            await hung
    assert b"at-the-end" not in (tmp_path / "ledger.jsonl").read_bytes()


async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    parent_program = (
        "import json, pathlib, sys, time; from coordinator.demo.launch import Providers;"
        "p = Providers(pathlib.Path(sys.argv[1])).start();"
        "print(json.dumps(p.ready), flush=True); time.sleep(600)"
    )
    with launch([sys.executable, "-c", parent_program, str(tmp_path)], env=package_environment()) as parent:
        orphan = parent.ready["pid"]
        os.kill(orphan, 0)
        parent.kill()
        try:
            await until(lambda: _has_ended(orphan))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


def test_launch_reports_a_child_that_never_becomes_ready() -> None:
    with pytest.raises(LaunchFailed, match="no json here"):
        launch([sys.executable, "-c", "print('no json here')"])
    with pytest.raises(LaunchFailed, match="not ready in"):
        launch([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


def test_launch_keeps_reading_what_the_child_prints_afterwards() -> None:
    program = (
        "print('starting'); print('{\"url\": 1}', flush=True); print('x' * 100 + '\\n' * 200_000 + 'end')"
    )
    with launch([sys.executable, "-c", program]) as child:
        child._started.wait(timeout=10)
        assert child.ready == {"url": 1}


def test_a_process_that_runs_is_not_started_twice(shared_providers: Providers) -> None:
    with pytest.raises(LaunchFailed, match="already running"):
        shared_providers.start()


def test_the_command_line_prints_one_line_of_json(tmp_path: Path) -> None:
    command = python_module("coordinator.demo.providers", "--port", "0", "--data", str(tmp_path), "--json")
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **package_environment()}
    )
    assert child.stdout is not None
    with child, child.stdout as stdout:
        ready = json.loads(stdout.readline())
        child.terminate()
        assert stdout.read() == ""
    assert ready["pid"] == child.pid
    assert ready["url"].startswith("http://127.0.0.1:")
    assert child.returncode == 0


async def _pay_until_refused(client: Client, prefix: str, answered: list[str]) -> None:
    for number in range(100_000):
        try:
            await client.pay(f"{prefix}-{number}", {"amount_minor": 100})
        except aiohttp.ClientError:
            return
        answered.append(f"{prefix}-{number}")


async def _at_least(answered: list[str], count: int) -> bool:
    return len(answered) >= count


async def _is_busy(client: Client, route: str = "effects") -> bool:
    return await concurrent(client, route) > 0


async def _is_idle(client: Client, route: str = "effects") -> bool:
    return await concurrent(client, route) == 0


async def _has_happened(client: Client, key: str) -> bool:
    return key in await client.counts()


async def _is_found(client: Client, key: str) -> bool:
    return (await client.get(f"/effects/pay/{key}")).status == 200


async def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
