"""`adapters.postgres.PostgresSource` against a real PostgreSQL: one row of a table that is not ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import msgspec
import pytest

from adapters.postgres import PostgresSource, close_pools
from coordinator.core.canonical import canonical, digest
from coordinator.core.evidence import Absent, Answer, Failed, Found, Source, Unchanged
from coordinator.errors import DeclarationError
from tests.adapters.asking import Capacity, Site, ask
from tests.adapters.servers import unused_port

QUERY = "SELECT site, available_hours, xmin FROM capacity WHERE site = $1"
VALUE = Capacity("sg-1", 40)
Execute = Callable[[str], Awaitable[object]]


@pytest.fixture
async def execute(empty_database_url: str) -> AsyncIterator[Execute]:
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute(
        "CREATE TABLE capacity (site text, available_hours int, revision bigint DEFAULT 7);"
        "INSERT INTO capacity VALUES ('sg-1', 40), ('twice', 1), ('twice', 2), ('none', NULL)"
    )
    yield connection.execute
    await connection.close()


@pytest.fixture
def url(empty_database_url: str, execute: Execute) -> str:
    return empty_database_url


OTHERS = "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


async def until(connection: asyncpg.Connection[asyncpg.Record], question: str) -> None:
    """Asks the database until it says yes."""
    for _ in range(1_000):
        if await connection.fetchval(question):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never true: {question}")


def source(url: str, query: str = QUERY, **options: Any) -> PostgresSource[Capacity]:
    return PostgresSource("capacity", url, query, returns=Capacity, **options)


def failed(answer: Answer[Any], code: str, *, retryable: bool = False) -> Failed:
    assert isinstance(answer, Failed), answer
    assert (answer.code, answer.retryable) == (code, retryable), answer
    assert answer.message.isprintable()
    return answer


async def test_it_is_a_source_and_every_update_is_a_new_revision(url: str, execute: Execute) -> None:
    declared: Source[Capacity] = PostgresSource("capacity", url, QUERY, returns=Capacity)
    first = await declared.read(ask())
    assert isinstance(first, Found)
    assert first.value == VALUE
    assert first.revision is not None
    assert first.revision.isdigit()
    assert await declared.read(ask(if_revision=first.revision)) == Unchanged()
    await execute("UPDATE capacity SET available_hours = 39 WHERE site = 'sg-1'")
    second = await declared.read(ask(if_revision=first.revision))
    assert isinstance(second, Found)
    assert second.value.available_hours == 39
    assert second.revision != first.revision


async def test_no_row_is_absent_and_two_are_no_choice(url: str) -> None:
    assert await source(url).read(ask(Site("nowhere"))) == Absent()
    failed(await source(url).read(ask(Site("twice"))), "ambiguous-row")


async def test_a_hundred_million_rows_are_not_fetched_to_say_so(url: str) -> None:
    query = "SELECT 'x' AS site, generate_series(1, 100000000) AS available_hours"
    failed(await source(url, query, parameters=(), revision=None).read(ask(timeout_s=10)), "ambiguous-row")


async def test_null_is_not_zero(url: str) -> None:
    failed(await source(url).read(ask(Site("none"))), "malformed-row")


async def test_the_revision_may_be_a_column_of_the_table(url: str) -> None:
    declared = source(
        url, "SELECT site, available_hours, revision FROM capacity WHERE site = $1", revision="revision"
    )
    assert await declared.read(ask()) == Found(VALUE, "7")
    assert await declared.read(ask(if_revision="7")) == Unchanged()


async def test_without_a_revision_column_it_is_the_digest_of_the_value(url: str) -> None:
    declared = source(url, "SELECT site, available_hours FROM capacity WHERE site = $1", revision=None)
    assert await declared.read(ask()) == Found(VALUE, digest(canonical(VALUE)))


async def test_a_revision_that_is_null_is_malformed(url: str) -> None:
    query = "SELECT site, available_hours, NULL::text AS version FROM capacity WHERE site = $1"
    failed(await source(url, query, revision="version").read(ask()), "malformed-row")


async def test_a_revision_that_is_also_a_field_stays_in_the_value(url: str) -> None:
    class Versioned(msgspec.Struct):
        site: str
        revision: int

    declared = PostgresSource(
        "c",
        url,
        "SELECT site, revision FROM capacity WHERE site = $1",
        returns=Versioned,
        revision="revision",
    )
    assert await declared.read(ask()) == Found(Versioned("sg-1", 7), "7")


class Anything(msgspec.Struct):
    v: Any


async def read_expression(url: str, expression: str) -> Answer[Anything]:
    declared = PostgresSource(
        "x", url, f"SELECT {expression} AS v", returns=Anything, parameters=(), revision=None
    )
    return await declared.read(ask())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12.50::numeric", "12.50"),
        ("1e20::numeric", "100000000000000000000"),
        ("1.5::float8", 1.5),
        ("3::float8", 3),
        ("9007199254740991", 9007199254740991),
        ("true", True),
        ("NULL::int", None),
        ("'2026-03-01 10:00:00+08'::timestamptz", "2026-03-01T02:00:00Z"),
        ("'2026-03-01 10:00:00.5'::timestamp", "2026-03-01T10:00:00.500000"),
        ("'2026-03-01'::date", "2026-03-01"),
        ("'10:30'::time", "10:30:00"),
        ("interval '90 minutes'", "PT5400S"),
        ("'00000000-0000-0000-0000-000000000005'::uuid", "00000000-0000-0000-0000-000000000005"),
        ("'10.0.0.1'::inet", "10.0.0.1"),
        ("'\\x6162'::bytea", "YWI="),
        ("array[1, 2]", [1, 2]),
        ("array[1.10, 2]::numeric[]", ["1.10", "2"]),
        ("""'{"b": [1, null, "é"]}'::jsonb""", {"b": [1, None, "é"]}),
        ("""'{"a": 1.0}'::json""", {"a": 1}),
        ("'null'::jsonb", None),
        ("array['{}'::jsonb]", [{}]),
    ],
)
async def test_every_type_has_one_spelling(url: str, expression: str, value: object) -> None:
    answer = await read_expression(url, expression)
    assert isinstance(answer, Found), answer
    assert canonical(answer.value) == canonical({"v": value})


@pytest.mark.parametrize(
    "expression",
    [
        "'NaN'::numeric",
        "'Infinity'::numeric",
        "'NaN'::float8",
        "'-Infinity'::float4",
        "array['NaN'::float8]",
        "9007199254740992",
        "'infinity'::timestamptz",
        "'-infinity'::timestamp",
        "'infinity'::date",
        """'{"a": 1, "a": 2}'::json""",
        """'{"a": 1e400}'::jsonb""",
        "'(1,2)'::point",
        "int4range(1, 2)",
    ],
)
async def test_what_has_no_json_spelling_makes_the_row_malformed(url: str, expression: str) -> None:
    failed(await read_expression(url, expression), "malformed-row")


async def test_nothing_can_be_written(url: str) -> None:
    query = "INSERT INTO capacity VALUES ($1, 1) RETURNING site, available_hours"
    answer = failed(await source(url, query, revision=None).read(ask()), "query-failed")
    assert answer.code == "query-failed"


async def test_a_function_that_writes_is_stopped_by_the_transaction(url: str, execute: Execute) -> None:
    await execute(
        "CREATE FUNCTION sneaky() RETURNS int LANGUAGE sql AS 'UPDATE capacity SET available_hours = 0 RETURNING 1'"
    )
    answer = failed(
        await source(url, "SELECT $1 AS site, sneaky() AS available_hours", revision=None).read(ask()),
        "query-failed",
    )
    assert "read-only" in answer.message
    assert isinstance(await source(url).read(ask()), Found)


@pytest.mark.parametrize(
    "query", ["SELECT nothing, xmin FROM capacity WHERE site = $1", "SELEC $1 xmin", "SELECT $1::int AS xmin"]
)
async def test_a_query_that_does_not_work_is_a_failure(url: str, query: str) -> None:
    failed(await source(url, query).read(ask()), "query-failed")
    assert isinstance(await source(url).read(ask()), Found)


async def test_an_error_text_is_cleaned(url: str) -> None:
    answer = failed(await source(url).read(ask({"site": 3})), "query-failed")
    assert len(answer.message) <= 500


async def test_a_parameter_that_is_missing_is_not_null(url: str) -> None:
    failed(await source(url).read(ask({"site": None})), "no-address")


async def test_a_parameter_keeps_its_type_and_is_never_sql(url: str) -> None:
    query = "SELECT site, available_hours, xmin FROM capacity WHERE site = $1 AND available_hours > $2"
    declared = source(url, query, parameters=("input.site", "input.depth"))
    assert isinstance(await declared.read(ask()), Found)
    assert await declared.read(ask(Site("' OR true --"))) == Absent()


async def test_a_database_that_is_not_there_is_unreachable() -> None:
    declared = source(f"postgresql://u:s3cret@127.0.0.1:{await unused_port()}/x")
    answer = failed(await declared.read(ask()), "unreachable", retryable=True)
    assert "s3cret" not in answer.message + repr(declared)


async def test_a_connection_that_was_ended_is_unreachable_and_then_replaced(
    url: str, execute: Execute
) -> None:
    declared = source(url, "SELECT $1 AS site, count(pg_sleep(30))::int AS available_hours", revision=None)
    reading = asyncio.create_task(declared.read(ask(timeout_s=20)))
    connection = await asyncpg.connect(url)
    await until(
        connection, f"SELECT count(pg_terminate_backend(pid)) > 0 FROM {OTHERS} AND query LIKE '%pg_sleep%'"
    )
    failed(await reading, "unreachable", retryable=True)
    await connection.close()
    assert isinstance(await source(url).read(ask()), Found)


async def test_a_slow_query_ends_with_the_time_and_leaves_no_transaction_open(url: str) -> None:
    slow = source(url, "SELECT $1 AS site, count(pg_sleep(30))::int AS available_hours", revision=None)
    failed(await slow.read(ask(timeout_s=0.2)), "timed-out")
    connection = await asyncpg.connect(url)

    await until(connection, f"SELECT count(*) = 0 FROM {OTHERS} AND xact_start IS NOT NULL")
    await connection.close()


async def test_a_cancelled_read_gives_its_connection_back(url: str) -> None:
    url += "?sslmode=disable"  # cancelled while asking for TLS, the driver drops a future with an exception in it
    slow = source(
        url, "SELECT $1 AS site, count(pg_sleep(30))::int AS available_hours", revision=None, pool_size=1
    )
    for steps in range(1, 40):
        reading = asyncio.create_task(slow.read(ask()))
        for _ in range(steps):  # cancelled at one point of its path after the other
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert isinstance(await source(url, pool_size=1).read(ask()), Found)


async def test_a_full_pool_is_waited_for_no_longer_than_the_reading_may_take(url: str) -> None:
    slow = source(
        url, "SELECT $1 AS site, count(pg_sleep(2))::int AS available_hours", revision=None, pool_size=1
    )
    reading = asyncio.create_task(slow.read(ask()))
    await asyncio.sleep(0)
    failed(await source(url, pool_size=1).read(ask(timeout_s=0.3)), "timed-out")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_many_reads_share_a_pool_of_few_connections(url: str) -> None:
    answers = await asyncio.gather(*(source(url, pool_size=2).read(ask()) for _ in range(40)))
    assert all(isinstance(answer, Found) for answer in answers)
    connection = await asyncpg.connect(url)
    count = f"SELECT count(*) FROM {OTHERS} AND application_name = 'decision-coordinator'"
    assert await connection.fetchval(count) <= 2
    await connection.close()


async def test_closed_pools_are_opened_again_when_needed(url: str) -> None:
    assert isinstance(await source(url).read(ask()), Found)
    await close_pools()
    assert isinstance(await source(url, statement_cache=False).read(ask()), Found)


@pytest.mark.parametrize(
    "options",
    [
        {"query": "SELECT site FROM capacity WHERE site = $1"},
        {"query": "SELECT site, xmin FROM capacity"},
        {"parameters": ("site",)},
        {"pool_size": 0},
        {"returns": dict},
    ],
)
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_postgres\.py") as caught:
        PostgresSource(
            "s", **{"dsn": "postgresql://u:s3cret@h/d", "query": QUERY, "returns": Capacity, **options}
        )
    assert "s3cret" not in str(caught.value)
