"""Reserve: no work begins before the money for it is held.

A decision reserves in the transaction that admits it. One that was admitted without, since its type says `wait` or `review`, and
one that was taken over from a silent process, whose reservations are uncertain now, come here first:

    wait       up to ``budget_wait_ms``: at each settlement in this process, and now and then; then it rests, refused
    reduce     optional paid evidence is left out: `skipped`, with the reason
    review     it goes to a person, with nothing read
    refuse     it rests, refused

While it waits it lends its slot to others.
"""

from __future__ import annotations

import random
import time

import msgspec

from coordinator.core.budget import Short
from coordinator.core.fence import Check
from coordinator.engine.commit import Rest, rest_without_commit
from coordinator.engine.locks import without_slot
from coordinator.engine.run import Engine, Run
from coordinator.engine.spending import exhausted, want_of
from coordinator.errors import CommitUnknown, Overloaded
from coordinator.store.reserve import Secured

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


async def reserve_before_work(engine: Engine, run: Run) -> Rest | None:
    """None once the decision holds what it needs; else how it comes to rest without it."""
    if not run.type.needs or run.held is not None:
        return None
    began = time.monotonic()
    if run.short is None or run.type.on_exhausted == "wait":
        await _until_held(engine, run, began + run.type.budget_wait_ms / 1000)
        run.stages.append(run.stage_now("reserve", round((time.monotonic() - began) * 1000)))
    if run.short is None:
        return None
    if run.type.on_exhausted == "review":
        return rest_without_commit("in_review", "budget-exhausted", exhausted(run.short).detail)
    refusal = exhausted(run.short, decision=run.id)
    return rest_without_commit("unresolved", "budget-exhausted", refusal.detail, refusal=refusal)


async def reserve_again(engine: Engine, run: Run) -> Check | None:
    """For an approval: what was reserved at first was closed when the decision came into review. What did not hold, if there is no
    money for it now."""
    if not run.type.needs:
        return None
    await _until_held(engine, run, time.monotonic())
    if run.short is None:
        return None
    needed, left = msgspec.to_builtins(run.short.needed), msgspec.to_builtins(run.short.available)
    return Check(
        evidence="budget",
        field=run.short.budget,
        then={"needed": needed},
        now={"available": left},
        held=False,
    )


async def _until_held(engine: Engine, run: Run, until: float) -> None:
    """Asks once, or with `wait` until then, without a slot."""
    if await _asked(engine, run) or run.type.on_exhausted != "wait":
        return
    pause = FIRST_PAUSE_S
    async with without_slot(engine, run):
        while (left := until - time.monotonic()) > 0:
            await engine.freed.wait(run.tenant, min(left, pause * random.uniform(0.5, 1)))
            if await _asked(engine, run):
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)


async def _asked(engine: Engine, run: Run) -> bool:
    """Whether it holds what it needs. A decision that another process holds by now goes on as it is: its commit is refused."""
    answer = await _secure(engine, run)
    if isinstance(answer, Short):
        run.short = answer
        return False
    run.held, run.short = answer or {}, None
    return True


async def _secure(engine: Engine, run: Run) -> Secured | Short | None:
    """Asking again is safe: what the decision holds already is not reserved twice."""
    want = want_of(engine, run.type, run.id, run.token, run.ends_at - time.monotonic(), run.request.ceiling)
    while True:
        try:
            return await engine.boundary.secure.submit(run.tenant, want)
        except (CommitUnknown, Overloaded):
            await engine.freed.wait(run.tenant, LONGEST_PAUSE_S)
