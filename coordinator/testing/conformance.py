"""The adapter conformance kit, a pytest plugin: does a sink keep the guarantee that it states, and does a source answer honestly?

Everything that dispatches believes what a sink says. A sink that says *not sent* of something that was sent makes a second effect;
one that says *keyed* of a provider that forgets makes one, too. So the kit puts a proxy that breaks connections (`testing.proxy`)
between the adapter and a real provider, and compares what the adapter says with what really happened there.

    pytest_plugins = ["coordinator.testing.conformance"]          # in a test module or the topmost conftest.py

    @pytest.fixture
    def subject() -> SinkSubject:
        return SinkSubject(
            build=lambda host, port: MySink(f"http://{host}:{port}/pay", timeout_ms=500),
            provider=("127.0.0.1", 8080),                         # a real one: a sandbox, a server of the test's own
            count=how_often_it_really_happened,                   # async, by key
        )

    @pytest.mark.anyio
    async def test_my_sink_keeps_its_word(sink_promise: SinkPromise, subject: SinkSubject) -> None:
        await sink_promise(subject)                               # one test for each promise

`source_promise` and `SourceSubject` do the same for sources. A promise that is broken raises `BrokenPromise`, whose text says what
was observed, and what follows from it in production. What a guarantee does not promise is skipped. Asyncio only.
(PYTEST_DONT_REWRITE: a test module imports its names before pytest loads it as a plugin, and nothing here is a bare assert.)
"""

from __future__ import annotations

import pytest

from coordinator.testing.promises import BrokenPromise, NotPromised, Promise, SinkSubject, SourceSubject
from coordinator.testing.sink_promises import SINK_PROMISES
from coordinator.testing.source_promises import SOURCE_PROMISES

__all__ = ["BrokenPromise", "SinkPromise", "SinkSubject", "SourcePromise", "SourceSubject"]


class SinkPromise:
    """One thing that a sink has to keep to; call it with the sink's subject."""

    def __init__(self, promise: Promise[SinkSubject]) -> None:
        self._promise = promise

    async def __call__(self, subject: SinkSubject) -> None:
        """Raises `BrokenPromise`; skips the test if the sink's guarantee does not say so much."""
        try:
            await self._promise(subject)
        except NotPromised as unsaid:
            pytest.skip(str(unsaid))


class SourcePromise:
    """The same for a source."""

    def __init__(self, promise: Promise[SourceSubject]) -> None:
        self._promise = promise

    async def __call__(self, subject: SourceSubject) -> None:
        """Raises `BrokenPromise`."""
        await self._promise(subject)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `sink_promise` or `source_promise` becomes one test for each."""
    if "sink_promise" in metafunc.fixturenames:
        sinks = {name: SinkPromise(promise) for name, promise in SINK_PROMISES.items()}
        metafunc.parametrize("sink_promise", list(sinks.values()), ids=list(sinks))
    if "source_promise" in metafunc.fixturenames:
        sources = {name: SourcePromise(promise) for name, promise in SOURCE_PROMISES.items()}
        metafunc.parametrize("source_promise", list(sources.values()), ids=list(sources))
