"""Every span, metric and event name, and the few functions that emit them.

    span                   around                                            attributes
    coordinator.admit      making the decision durable                       decision.id, decision.type
    coordinator.lock       waiting for its named locks, and taking them      lock.count
    coordinator.gather     reading evidence, one round                       evidence.count
    coordinator.read       one source                                        evidence.name, evidence.state
    coordinator.decide     the policy                                        outcome.kind
    coordinator.fence      re-reading decisive evidence                      fence.held
    coordinator.commit     the transaction that brings it to rest            decision.status
    coordinator.dispatch   one attempt at one operation                      operation.id, operation.step

    metric                                        type       labels
    coordinator_decisions_total                   counter    type, status
    coordinator_decision_seconds                  histogram  type
    coordinator_stage_seconds                     histogram  stage
    coordinator_readings_total                    counter    source, state
    coordinator_readings_saved_total              counter    source, how
    coordinator_calls_cut_off_total               counter    source
    coordinator_operations_total                  counter    effect, state
    coordinator_tasks_total                       counter    source, state
    coordinator_transactions_total                counter    kind
    coordinator_running                           gauge      class
    coordinator_queued                            gauge      class
    coordinator_oldest_queued_seconds             gauge      class
    coordinator_start_seconds                     histogram  class
    coordinator_late_starts_total                 counter    class
    coordinator_start_estimate_error_seconds      histogram  class
    coordinator_refused_total                     counter    class
    coordinator_requeued_total                    counter    reason
    coordinator_taken_over_total                  counter    what
    coordinator_streams                           gauge      origin
    coordinator_streams_cut_total                 counter    why
    coordinator_parts_total                       counter    source
    coordinator_reviews_open                      gauge      type
    coordinator_reviews_total                     counter    type, verdict
    coordinator_review_age_seconds                histogram  type
    coordinator_pool_busy                         gauge      provider
    coordinator_pool_waiting                      gauge      provider
    coordinator_pool_oldest_wait_seconds          gauge      provider
    coordinator_pool_rate_waits_total             counter    provider
    coordinator_reservations_reconciled_total     counter    became
    coordinator_cleanups_total                    counter    evidence, outcome
    coordinator_locks_waiting                     gauge      type
    coordinator_lock_wait_seconds                 histogram  type
    coordinator_locks_lost_total                  counter    type

No label carries anything of a tenant: names of types, sources, providers and effects are the deployer's own, fixed when the module loads.

One trace per decision: a caller's W3C ``traceparent`` is continued, otherwise a trace begins here; sources and sinks get the
context of the span around their call. Without an exporter (OTEL_EXPORTER_OTLP_ENDPOINT unset) spans cost next to nothing.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, TypeVar

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import Counter, Gauge, Histogram

SPANS = tuple(
    f"coordinator.{stage}"
    for stage in ("admit", "lock", "gather", "read", "decide", "fence", "commit", "dispatch")
)


M = TypeVar("M", Counter, Gauge, Histogram)


class Labelled(Generic[M]):
    """A metric whose children are looked up once: `labels` of the library validates and locks at every call."""

    def __init__(self, metric: M) -> None:
        self.labels: Callable[..., M] = functools.cache(metric.labels)


DECISIONS = Labelled(
    Counter("coordinator_decisions_total", "Decisions that came to rest", ["type", "status"])
)
DECISION_SECONDS = Labelled(Histogram("coordinator_decision_seconds", "From admission to rest", ["type"]))
STAGE_SECONDS = Labelled(Histogram("coordinator_stage_seconds", "Time in one stage of the path", ["stage"]))
READINGS = Labelled(Counter("coordinator_readings_total", "Readings of sources", ["source", "state"]))
READINGS_SAVED = Labelled(
    Counter(
        "coordinator_readings_saved_total", "Readings that needed no call of their own", ["source", "how"]
    )
)
CALLS_CUT_OFF = Labelled(
    Counter("coordinator_calls_cut_off_total", "Calls that took longer than attempt_ms", ["source"])
)
OPERATIONS = Labelled(
    Counter("coordinator_operations_total", "State changes of operations", ["effect", "state"])
)
TASKS = Labelled(
    Counter("coordinator_tasks_total", "Tasks of remote workers that have ended", ["source", "state"])
)
TRANSACTIONS = Labelled(Counter("coordinator_transactions_total", "Transactions of the path", ["kind"]))
RUNNING = Labelled(
    Gauge("coordinator_running", "Decisions that hold a slot", ["class"], multiprocess_mode="livesum")
)
QUEUED = Labelled(
    Gauge("coordinator_queued", "Decisions that wait for a slot", ["class"], multiprocess_mode="livemax")
)
OLDEST_QUEUED = Labelled(
    Gauge(
        "coordinator_oldest_queued_seconds",
        "Age of the oldest that waits for a slot",
        ["class"],
        multiprocess_mode="livemax",
    )
)
STARTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
START_SECONDS = Labelled(
    Histogram("coordinator_start_seconds", "From admission to start", ["class"], buckets=STARTS)
)
LATE_STARTS = Labelled(
    Counter("coordinator_late_starts_total", "Starts later than the class's objective", ["class"])
)
ESTIMATE_ERROR_SECONDS = Labelled(
    Histogram(
        "coordinator_start_estimate_error_seconds",
        "By how much the estimated start of a queued decision was wrong",
        ["class"],
        buckets=STARTS,
    )
)
REFUSED = Labelled(
    Counter("coordinator_refused_total", "Requests refused because their queue was full", ["class"])
)
REQUEUED = Labelled(Counter("coordinator_requeued_total", "Decisions queued again", ["reason"]))
TAKEN_OVER = Labelled(
    Counter("coordinator_taken_over_total", "Work taken over from a silent process", ["what"])
)
STREAMS = Labelled(
    Gauge(
        "coordinator_streams",
        "Followers of decisions, by where they read",
        ["origin"],
        multiprocess_mode="livesum",
    )
)
STREAMS_CUT = Labelled(
    Counter("coordinator_streams_cut_total", "Followers that were cut or turned away, and why", ["why"])
)
PARTS = Labelled(Counter("coordinator_parts_total", "Parts that sources streamed", ["source"]))
REVIEWS_OPEN = Labelled(
    Gauge(
        "coordinator_reviews_open", "Decisions that wait for a person", ["type"], multiprocess_mode="livemax"
    )
)
REVIEWS = Labelled(
    Counter("coordinator_reviews_total", "Verdicts on reviews, and reviews that expired", ["type", "verdict"])
)
REVIEW_AGE_SECONDS = Labelled(
    Histogram(
        "coordinator_review_age_seconds",
        "How long a decision had been in review when it was approved or rejected",
        ["type"],
        buckets=(1, 10, 60, 600, 3_600, 6 * 3_600, 24 * 3_600, 7 * 24 * 3_600),
    )
)
POOL_BUSY = Labelled(
    Gauge("coordinator_pool_busy", "Calls under way", ["provider"], multiprocess_mode="livesum")
)
POOL_WAITING = Labelled(
    Gauge(
        "coordinator_pool_waiting",
        "Calls that wait for a slot or for the rate",
        ["provider"],
        multiprocess_mode="livesum",
    )
)
POOL_OLDEST_WAIT = Labelled(
    Gauge(
        "coordinator_pool_oldest_wait_seconds",
        "Age of the call that has waited longest",
        ["provider"],
        multiprocess_mode="livemax",
    )
)
POOL_RATE_WAITS = Labelled(
    Counter("coordinator_pool_rate_waits_total", "Calls that had to wait for the rate", ["provider"])
)
CLEANUPS = Labelled(
    Counter(
        "coordinator_cleanups_total",
        "Clean-ups of cancelled readings: done, failed or hung",
        ["evidence", "outcome"],
    )
)
LOCKS_WAITING = Labelled(
    Gauge(
        "coordinator_locks_waiting",
        "Decisions that wait for a named lock",
        ["type"],
        multiprocess_mode="livesum",
    )
)
LOCK_WAIT_SECONDS = Labelled(
    Histogram("coordinator_lock_wait_seconds", "Until a decision had all its named locks", ["type"])
)
LOCKS_LOST = Labelled(
    Counter("coordinator_locks_lost_total", "Commits refused because a named lock was another's", ["type"])
)

RECONCILED = Labelled(
    Counter("coordinator_reservations_reconciled_total", "Reservations nobody closed in time", ["became"])
)

_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})\Z")
_tracer = trace.get_tracer("coordinator")


def export_spans_if_configured() -> None:
    """Send spans by OTLP where OTEL_EXPORTER_OTLP_ENDPOINT says so. Needs the extra ``otlp``."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": "decision-coordinator"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def continued_or_new(traceparent: str | None) -> str:
    """The caller's W3C traceparent if it is valid, else that of a new trace, which is sampled."""
    if traceparent is not None and _TRACEPARENT.match(traceparent):
        return traceparent
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def trace_id(traceparent: str) -> str:
    return traceparent[3:35]


def span(name: str, traceparent: str, **attributes: str | int | bool) -> AbstractContextManager[str]:
    """A span under ``traceparent``; as a context it gives the traceparent to pass on to whatever is called inside."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # nobody records
        return nullcontext(traceparent)
    return _recorded(name, traceparent, attributes)


@contextmanager
def _recorded(name: str, traceparent: str, attributes: Mapping[str, str | int | bool]) -> Iterator[str]:
    parent = trace.NonRecordingSpan(
        trace.SpanContext(
            int(traceparent[3:35], 16),
            int(traceparent[36:52], 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(traceparent[53:55], 16)),
        )
    )
    with _tracer.start_as_current_span(name, trace.set_span_in_context(parent)) as current:
        if not current.is_recording():
            yield traceparent
            return
        current.set_attributes({key.replace("_", ".", 1): value for key, value in attributes.items()})
        inside = current.get_span_context()
        yield f"00-{inside.trace_id:032x}-{inside.span_id:016x}-{int(inside.trace_flags):02x}"
