"""Named locks of a decision under way: its turn in this process first, then the lock in the database, one name after the other.

    turn     per name the decisions of this process stand in line (`lines.py`). Only the head asks the database; whoever has the
             lock stays the head until its decision rests, and then the next one asks at once
    ask      one transaction takes what is free of the names whose turn it is (`core.lock`, `store.locks`)
    again    what another process has is asked for again, every `lock_poll_ms` with jitter; never by NOTIFY

Names come in the global order, in the lines as in the database, and whoever is refused a name leaves the lines behind it: no circle
of waiting can close. A decision that runs anew asks for what it had before it stands in any line: it may be its own still, and those
who stand there may be waiting for just that. The decision's time limit bounds the waiting.

Whoever waits gives its slot back meanwhile, up to `max_lock_waiters` of them: beyond that slots are kept, so that those who would only
wait as well stay in the queue.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from coordinator import telemetry
from coordinator.core.lock import Wish
from coordinator.engine.run import Engine, Run
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.failpoints import failpoint
from coordinator.store.locks import Claim, Granted


async def take(engine: Engine, run: Run) -> bool:
    """Wait until the decision has all its locks, and take its record as it is then. False if somebody else holds the decision."""
    began = time.monotonic()
    waiting = telemetry.LOCKS_WAITING.labels(run.type.name)
    waiting.inc()
    try:
        with run.stage("lock", lock_count=len(run.lock_names)):
            async with AsyncExitStack() as lent:
                return await _take_all(engine, run, lent)
    finally:
        waiting.dec()
        telemetry.LOCK_WAIT_SECONDS.labels(run.type.name).observe(time.monotonic() - began)


async def _take_all(engine: Engine, run: Run, lent: AsyncExitStack) -> bool:
    names, has_slot = run.lock_names, True
    asks, ready = run.begun_before, 0
    run.locks = {}
    while True:
        if asks:
            granted = await _ask(engine, run, ready)
            if granted is None:
                return False
            run.locks = dict(granted.tokens)
            if len(run.locks) == len(names):
                run.record = granted.record
                run.waits_for = None
                return True
            run.places.leave(names[len(run.locks) + 1 :])
        run.waits_for = names[len(run.locks)]
        refused = ready > 0 and run.places.is_head(run.waits_for)
        if has_slot and (refused or not run.places.heads([run.waits_for])):
            has_slot = False
            await lent.enter_async_context(without_slot(engine, run))
        if refused:
            await anyio.sleep(_until_the_next_poll(engine))
        await run.places.turn(run.waits_for)
        asks, ready = True, len(run.locks) + run.places.heads(names[len(run.locks) :])


@asynccontextmanager
async def without_slot(engine: Engine, run: Run) -> AsyncIterator[None]:
    """For a block that waits for something else than work. As many may wait so as the bound says; beyond it they keep their slot."""
    if engine.lines.without_slot >= engine.settings.max_lock_waiters:
        yield
        return
    engine.lines.without_slot += 1
    try:
        async with run.lend_slot():
            yield
    finally:
        engine.lines.without_slot -= 1


async def _ask(engine: Engine, run: Run, ready: int) -> Granted | None:
    """Repeated while the database is away; to ask again for what one has changes nothing."""
    while True:
        lasts_ms = max(0, round((run.ends_at - time.monotonic()) * 1000))
        wish = Wish(run.id, run.token, run.lock_names, ready, lasts_ms)
        try:
            granted = await engine.boundary.lock.submit(run.tenant, Claim(wish, run.record_key))
            await failpoint("lock.after")
            return granted
        except (CommitUnknown, Overloaded):
            await anyio.sleep(_until_the_next_poll(engine))


def _until_the_next_poll(engine: Engine) -> float:
    return random.uniform(0.5, 1.5) * engine.settings.lock_poll_ms / 1000
