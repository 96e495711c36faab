"""Every limit of a service, with its unit and its default. Each is settable by an environment variable ``COORDINATOR_<NAME>``."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from coordinator.core.fairness import ClassLimits
from coordinator.errors import ConfigurationError

DEFAULT_CLASSES = {
    "urgent": ClassLimits(weight=8, reserved=8, queue_depth=200, start_objective_ms=250),
    "interactive": ClassLimits(weight=4, reserved=8, queue_depth=500, start_objective_ms=2_000),
    "bulk": ClassLimits(weight=1, reserved=0, queue_depth=10_000, start_objective_ms=600_000),
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one process. Sizes are counts, durations are in the unit the name ends with."""

    pool_size: int = 10
    """Database connections."""
    statement_cache_size: int = 200
    """Prepared statements kept per connection; 0 behind a pooler in transaction mode (PgBouncer before 1.21)."""
    max_running: int = 256
    """Decisions that run at once; a class whose reserve is lent may run it beyond that, until what was lent is back."""
    classes: dict[str, ClassLimits] = msgspec.field(default_factory=lambda: dict(DEFAULT_CLASSES))
    max_batch: int = 128
    """Calls that may ride one transaction."""
    max_waiting_commits: int = 4096
    """Calls of one kind that may wait for the database before new decisions are refused with 503."""
    lease_ms: int = 5_000
    """How long a process may be silent before another takes over its decisions and operations."""
    poll_ms: int = 500
    """How often a process looks for work that nobody holds."""
    queue_poll_ms: int = 100
    """How often a process looks how many decisions are queued; of its own it knows at once."""
    max_run_ms: int = 600_000
    """How long one run may hold its slot; then it is stopped and the decision queued again."""
    max_requeues: int = 5
    """How often a decision may be queued again, because its process fell silent or its run took too long, before it is put before a
    person."""
    provider_concurrency: int = 64
    """Calls to one provider at once, from this process. A declared `Pool` takes its place."""
    processes: int = 1
    """Server processes that share the pools, over all machines: each keeps an equal part of the slots ready."""
    pool_poll_ms: int = 100
    """How often a process that lacks slots of a provider, or owes some to others, looks at who holds how many."""
    max_approving: int = 64
    """Approvals that one process carries out at once; they take no slot of a class. Beyond it they are refused with 503."""
    review_poll_ms: int = 5_000
    """How often a process looks for reviews whose time is over, and counts the open ones."""
    max_dispatching: int = 256
    """Operations dispatched at once."""
    retries_per_minute: int = 600
    """Repeated sends of one tenant, over all processes; what exceeds it waits for the next minute."""
    budget_sweep_ms: int = 1_000
    """How often a process looks for reservations that have expired, and for providers to ask what they billed."""
    budget_ask_ms: int = 60_000
    """How long after a provider was asked about an uncertain reservation it is asked again."""
    cleanup_ms: int = 2_000
    """How long the clean-ups of one cancelled reading may take together."""
    worker_lease_ms: int = 15_000
    """How long a remote worker may be silent about a task before another gets it, and about itself before it counts as offline."""
    worker_poll_ms: int = 200
    """How often a process looks for tasks that other processes asked for, ended or lost, while somebody here waits for any."""
    worker_drain_ms: int = 30_000
    """How long a draining worker may go on with what it has, unless it names another limit."""
    task_attempts: int = 3
    """How often a task is given to a worker before it fails because all of them fell silent."""
    max_kept_readings: int = 10_000
    """Readings kept for `MaxAge` evidence to be used again, in this process; 0 keeps none."""
    max_kept_bytes: int = 32 * 1024 * 1024
    """Size of all kept readings together, as JSON."""
    max_body_bytes: int = 256 * 1024
    default_wait_s: int = 10
    max_wait_s: int = 60
    max_evidence_bytes: int = 256 * 1024
    """Size of one evidence value, as JSON."""
    max_outcome_bytes: int = 1024 * 1024
    """Size of one outcome: terms, changes and payloads together, as JSON."""
    confirm_max_age_ms: int = 2_000
    """If the commit begins later than this after the fence, the fence is made again."""
    max_streams: int = 256
    """Followers of decisions at once, over all processes of one `serve`; beyond it 503."""
    stream_buffer: int = 64
    """How many events a follower may lag behind before it holds back the source that streams."""
    stream_stall_ms: int = 5_000
    """How long a follower may not take what it is sent before it is cut; it can come back and has lost nothing."""
    stream_heartbeat_s: float = 15.0
    """A stream that has nothing to tell says so this often."""
    stream_linger_s: float = 60.0
    """How long a stream goes on after the decision rests, while its operations have not ended."""
    follow_ms: int = 500
    """How often a process asks whether what it runs is followed from another one, and writes down what those wait for."""
    max_parts: int = 10_000
    """Parts that one reading may stream."""
    lock_margin_ms: int = 30_000
    """How long past its decision's time limit a named lock is kept for it, if nobody ends that decision."""
    lock_poll_ms: int = 100
    """How often a decision asks again for a named lock that another process holds; jittered."""
    max_lock_waiters: int = 256
    """Decisions of one process that may wait for a named lock, or for money, without a slot; what exceeds it keeps its slot."""
    lock_patience_ms: int = 500
    """How long a process may hand a named lock on among its own decisions while another process waits for it."""
    cancels_at_once: int = 16
    """Decisions of one session that are cancelled at the same time."""
    drain_s: int = 20
    """How long a stopping process waits for what is running."""
    key_cache_s: int = 5
    """How long a checked API key is remembered; a revocation takes effect within this."""
    command_timeout_s: float = 10.0
    """Longest single database statement."""


def settings_from_env(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read ``COORDINATOR_<NAME>`` for every field; ``COORDINATOR_CLASSES`` is a JSON object. Raises `ConfigurationError`."""
    given: dict[str, object] = {}
    for field in msgspec.structs.fields(Settings):
        text = environ.get(f"COORDINATOR_{field.name.upper()}")
        if text is not None:
            try:
                given[field.name] = msgspec.json.decode(text, type=field.type)
            except msgspec.MsgspecError as error:
                raise ConfigurationError(f"COORDINATOR_{field.name.upper()}={text!r}: {error}") from None
    settings = Settings(**given)  # type: ignore[arg-type]  # each value was decoded as its field's own type
    if sum(limits.reserved for limits in settings.classes.values()) >= settings.max_running:
        raise ConfigurationError(
            "the classes reserve all of max_running: raise COORDINATOR_MAX_RUNNING or reserve less"
        )
    return settings
