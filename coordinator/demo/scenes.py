"""The scenes of the tour: each says beforehand what has to come out, and checks it. Their docstrings are what is printed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from rich.padding import Padding

from coordinator.cli.picture import plain
from coordinator.cli.review import review
from coordinator.core.money import Money
from coordinator.demo.guide import Reply, Tour


async def a_quote(tour: Tour) -> None:
    """A quote. Facts are read in parallel, the policy decides, the fence reads the decisive ones again, one transaction commits."""
    decision = (await tour.decide("plain")).decision
    known = await tour.draw(decision)
    tour.expect(decision["status"] == "committed", f"committed: {_price(decision)}")
    tour.expect([op["state"] for op in known.values()] == ["succeeded"], "the quote was sent once")


async def two_writers(tour: Tour) -> None:
    """Two writers at one version. Both have seen version 1 and offer different discounts; one may promise, the other must not send."""
    await tour.settled((await tour.decide("race")).decision)
    before = len(await tour.ledger())
    replies: dict[int, Reply] = {}

    async def write(discount: int) -> None:
        key = f"race-{tour.run}-{discount}"
        replies[discount] = await tour.decide("race", version=1, key=key, discount_percent=discount)

    async with anyio.create_task_group() as tasks:
        for discount in (0, 5):
            tasks.start_soon(write, discount)
    for discount, reply in replies.items():
        said = _price(reply.json) if reply.status == 201 else f"{reply.json['code']}: {reply.json['detail']}"
        tour.say(f"{discount} % more discount → {reply.status} {said}")
        if reply.status == 201:
            await tour.settled(reply.json)
    tour.expect(
        sorted(reply.status for reply in replies.values()) == [201, 409], "one committed, one refused"
    )
    sent = len(await tour.ledger()) - before
    tour.expect(sent == 1, f"the provider's ledger has {sent} new effect")


async def a_slow_optional_reading(tour: Tour) -> None:
    """An optional reading is too slow. Its deadline is 150 ms and the provider takes a second; the decision says so and goes on."""
    async with tour.fault({"/customers/tone-": {"delay_ms": 1000}}):
        decision = (await tour.decide("slow")).decision
    await tour.draw(decision)
    tone = next(item for item in decision["evidence"] if item["name"] == "tone")
    tour.expect(tone["value"] is None and tone["state"] != "found", f"the evidence says tone {tone['state']}")
    terms = (decision["outcome"] or {}).get("terms") or {}
    tour.expect(decision["status"] == "committed", f"committed all the same, in a {terms.get('tone')} tone")


async def a_lost_answer(tour: Tour) -> None:
    """The provider acts, and its answer is lost. We cannot know; it deduplicates by our key, so the same key is sent again."""
    async with tour.fault({"POST /effects": {"lose_answer": True, "times": 1}}):
        decision = (await tour.decide("lost")).decision
        known = await tour.draw(decision)
    ledger = await tour.ledger()
    for operation in known.values():
        attempts, count = operation["attempts"], ledger.get(operation["key"], {"count": 0})["count"]
        tour.expect(attempts > 1, f"{attempts} attempts under one key")
        tour.expect(count == 1, f"the provider's ledger says it happened {count} time")


async def a_moving_cost(tour: Tour) -> None:
    """Evidence moves between reading and commit. The cost rises while the policy thinks; the fence sees it, and the policy runs again."""
    cost = "costs/sg-2-24h"
    before = (await tour.fact(cost))["estimate_minor"]
    async with tour.fault({f"/{cost}": {"bump_revision": True, "times": 2}}):
        decision = (await tour.decide("moving", site="sg-2", hours=24)).decision
    await tour.draw(decision)
    used = next(item["value"] for item in decision["evidence"] if item["name"] == "cost")["estimate_minor"]
    tour.say(
        f"read first {_euro(before + 100)}, found by the fence {_euro(before + 200)}, decided on {_euro(used)}"
    )
    tour.expect(decision["fence"]["rounds"] == 2, f"{decision['fence']['rounds']} rounds of the policy")
    tour.expect(
        used == before + 200, f"the price is made of the cost that held at commit: {_price(decision)}"
    )


async def a_person_approves(tour: Tour) -> None:
    """A person has to approve. The discount is above the limit; what would be promised is shown, and fenced again when it is approved."""
    asked = (await tour.decide("discount", discount_percent=20)).decision
    tour.out.print(Padding(review(asked, plain), (0, 0, 1, 2)))
    tour.expect(asked["status"] == "in_review", f"waits for a person: {asked['outcome']['reason']}")
    done = await tour.review(asked, "approve")
    if done.status != 200:
        tour.complain(f"the approval was answered {done.status} {done.json.get('detail')}")
        return
    known = await tour.settled(done.json)
    tour.expect(
        done.json["outcome"]["terms"] == asked["review"]["proposal"]["terms"],
        f"approved by another key: {_price(done.json)}, as it was shown",
    )
    payloads = {op["payload_hash"] for op in known.values()}
    shown = {effect["payload_hash"] for effect in asked["review"]["proposal"]["effects"]}
    tour.expect(payloads == shown, "what was sent is what was shown")
    late = await tour.review(asked, "reject")
    tour.expect(late.status == 412, f"who comes late changes nothing: {late.status} {late.json.get('code')}")


async def the_same_key(tour: Tour) -> None:
    """The same key again. A client that lost the answer repeats its request, as often as it likes."""
    assert tour.first is not None
    key, body, first = tour.first
    before = len(await tour.ledger())
    again = await tour.send(key, body)
    tour.expect(
        again.body == first.body and again.replayed, f"the same {len(first.body)} bytes, byte for byte"
    )
    tour.expect(len(await tour.ledger()) == before, "nothing was sent")


Scene = Callable[[Tour], Awaitable[None]]
SCENES: tuple[Scene, ...] = (
    a_quote,
    two_writers,
    a_slow_optional_reading,
    a_lost_answer,
    a_moving_cost,
    a_person_approves,
    the_same_key,
)


def _price(decision: Mapping[str, Any]) -> str:
    outcome = decision.get("outcome") or {}
    if not (price := (outcome.get("terms") or {}).get("price")):
        return str(outcome.get("reason") or decision["status"])
    return str(Money(**price))


def _euro(cents: int) -> str:
    return str(Money(cents, "EUR"))
