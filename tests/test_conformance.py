"""The conformance kit: our own sinks and sources keep their word, and those that lie are found out, with a sentence that says why."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest
from aiohttp import ClientSession, web

from adapters.chat import ChatSource
from adapters.client import close_clients
from adapters.http import HttpSource
from adapters.http_sink import HttpSink
from adapters.postgres import PostgresSource, close_pools
from adapters.postgres_sink import PostgresSink
from adapters.smtp import SmtpSink
from adapters.webhook import WebhookSink
from coordinator.core.effect import (
    Accepted,
    Ambiguous,
    Keyed,
    Lookup,
    LookupResult,
    NotFound,
    NotSent,
    Operation,
    Rejected,
    SendResult,
    Sink,
    Unguarded,
)
from coordinator.core.evidence import Absent, Answer, Failed, Found, ReadRequest, Source
from coordinator.demo.launch import Providers
from coordinator.testing.conformance import (
    BrokenPromise,
    SinkPromise,
    SinkSubject,
    SourcePromise,
    SourceSubject,
)
from coordinator.testing.sink_promises import SINK_PROMISES
from coordinator.testing.source_promises import SOURCE_PROMISES
from tests.adapters.mail import MailServer, mail_server
from tests.adapters.models import answer, model
from tests.adapters.servers import web_server

pytest_plugins = ["coordinator.testing.conformance"]

TIMEOUT_MS = 400
KEYED = Keyed(window_ms=3_600_000)
ASKABLE = Keyed(window_ms=3_600_000, lookup_lag_ms=0)


@pytest.fixture(autouse=True)
async def closes_what_it_opened(anyio_backend: str) -> AsyncIterator[None]:
    yield
    await close_clients()
    await close_pools()


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Providers]:
    async with Providers(tmp_path_factory.mktemp("providers")) as running:
        yield running


def place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def at_the_demo_provider(provider: Providers, build: Callable[[str, int], Sink]) -> SinkSubject:
    async def count(key: str) -> int:
        async with ClientSession() as client, client.get(f"{provider.url}/ledger") as answer:
            items = (await answer.json())["items"]
        return sum(item["count"] for item in items if item["key"] == key)

    return SinkSubject(
        build=build, provider=place(provider.url), count=count, payload=b'{"amount":1}', refused_payload=b"{"
    )


# Ours --------------------------------------------------------------------------------------------------------------------------


async def test_webhook_sink_keeps_its_word(sink_promise: SinkPromise, provider: Providers) -> None:
    def build(host: str, port: int) -> Sink:
        url = f"http://{host}:{port}/effects/pay"
        return WebhookSink(
            "pay", url, guarantee=ASKABLE, lookup_url=url + "/{key}", timeout_ms=TIMEOUT_MS, secret="A" * 32
        )

    await sink_promise(at_the_demo_provider(provider, build))


@pytest.mark.parametrize("guarantee", [Lookup(0), Unguarded()], ids=["lookup", "none"])
async def test_http_sink_with_a_lesser_guarantee_keeps_its_word(
    sink_promise: SinkPromise, provider: Providers, guarantee: Lookup | Unguarded
) -> None:
    def build(host: str, port: int) -> Sink:
        url = f"http://{host}:{port}/effects/{{effect}}"
        return HttpSink(
            "send",
            url,
            guarantee=guarantee,
            lookup_url=url + "/{key}" if isinstance(guarantee, Lookup) else None,
            timeout_ms=TIMEOUT_MS,
        )

    await sink_promise(at_the_demo_provider(provider, build))


async def test_http_sink_with_put_keeps_its_word(sink_promise: SinkPromise) -> None:
    """aiohttp would repeat a PUT by itself."""
    made: dict[str, bytes] = {}

    async def handler(request: web.Request) -> web.Response:
        if request.method == "PUT":
            if await request.read() == b'"no"':
                return web.Response(status=422)
            made[request.path] = await request.read()
        return web.json_response({"id": request.path}, status=200 if request.path in made else 404)

    async def count(key: str) -> int:
        return int(f"/{key}" in made)

    async with web_server(handler) as url:
        subject = SinkSubject(
            build=lambda host, port: HttpSink(
                "put",
                f"http://{host}:{port}/{{key}}",
                method="PUT",
                guarantee=ASKABLE,
                lookup_url=f"http://{host}:{port}/{{key}}",
                timeout_ms=TIMEOUT_MS,
            ),
            provider=place(url),
            count=count,
            refused_payload=b'"no"',
        )
        await sink_promise(subject)


async def test_smtp_sink_keeps_its_word(sink_promise: SinkPromise) -> None:
    async with mail_server() as server:
        await sink_promise(mailing(server))


def mailing(server: MailServer) -> SinkSubject:
    async def count(key: str) -> int:
        return sum(f"<{key}@" in str(mail["Message-ID"]) for mail in server.mails)

    return SinkSubject(
        build=lambda host, port: SmtpSink(
            "mail", host, port=port, sender="us@h.example", tls="none", timeout_ms=TIMEOUT_MS
        ),
        provider=(server.host, server.port),
        count=count,
        payload=b'{"to":"a@b.example","subject":"s","text":"t"}',
        refused_payload=b'{"to":"refused@b.example","subject":"s","text":"t"}',
        decisive=b"\r\n.\r\n",
    )


async def test_postgres_sink_keeps_its_word(sink_promise: SinkPromise, empty_database_url: str) -> None:
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute(
        "CREATE TABLE effects_done (key text PRIMARY KEY, payload_sha256 text NOT NULL,"
        " reference text NOT NULL DEFAULT '', done_at timestamptz NOT NULL DEFAULT clock_timestamp());"
        "CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, key text, amount int CHECK (amount > 0))"
    )

    async def count(key: str) -> int:
        return int(await connection.fetchval("SELECT count(*) FROM orders WHERE key = $1", key))

    def build(host: str, port: int) -> Sink:
        parts = urlsplit(empty_database_url)
        dsn = parts._replace(netloc=f"{parts.username}:{parts.password}@{host}:{port}").geturl()
        return PostgresSink(
            "book",
            dsn,
            "INSERT INTO orders (key, amount) VALUES ($1, $2) RETURNING id",
            parameters=["key", "payload.amount"],
            timeout_ms=TIMEOUT_MS,
        )

    try:
        await sink_promise(
            SinkSubject(
                build=build,
                provider=place(empty_database_url),
                count=count,
                payload=b'{"amount":1}',
                refused_payload=b'{"amount":-1}',
                decisive=b"COMMIT\x00",
            )
        )
    finally:
        await connection.close()


class Capacity(msgspec.Struct, frozen=True):
    site: str
    available_hours: int


class Site(msgspec.Struct, frozen=True):
    site: str = "sg-1"


async def test_http_source_keeps_its_word(source_promise: SourcePromise, provider: Providers) -> None:
    def build(host: str, port: int) -> Source[Capacity]:
        return HttpSource("capacity", f"http://{host}:{port}/capacity/{{input.site}}", returns=Capacity)

    await source_promise(SourceSubject(build=build, provider=place(provider.url), input=Site()))


async def test_postgres_source_keeps_its_word(source_promise: SourcePromise, empty_database_url: str) -> None:
    parts = urlsplit(empty_database_url)

    def build(host: str, port: int) -> Source[Capacity]:
        dsn = parts._replace(netloc=f"{parts.username}:{parts.password}@{host}:{port}").geturl()
        query = "SELECT $1::text AS site, 40 AS available_hours"
        return PostgresSource("capacity", dsn, query, returns=Capacity, revision=None)

    await source_promise(
        SourceSubject(build=build, provider=place(empty_database_url), input=Site(), decisive=b"sg-1")
    )


async def test_chat_source_keeps_its_word(source_promise: SourcePromise) -> None:
    async with model(answer('{"site":"sg-1","available_hours":40}')) as there:
        parts = urlsplit(there.url)

        def build(host: str, port: int) -> Source[Capacity]:
            base = f"http://{host}:{port}{parts.path}"
            return ChatSource("capacity", base_url=base, model="m", returns=Capacity, prompt="{input.site}?")

        await source_promise(SourceSubject(build=build, provider=place(there.url), input=Site()))


# Those that lie ----------------------------------------------------------------------------------------------------------------


class Forgetful:
    """A provider that does it again each time it is asked, whatever the key."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        key = request.headers.get("Idempotency-Key", "")
        if request.method == "GET":
            return web.json_response(
                {"path": request.path}, status=200 if request.path[1:] in self.done else 404
            )
        self.done.append(key)
        return web.json_response({"reference": "r"})

    async def count(self, key: str) -> int:
        return self.done.count(key)


@asynccontextmanager
async def forgetful(build: Callable[[str], Sink]) -> AsyncIterator[SinkSubject]:
    provider = Forgetful()
    async with web_server(provider.handle) as url:
        yield SinkSubject(
            build=lambda host, port: build(f"http://{host}:{port}"), provider=place(url), count=provider.count
        )


class Wrapped:
    """An honest sink underneath; what is told of it is not."""

    def __init__(self, url: str) -> None:
        self.inner = HttpSink(
            "liar", url, guarantee=ASKABLE, lookup_url=url + "/{key}", timeout_ms=TIMEOUT_MS
        )
        self.name, self.provider, self.timeout_ms = "liar", "liar", TIMEOUT_MS

    @property
    def guarantee(self) -> Lookup | Keyed:
        return Lookup(0)

    async def perform(self, operation: Operation) -> SendResult:
        return await self.inner.perform(operation)

    async def lookup(self, operation: Operation) -> LookupResult:
        return await self.inner.lookup(operation)


class SaysKeyed(Wrapped):
    @property
    def guarantee(self) -> Lookup | Keyed:
        return ASKABLE


class SaysNotSent(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        return NotSent("unreachable", result.message) if isinstance(result, Ambiguous) else result


class SaysRejected(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        return Rejected("failed", result.message) if isinstance(result, Ambiguous) else result


class SaysAccepted(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        return result if isinstance(result, Accepted) else Accepted("surely")


class SaysAmbiguous(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        return Ambiguous("who-knows", "") if isinstance(result, NotSent) else result


class Retries(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        return await super().perform(operation) if isinstance(result, Ambiguous) else result


class NeverFinds(Wrapped):
    async def lookup(self, operation: Operation) -> LookupResult:
        return NotFound()


class AlwaysFinds(Wrapped):
    async def lookup(self, operation: Operation) -> LookupResult:
        return Accepted("surely")


class TakesAnErrorForAbsence(Wrapped):
    async def lookup(self, operation: Operation) -> LookupResult:
        result = await super().lookup(operation)
        return NotFound() if isinstance(result, Ambiguous) else result


class Raises(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        if isinstance(result, NotSent):
            raise ConnectionRefusedError
        return result


class Endless(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        result = await super().perform(operation)
        await asyncio.Event().wait()
        return result


class KeepsCancellingToItself(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        try:
            return await super().perform(operation)
        except asyncio.CancelledError:
            return Ambiguous("cancelled", "")


class OneKeyForAll(Wrapped):
    async def perform(self, operation: Operation) -> SendResult:
        return Accepted("it is all one")


@pytest.mark.parametrize(
    ("promise", "liar", "because"),
    [
        (
            "a-known-key-is-not-a-second-effect",
            SaysKeyed,
            "recognises our key.*sent twice.*happened 2 times, not 1",
        ),
        ("one-key-twice-at-once-is-one-effect", SaysKeyed, "sent twice at once.*happened 2 times"),
        ("a-key-sent-again-after-a-lost-reply-is-one-effect", SaysKeyed, "sent again.*happened 2 times"),
        ("a-lost-reply-is-ambiguous", SaysNotSent, "NotSent.*the provider did act.*happen twice"),
        ("silence-is-ambiguous-and-ends-in-time", SaysNotSent, "its reply never came.*NotSent.*twice"),
        ("a-reply-cut-short-is-ambiguous", SaysNotSent, "ended after one byte.*NotSent"),
        (
            "a-reply-that-makes-no-sense-is-ambiguous",
            SaysRejected,
            "Rejected is final, so nobody would ever know",
        ),
        ("a-lost-reply-is-ambiguous", SaysAccepted, "it can't know that"),
        (
            "nobody-listening-is-not-sent",
            SaysAmbiguous,
            "the connection was refused.*it is NotSent",
        ),
        ("a-request-that-never-arrived-is-not-answered", SaysAccepted, "never saw the request"),
        ("a-lost-reply-is-ambiguous", Retries, "sent 2 times by itself"),
        ("a-lookup-finds-what-happened-within-its-lag", NeverFinds, "NotFound.*it would be sent again"),
        ("a-lookup-resolves-a-lost-reply", NeverFinds, "NotFound.*it would be sent again"),
        ("a-lookup-does-not-find-what-did-not-happen", AlwaysFinds, "nothing was ever sent, and lookup says"),
        ("a-lookup-that-was-not-answered-proves-nothing", TakesAnErrorForAbsence, "NotFound.*proves nothing"),
        ("nobody-listening-is-not-sent", Raises, "returned, never raised"),
        (
            "silence-is-ambiguous-and-ends-in-time",
            Endless,
            "perform, whose timeout_ms is 400, still ran after",
        ),
        ("cancelling-is-passed-on", KeepsCancellingToItself, "kept it to itself"),
        ("performing-once-is-one-effect", OneKeyForAll, "happened 0 times, not 1"),
        ("a-lost-reply-is-ambiguous", OneKeyForAll, "never went over the wire.*decisive"),
    ],
)
async def test_a_sink_that_lies_is_found_out(promise: str, liar: type[Wrapped], because: str) -> None:
    async with forgetful(liar) as subject:
        with pytest.raises(BrokenPromise, match=because):
            await SINK_PROMISES[promise](subject)


async def test_a_sink_that_does_not_say_keyed_is_not_asked_to_be(sink_promise: SinkPromise) -> None:
    async with forgetful(Wrapped) as subject:
        await sink_promise(subject)


async def test_a_lag_that_is_longer_than_stated_is_found_out(provider: Providers) -> None:
    def build(host: str, port: int) -> Sink:
        url = f"http://{host}:{port}/effects/late"
        return WebhookSink("late", url, guarantee=ASKABLE, lookup_url=url + "/{key}", timeout_ms=TIMEOUT_MS)

    async with ClientSession() as client:
        control = f"{provider.url}/control"
        await (await client.put(control, json={"POST /effects/late": {"lookup_lag_ms": 60_000}})).read()
        subject = at_the_demo_provider(provider, build)
        with pytest.raises(BrokenPromise, match="its lag of 0 ms is over"):
            await SINK_PROMISES["a-lookup-finds-what-happened-within-its-lag"](subject)
        await (await client.put(control, json={})).read()


class SourceThat:
    """Reads honestly, then changes what is told."""

    name, provider, returns = "liar", "liar", Capacity

    def __init__(self, url: str, tell: Callable[[Answer[Capacity], int], Answer[Capacity]]) -> None:
        self._inner = HttpSource("capacity", url + "/capacity/{input.site}", returns=Capacity)
        self._tell = tell
        self._reads = 0

    async def read(self, request: ReadRequest) -> Answer[Capacity]:
        self._reads += 1
        return self._tell(await self._inner.read(request), self._reads)


def another_revision(answer: Answer[Capacity], reads: int) -> Answer[Capacity]:
    return Found(answer.value, f"{reads}") if isinstance(answer, Found) else answer


def no_revision(answer: Answer[Capacity], reads: int) -> Answer[Capacity]:
    return Found(answer.value) if isinstance(answer, Found) else answer


def zero_for_missing(answer: Answer[Capacity], reads: int) -> Answer[Capacity]:
    return Found(Capacity("sg-1", 0), "0") if isinstance(answer, Failed) else answer


def absent_for_missing(answer: Answer[Capacity], reads: int) -> Answer[Capacity]:
    return Absent() if isinstance(answer, Failed) else answer


def raising(answer: Answer[Capacity], reads: int) -> Answer[Capacity]:
    if isinstance(answer, Failed):
        raise ValueError(answer.code)
    return answer


@pytest.mark.parametrize(
    ("promise", "tell", "because"),
    [
        (
            "reading-twice-is-the-same-value-at-the-same-revision",
            another_revision,
            "no fence would ever hold",
        ),
        ("reading-twice-is-the-same-value-at-the-same-revision", no_revision, "has no revision"),
        ("its-deadline-is-kept", zero_for_missing, "never answered"),
        (
            "a-provider-out-of-reach-is-a-failure-and-soon-forgotten",
            absent_for_missing,
            "never arrived.*Absent",
        ),
        ("an-answer-that-breaks-off-is-a-failure", zero_for_missing, "never arrived.*Found"),
        ("an-answer-that-makes-no-sense-is-a-failure", raising, "returned, never raised"),
    ],
)
async def test_a_source_that_lies_is_found_out(
    provider: Providers,
    promise: str,
    tell: Callable[[Answer[Capacity], int], Answer[Capacity]],
    because: str,
) -> None:
    subject = SourceSubject(
        build=lambda host, port: SourceThat(f"http://{host}:{port}", tell),
        provider=place(provider.url),
        input=Site(),
    )
    with pytest.raises(BrokenPromise, match=because):
        await SOURCE_PROMISES[promise](subject)


def test_the_plugin_makes_one_test_of_each_promise(tmp_path: Path) -> None:
    """As a user would: a file of their own, run by a pytest of its own."""
    (tmp_path / "test_mine.py").write_text(
        'pytest_plugins = ["coordinator.testing.conformance"]\n'
        "def test_sink(sink_promise): pass\n"
        "def test_source(source_promise): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert "test_sink[a-lost-reply-is-ambiguous]" in listed
    assert listed.count("::") == len(SINK_PROMISES) + len(SOURCE_PROMISES)
