"""`adapters.postgres_sink.PostgresSink` against a real PostgreSQL: the change and its key are one transaction (I5, I7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from adapters.postgres_sink import PostgresSink
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Keyed,
    LookupResult,
    NotFound,
    NotSent,
    Rejected,
    SendResult,
    Sink,
    lookup_lag_ms,
)
from coordinator.errors import DeclarationError
from tests.adapters.asking import operation
from tests.adapters.servers import unused_port
from tests.store.proxy import proxy
from tests.support.waiting import eventually

TABLES = """
CREATE TABLE effects_done (
    key            text PRIMARY KEY,
    payload_sha256 text NOT NULL,
    reference      text NOT NULL DEFAULT '',
    done_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE orders (
    id     int GENERATED ALWAYS AS IDENTITY,
    key    text,
    amount int CHECK (amount > 0),
    data   jsonb,
    due    date,
    tags   text[],
    once   int UNIQUE DEFERRABLE INITIALLY DEFERRED
);
"""
INSERT = "INSERT INTO orders (key, amount) VALUES ($1, $2) RETURNING id"
PARAMETERS = ["key", "payload.amount_minor"]
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def db(empty_database_url: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute(TABLES)
    yield connection
    await connection.close()


@pytest.fixture
def url(empty_database_url: str, db: Connection) -> str:
    return empty_database_url


def sink(url: str, statement: str = INSERT, **options: Any) -> PostgresSink:
    return PostgresSink("book", url, statement, **{"parameters": PARAMETERS, "timeout_ms": 5_000, **options})


async def perform(url: str, statement: str = INSERT, payload: bytes = b"{}", **options: Any) -> SendResult:
    declared = sink(url, statement, **options)
    try:
        return await declared.perform(operation(payload=payload))
    finally:
        await declared.aclose()


async def look_up(url: str) -> LookupResult:
    declared = sink(url)
    try:
        return await declared.lookup(operation())
    finally:
        await declared.aclose()


def test_it_is_a_sink_that_knows_its_keys_for_ever() -> None:
    declared: Sink = sink("postgresql://u:s3cret@db.example/x")
    assert isinstance(declared.guarantee, Keyed)
    assert lookup_lag_ms(declared.guarantee) == 0
    assert declared.provider == "db.example"
    assert "s3cret" not in repr(declared)


async def test_change_and_key_are_one_and_a_repeat_has_the_first_reference(url: str, db: Connection) -> None:
    declared = sink(url)
    assert await declared.lookup(operation()) == NotFound()
    assert await declared.perform(operation()) == Accepted("1")
    assert await declared.perform(operation(attempt=2)) == Accepted("1")
    assert await declared.lookup(operation()) == Accepted("1")
    assert await declared.perform(operation("another")) == Accepted("2")
    await declared.aclose()
    assert await db.fetchval("SELECT array_agg(key ORDER BY id) FROM orders") == [operation().key, "another"]


async def test_twenty_at_once_are_one_change(url: str, db: Connection) -> None:
    declared = sink(url, pool_size=20)
    results = await asyncio.gather(*(declared.perform(operation(attempt=n)) for n in range(20)))
    await declared.aclose()
    assert set(results) == {Accepted("1")}
    assert await db.fetchval("SELECT count(*) FROM orders") == 1


async def test_a_known_key_with_another_payload_is_refused(url: str, db: Connection) -> None:
    declared = sink(url)
    await declared.perform(operation())
    result = await declared.perform(operation(payload=b'{"amount_minor":9}'))
    await declared.aclose()
    assert isinstance(result, Rejected)
    assert result.code == "key-reused"


async def test_values_have_their_json_types(url: str, db: Connection) -> None:
    statement = "INSERT INTO orders (data, due, tags, amount) VALUES ($1, $2::text::date, $3, $4)"
    payload = b'{"order":{"a":[1,null]},"due":"2026-11-30","tags":["x","y"],"n":3}'
    parameters = ["payload.order", "payload.due", "payload.tags", "payload.n"]
    assert await perform(url, statement, payload, parameters=parameters) == Accepted(operation().key)
    row = await db.fetchrow("SELECT data ->> 'a' AS data, due::text, tags, amount FROM orders")
    assert row is not None
    assert tuple(row) == ("[1, null]", "2026-11-30", ["x", "y"], 3)


@pytest.mark.parametrize(
    ("statement", "payload", "code"),
    [
        (INSERT, b'{"amount_minor":-1}', "statement-failed"),
        (INSERT, b'{"amount_minor":"many"}', "statement-failed"),
        (INSERT, b'{"amount_minor":99999999999}', "statement-failed"),
        (INSERT, b"{}", "no-value"),
        (INSERT, b"no json", "no-value"),
        ("INSERT INTO nowhere VALUES ($1, $2)", b'{"amount_minor":1}', "statement-failed"),
        ("INSERT ITNO orders VALUES ($1, $2)", b'{"amount_minor":1}', "statement-failed"),
        (
            "INSERT INTO orders (key, amount, once) VALUES ($1, $2, $3)",
            b'{"amount_minor":1}',
            "statement-failed",
        ),
        ("UPDATE orders SET key = $1 WHERE amount = $2", b'{"amount_minor":1}', "nothing-changed"),
    ],
)
async def test_what_can_never_be_is_refused_and_leaves_no_key(
    url: str, db: Connection, statement: str, payload: bytes, code: str
) -> None:
    result = await perform(url, statement, payload)
    assert isinstance(result, Rejected), result
    assert result.code == code
    assert await db.fetchval("SELECT count(*) FROM effects_done") == 0
    assert await look_up(url) == NotFound()


async def test_nothing_to_change_may_be_fine(url: str, db: Connection) -> None:
    statement = "UPDATE orders SET key = $1 WHERE amount = $2"
    result = await perform(url, statement, b'{"amount_minor":1}', may_change_nothing=True)
    assert result == Accepted(operation().key)


async def test_a_constraint_that_speaks_up_at_commit_is_a_refusal(url: str, db: Connection) -> None:
    await db.execute("INSERT INTO orders (once) VALUES (7)")
    result = await perform(url, "INSERT INTO orders (once) VALUES ($1)", b'{"n":7}', parameters=["payload.n"])
    assert isinstance(result, Rejected), result
    assert await look_up(url) == NotFound()


async def test_nobody_listening_a_wrong_password_and_a_lock_are_not_sent(url: str, db: Connection) -> None:
    assert isinstance(
        await perform(f"postgresql://u:p@127.0.0.1:{await unused_port()}/x", payload=b'{"amount_minor":1}'),
        NotSent,
    )
    wrong = await perform(url.replace("coordinator:", "coordinator:not-", 1), payload=b'{"amount_minor":1}')
    assert isinstance(wrong, NotSent), wrong
    async with db.transaction():
        await db.execute("LOCK TABLE orders")
        locked = await perform(url, payload=b'{"amount_minor":1}', timeout_ms=300)
    assert isinstance(locked, NotSent), locked
    assert await db.fetchval("SELECT count(*) FROM orders") == 0


async def test_a_lost_answer_to_commit_is_ambiguous_and_the_lookup_tells(url: str, db: Connection) -> None:
    async with proxy(url) as between:
        between.answers_to_lose = 1
        declared = sink(between.url)
        assert isinstance(await declared.perform(operation()), Ambiguous)
        assert await declared.lookup(operation()) == Accepted("1")
        assert await declared.perform(operation(attempt=2)) == Accepted("1")
        await declared.aclose()
    assert await db.fetchval("SELECT count(*) FROM orders") == 1


async def test_a_commit_that_never_arrived_is_ambiguous_and_happens_once_in_the_end(
    url: str, db: Connection
) -> None:
    async with proxy(url) as between:
        between.commits_to_lose = 1
        declared = sink(between.url)
        assert isinstance(await declared.perform(operation()), Ambiguous)
        assert await declared.lookup(operation()) == NotFound()
        assert isinstance(await declared.perform(operation(attempt=2)), Accepted)
        await declared.aclose()
    assert await db.fetchval("SELECT count(*) FROM orders") == 1


async def test_a_connection_that_breaks_before_commit_is_not_sent(url: str, db: Connection) -> None:
    async with proxy(url) as between:
        between.statement_to_lose = b"INSERT INTO orders"
        declared = sink(between.url)
        assert isinstance(await declared.perform(operation()), NotSent)
        await declared.aclose()
    assert await look_up(url) == NotFound()


async def test_a_lookup_waits_for_an_attempt_that_is_about_to_commit(url: str, db: Connection) -> None:
    """Not found is proof, so it must not be said of what is still going on."""
    began = db.transaction()
    await began.start()
    await db.execute(
        "INSERT INTO effects_done (key, payload_sha256, reference) VALUES ($1, '', 'r-1')", operation().key
    )
    asking = asyncio.create_task(look_up(url))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO eff%'"
    watcher = await asyncpg.connect(url)
    await eventually(lambda: watcher.fetchval(waiting), what="the lookup waits")
    await watcher.close()
    await began.commit()
    assert await asking == Accepted("r-1")


async def test_a_lookup_that_gets_no_answer_proves_nothing(url: str) -> None:
    assert isinstance(await look_up(f"postgresql://u:p@127.0.0.1:{await unused_port()}/x"), Ambiguous)


@pytest.mark.parametrize(
    "options",
    [
        {"statement": "COMMIT"},
        {"statement": "DROP TABLE orders"},
        {"statement": "INSERT INTO orders VALUES ($11)", "parameters": ["key"]},
        {"parameters": ["input.site", "key"]},
        {"keys_table": "a; DROP TABLE b"},
        {"timeout_ms": 0},
        {"pool_size": 0},
    ],
)
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_postgres_sink\.py"):
        sink("postgresql://h/x", **{"statement": INSERT, **options})
