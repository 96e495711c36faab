"""The conflict scenarios: many callers want one thing. Each is run against two servers on one database, and audited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio

from coordinator.testing.audit import Verdict, audit, contiguous, settled_decision
from coordinator.testing.sweep_types import type_name
from coordinator.testing.world import LEASE_MS, Reply, World

Scenario = Callable[[World], Awaitable[Verdict]]


async def all_at_once(calls: Sequence[Callable[[], Awaitable[Reply]]]) -> list[Reply]:
    """The replies, in the order of the calls."""
    replies: dict[int, Reply] = {}

    async def one(index: int) -> None:
        replies[index] = await calls[index]()

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(one, index)
    return [replies[index] for index in range(len(calls))]


async def two_writers_at_version_eight(world: World) -> Verdict:
    """Both read version 8 and propose another discount: one makes version 9, the other is refused and sends nothing."""
    verdict = Verdict(scenario="two writers at version eight", invariants="I2 I3")
    record = world.name("eight")
    for version in range(8):
        reply = await world.put_record("drill-quote", record, {"discount": version, "hours": 1}, version)
        verdict.expect(reply.status in (200, 201), f"PUT answered {reply.status} {reply.raw[:200]!r}")
    before = await world.ledger()
    site = world.name("site")
    replies = await all_at_once(
        [
            partial(
                world.quote,
                world.name(f"eight-{discount}"),
                record,
                site=site,
                discount=discount,
                server=server,
                expected_version=8,
            )
            for server, discount in ((0, 10), (1, 20))
        ]
    )
    statuses = sorted(reply.status for reply in replies)
    verdict.expect(statuses == [201, 409], f"the answers were {statuses}")
    loser = next((reply for reply in replies if reply.status == 409), None)
    if loser:
        verdict.expect(loser.body["code"] == "stale-version", f"the loser was told {loser.body['code']}")
        verdict.expect(
            loser.body.get("current_version") == 9, f"the loser was told {loser.body.get('current_version')}"
        )
        verdict.expect(
            not (await settled_decision(world, loser.body["decision"]))["operations"],
            "the loser has operations",
        )
    winners = [reply.body["id"] for reply in replies if reply.status == 201]
    await audit(world, verdict, winners)
    sent = set(await world.ledger()) - set(before)
    verdict.expect(len(sent) == 1, f"{len(sent)} effects happened")
    history = await contiguous(world, verdict, "drill-quote", record)
    verdict.expect(history[-1]["version"] == 9, f"the record is at version {history[-1]['version']}")
    return verdict


async def fifty_posts_of_one_key(world: World) -> Verdict:
    """Fifty parallel posts of one key over two processes: one execution, nobody sees a 5xx."""
    verdict = Verdict(scenario="fifty posts of one key", invariants="I5 I11")
    key, record, site = world.name("fifty"), world.name("fifty"), world.name("site")
    replies = await all_at_once(
        [partial(world.quote, key, record, site=site, server=n % 2) for n in range(50)]
    )
    statuses = Counter(reply.status for reply in replies)
    verdict.notes.append(f"answers: {dict(statuses)}")
    verdict.expect(set(statuses) <= {200, 201, 202, 409}, f"the answers were {dict(statuses)}")
    verdict.expect(statuses[201] <= 1, f"{statuses[201]} callers were told that they made it")
    ids = {reply.body["id"] for reply in replies if reply.status in (200, 201)}
    verdict.expect(len(ids) == 1, f"{len(ids)} decisions were made")
    verdict.expect(
        len({reply.raw for reply in replies if reply.status in (200, 201)}) == 1, "the answers differ"
    )
    await audit(world, verdict, sorted(ids))
    await contiguous(world, verdict, "drill-quote", record)
    return verdict


async def one_key_two_meanings(world: World) -> Verdict:
    """The same key with another body is refused; with another spelling of the same body it is a replay."""
    verdict = Verdict(scenario="one key, two meanings", invariants="I11")
    key, record, site = world.name("meaning"), world.name("meaning"), world.name("site")
    first = await world.quote(key, record, site=site, discount=5)
    other = await world.quote(key, record, site=site, discount=6, server=1)
    same = await world.quote(key, record, site=site, discount=5, server=1)
    verdict.expect(other.status == 422, f"the other body was answered {other.status}")
    verdict.expect((same.status, same.raw) == (200, first.raw), f"the same body was answered {same.status}")
    await audit(world, verdict, [first.body["id"]])
    return verdict


async def write_skew_over_two_records(world: World) -> Verdict:
    """Each of two decisions relies on the record that the other one changes: both may not commit on the old versions."""
    verdict = Verdict(scenario="write skew over two records", invariants="I3")
    both_left = 0
    for attempt in range(10):
        names = [world.name(f"doctor-{attempt}-{n}") for n in (0, 1)]
        for name in names:
            await world.put_record("drill-duty", name, {"on_call": True}, 0)

        async def leaves(me: int, names: list[str] = names, attempt: int = attempt) -> Reply:
            body = {
                "type": "drill-leave",
                "input": {"other": names[1 - me]},
                "record": {"kind": "drill-duty", "id": names[me]},
            }
            return await world.post(world.name(f"leave-{attempt}-{me}"), body, server=me)

        await all_at_once([partial(leaves, me) for me in (0, 1)])
        duties = [(await world.get(f"/v1/records/drill-duty/{name}"))["data"]["on_call"] for name in names]
        both_left += not any(duties)
    verdict.expect(both_left == 0, f"in {both_left} of 10 rounds both went off call")
    return verdict


async def evidence_moves_before_commit(world: World) -> Verdict:
    """Capacity moves after it was read and before the commit: the policy runs again on what it is now."""
    verdict = Verdict(scenario="evidence moves before commit", invariants="I3")
    site, record = world.name("moving"), world.name("moving")
    await world.faults(**{f"/capacity/{site}": {"bump_revision": True, "times": 2}})
    reply = await world.quote(world.name("moving"), record, site=site)
    await world.faults()
    verdict.expect(reply.status == 201, f"the answer was {reply.status} {reply.raw[:200]!r}")
    if reply.status == 201 and reply.body["status"] == "committed":
        now = (await world.call("GET", f"{world.providers_url}/capacity/{site}")).body["available_hours"]
        told = reply.body["outcome"]["terms"]["free_hours"]
        verdict.expect(told == now, f"committed on {told} free hours while there were {now}")
        verdict.expect(reply.body["fence"]["rounds"] > 1, "the policy ran once only")
        checks = {
            (check["evidence"], check["field"]): check["held"] for check in reply.body["fence"]["checks"]
        }
        verdict.expect(all(checks.values()), "a check of the committed round failed")
        await audit(world, verdict, [reply.body["id"]])
    return verdict


async def hot_record(world: World) -> Verdict:
    """Forty callers over two processes change one record without naming a version: losers re-read and reconsider."""
    verdict = Verdict(scenario="forty writers of one record", invariants="I2")
    record, site = world.name("hot"), world.name("site")
    replies = await all_at_once(
        [
            partial(world.quote, world.name(f"hot-{n}"), record, site=site, discount=n, server=n % 2)
            for n in range(40)
        ]
    )
    statuses = Counter(reply.status for reply in replies)
    verdict.notes.append(f"answers: {dict(statuses)}")
    verdict.expect(set(statuses) <= {201, 409}, f"the answers were {dict(statuses)}")
    committed = [
        reply.body["id"] for reply in replies if reply.status == 201 and reply.body["status"] == "committed"
    ]
    history = await contiguous(world, verdict, "drill-quote", record)
    verdict.expect(len(history) == len(committed), f"{len(committed)} committed, {len(history)} versions")
    await audit(world, verdict, committed)
    return verdict


async def two_dispatchers_of_one_operation(world: World) -> Verdict:
    """A dispatcher is paused past its lease in the middle of its call, another takes over, then the first one wakes: one effect,
    and the late one changes nothing."""
    verdict = Verdict(scenario="two dispatchers of one operation", invariants="I5 I8")
    if world.start is None:
        verdict.skipped = "needs server processes of its own"
        return verdict
    with world.start("") as paused:
        world.servers.append(paused.url)
        await world.faults(**{"POST /effects/drill-send": {"delay_ms": 600, "times": 1}})
        key, record = world.name("paused"), world.name("paused")
        reply = await world.quote(key, record, site=world.name("site"), server=2)
        verdict.expect(reply.status == 201, f"the answer was {reply.status} {reply.raw[:200]!r}")
        paused.pause()
        await anyio.sleep(2 * LEASE_MS / 1000)  # past the lease: this is what the scenario is about
        decision = await settled_decision(world, reply.body["id"])
        paused.resume()
        await world.faults()
        settled = decision["operations"][0]
        receipts = await world.all_of(f"/v1/receipts?operation={settled['id']}")
        verdict.expect(
            any(r["kind"] == "operation.taken-over" for r in receipts), "nobody took the operation over"
        )
        await audit(world, verdict, [reply.body["id"]])
        world.servers.pop()
    return verdict


async def two_reviewers_at_once(world: World) -> Verdict:
    """One approves and one rejects what both have been shown: one verdict counts, the other finds the review stale."""
    verdict = Verdict(scenario="two reviewers at once", invariants="I2 I5 I12")
    if not world.reviewer:
        verdict.skipped = "needs a key of a reviewer"
        return verdict
    decisions = []
    for n in range(5):
        record = world.name(f"reviewed-{n}")
        body = {
            "type": type_name(0),
            "input": {"site": world.name("site"), "kind": "reviewed"},
            "record": {"kind": "drill-swept", "id": record},
        }
        asked = await world.post(record, body)
        decision = asked.body["id"]
        replies = await all_at_once(
            [
                partial(world.review, decision, said, server=server)
                for server, said in enumerate(("approve", "reject"))
            ]
        )
        statuses = sorted(reply.status for reply in replies)
        verdict.expect(statuses == [200, 412], f"the answers were {statuses}")
        now = (await world.get(f"/v1/decisions/{decision}"))["status"]
        told = [reply.body["status"] for reply in replies if reply.status == 200]
        verdict.expect(told == [now], f"the decision is {now}, and the winner was told {told}")
        history = await contiguous(world, verdict, "drill-swept", record)
        verdict.expect(
            len(history) == (now == "committed"), f"{now}, and the record has {len(history)} versions"
        )
        decisions.append(decision)
    await audit(world, verdict, decisions)
    return verdict


CONFLICTS: tuple[Scenario, ...] = (
    two_writers_at_version_eight,
    two_dispatchers_of_one_operation,
    fifty_posts_of_one_key,
    one_key_two_meanings,
    write_skew_over_two_records,
    evidence_moves_before_commit,
    hot_record,
    two_reviewers_at_once,
)


def first_line(scenario: Any) -> str:
    return str(scenario.__doc__).split("\n", maxsplit=1)[0]
