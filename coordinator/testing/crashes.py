"""The crash sweep: a server fails at every edge between two stages, in every way, and what it left behind is audited.

A case is a failpoint, what happens there (kill, raise, hang, or the reply is lost) and at which passing. Each is played in a tenant of
its own, on one of a few lanes at a time:

    1  a server of its own is started, which works on this lane alone and is told to fail there
    2  callers ask it for decisions, until it has failed
    3  it is killed, whatever it still did: the other two servers are all that is left, and the 30 s to heal begin
    4  whoever was not answered does what a careful caller does: the same again, with the same key, at another server
    5  audit: one decision for each key, the effects of each exactly once, every operation at its end

However far the failed server had come, nothing may be lost, nothing done twice, nothing left open.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from standardwebhooks.webhooks import Webhook
from uuid_utils.compat import uuid7

from coordinator.failpoints import POINTS, Action, actions
from coordinator.testing.audit import ENDED, Verdict, audit, contiguous, parked
from coordinator.testing.forks import ForkedServer, Forks, forks
from coordinator.testing.sweep_types import (
    LANES,
    NOTICE_SECRET,
    PROVIDER_BEHAVIOUR,
    Kind,
    effect_name,
    type_name,
)
from coordinator.testing.world import Reply, World, server_environment, until

HEAL_S = 30.0
FIRE_S = 6.0
FAULTY = -1
"""The failing server stands last in its world's list."""
NOT_AN_ANSWER = (0, 202, 409, 429, 500, 503)


class Case(msgspec.Struct, frozen=True):
    """What happens at a point when it is passed for the ``hit``-th time."""

    point: str
    action: Action
    hit: int

    def __str__(self) -> str:
        return f"{self.action} at {self.point}, passing {self.hit}"

    @property
    def kinds(self) -> Sequence[Kind]:
        """The effects to ask for, one after the other, until the point was passed often enough."""
        if self.point.startswith(("resolve", "notice")):
            return ["parked"] * (self.hit + 1)
        if self.point.startswith("review"):
            return ["reviewed"] * (self.hit + 1)
        if self.point.startswith(("claim", "ask")):
            return ["lost"] * 6  # some of what falls due is found by the healthy servers first
        return ["kept", "lost", "lost", "kept", "lost"]


def cases(*, hits: Sequence[int] = (1, 2)) -> list[Case]:
    return [Case(point, action, hit) for point in POINTS for action in actions(point) for hit in hits]


class Asked(msgspec.Struct, kw_only=True):
    """What a caller asked for, and what it was told, if it was."""

    key: str
    body: dict[str, Any]
    told: Reply | None = None


async def sweep(world: World, chosen: Sequence[Case]) -> list[Verdict]:
    """Play all of these cases, as many at a time as there are lanes; a verdict for each point."""
    waiting = [*chosen]
    found: list[tuple[Case, Verdict]] = []

    async def lane(number: int, forked: Forks) -> None:
        while waiting:
            case = waiting.pop(0)
            found.append((case, await _judged(world, forked, number, case)))

    await world.faults(**PROVIDER_BEHAVIOUR)
    with tempfile.TemporaryDirectory(prefix="drill-sweep-") as folder:
        async with forks(Path(folder)) as forked, anyio.create_task_group() as tasks:
            for number in range(LANES):
                tasks.start_soon(lane, number, forked)
    await world.faults()
    return [
        _summed(point, [(case, verdict) for case, verdict in found if case.point == point])
        for point in dict.fromkeys(case.point for case in chosen)
    ]


def _summed(point: str, found: Sequence[tuple[Case, Verdict]]) -> Verdict:
    return Verdict(
        scenario=f"fails at {point}, {len(found)} ways",
        invariants="I1 I5 I6 I7 I8 I12",
        lost=sum(verdict.lost for _, verdict in found),
        duplicated=sum(verdict.duplicated for _, verdict in found),
        unsettled=sum(verdict.unsettled for _, verdict in found),
        wrong=[f"{case}: {wrong}" for case, verdict in found for wrong in verdict.wrong],
        notes=[f"{case}: {note}" for case, verdict in found for note in verdict.notes],
    )


async def _judged(world: World, forked: Forks, lane: int, case: Case) -> Verdict:
    """A case that cannot be played is a fault too."""
    verdict = Verdict(scenario=str(case), invariants="")
    try:
        await _played(await world.of_another_tenant(), forked, lane, case, verdict)
    except* AssertionError as errors:
        verdict.wrong += [str(error) for error in errors.exceptions]
    return verdict


async def _played(world: World, forked: Forks, lane: int, case: Case, verdict: Verdict) -> None:
    env = {
        **server_environment(world.database_url, world.providers_url),
        "COORDINATOR_SWEEP_LANE": str(lane),
        "COORDINATOR_POLL_MS": "20",  # it is the first to find what is due, so that it is the one to fail
    }
    asked: list[Asked] = []
    if case.point.startswith("claim"):
        await _leave_something_behind(world, forked, lane, env, asked)
    faulty = await forked.start({**env, "COORDINATOR_FAILPOINTS": f"{case.point}={case.action}@{case.hit}"})
    world.servers.append(faulty.url)
    try:
        await _until_it_fails(world, faulty, lane, case, asked)
        verdict.expect(_failed(faulty, case), "the point was never passed")
    finally:
        await faulty.kill()
        world.servers.pop()
    await _healed(world, lane, case, asked, verdict)


async def _leave_something_behind(
    world: World, forked: Forks, lane: int, env: dict[str, str], asked: list[Asked]
) -> None:
    """A server that dies before it has told anyone what the provider answered."""
    dying = await forked.start({**env, "COORDINATOR_FAILPOINTS": "dispatch.after=kill"})
    world.servers.append(dying.url)
    asked.append(_question(world, lane, "kept", 0))
    await _ask(world, asked[-1])
    with anyio.move_on_after(FIRE_S):
        await dying.ended.wait()
    await dying.kill()
    world.servers.pop()


def _failed(faulty: ForkedServer, case: Case) -> bool:
    return faulty.has_said(f"failpoint {case.point}: {case.action}")


async def _until_it_fails(
    world: World, faulty: ForkedServer, lane: int, case: Case, asked: list[Asked]
) -> None:
    """One decision after the other, each to its end unless the server fails before."""
    async with anyio.create_task_group() as tasks:
        for number, kind in enumerate(case.kinds, len(asked)):
            question = _question(world, lane, kind, number)
            asked.append(question)
            over = anyio.Event()

            async def failed_or_over(over: anyio.Event = over) -> bool:
                return over.is_set() or _failed(faulty, case)

            tasks.start_soon(_to_its_end, world, lane, case, question, over)
            with anyio.move_on_after(FIRE_S):
                await until(failed_or_over)
            if _failed(faulty, case):
                break
        tasks.cancel_scope.cancel()


def _question(world: World, lane: int, kind: Kind, number: int) -> Asked:
    name = world.name(f"sweep-{number}")
    body = {
        "type": type_name(lane),
        "input": {"site": world.name("site"), "kind": kind},
        "record": {"kind": "drill-swept", "id": name},
    }
    return Asked(key=name, body=body)


async def _ask(world: World, question: Asked) -> None:
    question.told = await world.post(question.key, question.body, server=FAULTY)


async def _to_its_end(world: World, lane: int, case: Case, question: Asked, over: anyio.Event) -> None:
    """Ask, wait for the operations to end or be parked, and say of those that are parked that they happened."""
    await _ask(world, question)
    if _is_for_a_person(question) and question.told is not None and question.told.status == 201:
        await world.review(question.told.body["id"], "approve", server=FAULTY)
    await until(partial(_over, world, question))
    for op in await _operations(world, question):
        if op["state"] not in ENDED:
            await _say(world, lane, case, op["id"], FAULTY)
    over.set()


def _is_for_a_person(question: Asked) -> bool:
    return bool(question.body["input"]["kind"] == "reviewed")


async def _approved(world: World, decision: str) -> None:
    """The reviewer who got no answer does what the caller does: the same verdict on the same etag, at another server."""

    async def heard() -> bool:
        """the approval is carried out"""
        reply = await world.review(decision, "approve")
        return reply.status == 200 and reply.body["status"] == "committed"

    await until(heard)


async def _operations(world: World, question: Asked) -> list[Any]:
    if question.told is None or question.told.status not in (200, 201):
        return []
    operations: list[Any] = (await world.get(f"/v1/decisions/{question.told.body['id']}"))["operations"]
    return operations


async def _over(world: World, question: Asked) -> bool:
    """Whether each of its operations has ended or is parked."""
    operations = await _operations(world, question)
    return all([op["state"] in ENDED or await parked(world, op["id"]) for op in operations])


async def _healed(world: World, lane: int, case: Case, asked: Sequence[Asked], verdict: Verdict) -> None:
    """What the callers do now, and whether it all comes to its end."""
    deadline = time.monotonic() + HEAL_S
    decisions = []
    for question in asked:
        again = await _repeated(world, question)
        verdict.expect(
            again.status in (200, 201), f"the repeat was answered {again.status} {again.raw[:200]!r}"
        )
        if question.told is not None and question.told.status in (200, 201):
            verdict.expect(
                again.raw == question.told.raw, "the repeat was told something else than the first caller"
            )
            verdict.lost += again.status != 200
        if again.status in (200, 201):
            expected = ("committed", "failed") if case.action == "raise" else ("committed",)
            if _is_for_a_person(question):  # its first answer, for ever; what it became is seen below
                expected = ("in_review",)
                await _approved(world, again.body["id"])
            verdict.expect(again.body["status"] in expected, f"a decision ended as {again.body['status']}")
            decisions.append(again.body["id"])
            question.told = again
            if question.body["input"]["kind"] == "parked":
                await _end_parked(world, lane, case, question)
    await audit(world, verdict, decisions, seconds=deadline - time.monotonic())
    verdict.expect(len(set(decisions)) == len(asked), "there is not one decision for each key")
    for question, decision in zip(asked, decisions, strict=False):
        await _each_once(world, verdict, question, decision)


async def _repeated(world: World, question: Asked) -> Reply:
    async def answered() -> Reply | None:
        """the same key is answered elsewhere"""
        reply = await world.post(question.key, question.body)
        return None if reply.status in NOT_AN_ANSWER else reply

    reply: Reply = await until(answered)
    return reply


async def _end_parked(world: World, lane: int, case: Case, question: Asked) -> None:
    """A person, or the provider in a notice, says that a parked operation happened. Repeated until it is heard, as both do."""

    async def heard() -> bool:
        """what is said of a parked operation is heard"""
        open = [op["id"] for op in await _operations(world, question) if op["state"] not in ENDED]
        said = [await _say(world, lane, case, id, 0) for id in open if await parked(world, id)]
        return len(said) == len(open) and all(reply.status in (200, 409) for reply in said)

    await until(heard)


async def _say(world: World, lane: int, case: Case, operation: str, server: int) -> Reply:
    base = world.servers[server]
    if case.point.startswith("resolve"):
        verdict = {"verdict": "happened", "reference": "told by hand", "note": "drill"}
        return await world.call("POST", f"{base}/v1/operations/{operation}/resolve", body=verdict)
    key = (await world.get(f"/v1/operations/{operation}"))["key"]
    body: dict[str, object] = {"key": key, "happened": True, "reference": "told by notice"}
    now, id = datetime.now(UTC), f"event-{uuid7()}"
    headers = {
        "webhook-id": id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(NOTICE_SECRET).sign(id, now, json.dumps(body)),
    }
    url = f"{base}/v1/notices/{world.tenant}/{effect_name('parked', lane)}"
    return await world.call("POST", url, body=body, headers=headers)


async def _each_once(world: World, verdict: Verdict, question: Asked, decision: str) -> None:
    """One version of its record, and no state entered twice (I2, I12)."""
    shown = await world.get(f"/v1/decisions/{decision}")
    record = question.body["record"]
    history = await contiguous(world, verdict, record["kind"], record["id"])
    expected = 1 if shown["status"] == "committed" else 0
    verdict.expect(
        len(history) == expected, f"{len(history)} versions were made by a decision that {shown['status']}"
    )
    receipts = await world.all_of(f"/v1/receipts?decision={decision}")
    kinds = [receipt["kind"] for receipt in receipts]
    claims = [
        receipt["body"]["fencing_token"] for receipt in receipts if receipt["kind"] == "decision.running"
    ]
    verdict.expect(claims == sorted(set(claims)) != [], f"it was claimed under the tokens {claims}")
    for kind in (
        f"decision.{shown['status']}",
        *(f"operation.{op['state']}" for op in shown["operations"]),
    ):
        verdict.expect(kinds.count(kind) == 1, f"{kinds.count(kind)} receipts of {kind}")
