"""One trace for each decision, that of its caller: every stage is a span in it, and sources and sinks are handed its context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coordinator import Decisive, Evidence, telemetry
from tests.engine.harness import Fact, Running, Sent, running, sending, service_of
from tests.support import eventually

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """OpenTelemetry takes one provider for the life of a process; ours keeps nothing after this module."""
    memory = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    yield memory
    memory.shutdown()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def of(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def coordinator_with(source: Fact, sink: Sent) -> Any:
    declared = Evidence("a", source, deadline_ms=10_000, freshness=Decisive())
    return service_of(declared, policy=sending, effects=[sink])


async def decided_and_sent(service: Running, sink: Sent, exporter: InMemorySpanExporter, **more: Any) -> Any:
    decision = await service.decided(**more)
    await eventually(lambda: len(of(exporter, "coordinator.dispatch")) == 1)
    return decision


async def test_every_stage_is_a_span_in_the_callers_trace(
    database_url: str, spans: InMemorySpanExporter
) -> None:
    source, sink = Fact("a"), Sent()
    async with running(coordinator_with(source, sink), database_url) as service:
        decision = await decided_and_sent(service, sink, spans, traceparent=TRACEPARENT)
    finished = spans.get_finished_spans()
    without_locks = [name for name in telemetry.SPANS if name != "coordinator.lock"]
    assert {span.name for span in finished} == set(without_locks)
    assert {f"{span.context.trace_id:032x}" for span in finished if span.context} == {TRACE}
    assert decision["trace_id"] == TRACE
    for name in without_locks:
        parents = {span.parent.span_id for span in of(spans, name) if span.parent}
        inside = "coordinator.read"
        assert (parents == {int(CALLER, 16)}) == (name != inside), name
    outer = {
        span.context.span_id
        for name in ("gather", "fence")
        for span in of(spans, f"coordinator.{name}")
        if span.context
    }
    assert {span.parent.span_id for span in of(spans, "coordinator.read") if span.parent} == outer


async def test_sources_and_sinks_get_the_context_of_the_span_around_their_call(
    database_url: str, spans: InMemorySpanExporter
) -> None:
    source, sink = Fact("a"), Sent()
    async with running(coordinator_with(source, sink), database_url) as service:
        await decided_and_sent(service, sink, spans, traceparent=TRACEPARENT)

    def contexts(name: str) -> list[str]:
        return [
            f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
            for span in of(spans, name)
            if span.context
        ]

    assert [request.traceparent for request in source.requests] == contexts("coordinator.read")
    assert [operation.traceparent for operation in sink.sends] == contexts("coordinator.dispatch")


@pytest.mark.parametrize("traceparent", [None, "nonsense", f"00-{'0' * 32}-{CALLER}-01"])
async def test_without_a_valid_context_one_trace_begins_here(
    traceparent: str | None, database_url: str, spans: InMemorySpanExporter
) -> None:
    source, sink = Fact("a"), Sent()
    async with running(coordinator_with(source, sink), database_url) as service:
        decision = await decided_and_sent(service, sink, spans, traceparent=traceparent)
    ids = {f"{span.context.trace_id:032x}" for span in spans.get_finished_spans() if span.context}
    assert ids == {decision["trace_id"]}
    assert ids.isdisjoint({TRACE, "0" * 32})


async def test_a_callers_choice_not_to_sample_is_kept(database_url: str, spans: InMemorySpanExporter) -> None:
    source, sink = Fact("a"), Sent()
    async with running(coordinator_with(source, sink), database_url) as service:
        await service.decided(traceparent=f"00-{TRACE}-{CALLER}-00")
        await eventually(lambda: len(sink.sends) == 1)
    assert spans.get_finished_spans() == ()
    assert {request.traceparent for request in source.requests} == {f"00-{TRACE}-{CALLER}-00"}
