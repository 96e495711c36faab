"""Budgets as a decision meets them: refused, waiting, reduced or reviewed where there is no room, and settled when it rests (I9, I10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from uuid_utils.compat import uuid7

from coordinator import Commit, Coordinator, Decisive, Effect, Evidence, Packet, Record, Review
from coordinator.core.budget import Period
from coordinator.core.effect import Accepted, Ambiguous, Operation, Rejected, SendResult
from coordinator.core.evidence import Failed, Found, ReadRequest
from coordinator.core.money import Money, money
from coordinator.core.outcome import Outcome
from coordinator.engine.service import Pending
from coordinator.errors import BudgetExhausted, ReviewUnconfirmed
from coordinator.store.budgets import NewBudget
from coordinator.store.keys import Key
from tests.engine.harness import (
    ONE_CLASS,
    Ask,
    Fact,
    Gate,
    Number,
    Running,
    Sent,
    evidence_of,
    running,
    sending,
    service_of,
)
from tests.store.paid import books, states
from tests.support import eventually

FORTY = money("0.40 SGD")


def paid(name: str = "cost", source: Any = None, **more: Any) -> Evidence[Number, Any]:
    limits: dict[str, Any] = {"deadline_ms": 10_000, "required": True, "reserves": FORTY, "attempts": 1}
    return Evidence(name, source or Fact(name, costing(25)), **limits | more)


def costing(amount: int | None) -> Callable[[ReadRequest, int], Awaitable[Found[Number]]]:
    async def answer(_: ReadRequest, __: int) -> Found[Number]:
        return Found(Number(1), cost=None if amount is None else Money(amount, "SGD"))

    return answer


@asynccontextmanager
async def under(ceiling: int, coordinator: Coordinator, url: str, **settings: Any) -> AsyncIterator[Running]:
    """A service whose tenant has one budget, ``all``."""
    async with running(coordinator, url, **settings) as service:
        await set_ceiling(service, ceiling)
        yield service


async def set_ceiling(service: Running, ceiling: int, period: Period = "total") -> None:
    budget = NewBudget(
        name="all", ceiling=Money(ceiling, "SGD"), period=period, timezone="Asia/Singapore", provider=None
    )
    await service.service.budgets.set(service.caller, budget)


async def refusal(service: Running, key: str = "k") -> BudgetExhausted:
    with pytest.raises(BudgetExhausted) as raised:
        await service.post(key)
    return raised.value


async def listed(service: Running, status: str) -> list[str]:
    """The ids of the tenant's decisions in this status, the newest first."""
    bodies, _ = await service.service.list(service.tenant, status=status, limit=10)
    return [msgspec.json.decode(body)["id"] for body in bodies]


# No room ---------------------------------------------------------------------------------------------------------------------


async def test_a_refusal_names_the_budget_and_stores_nothing(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with under(39, service_of(paid()), database_url) as service:
        refused = await refusal(service)
        assert refused.extra["budget"] == "all"
        assert (refused.extra["needed"], refused.extra["available"]) == (FORTY, Money(39, "SGD"))
        assert (refused.extra["resets_at"], refused.retry) == (None, "same-key")
        assert await root.fetchval("SELECT count(*) FROM decisions") == 0
        await set_ceiling(service, 40)
        decision = await service.decided()
    assert decision["status"] == "committed"
    assert await books(root) == (0, 0, 25, 0)


async def test_a_decision_that_waits_goes_on_when_money_comes_back(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    held = Evidence("cost", Fact("cost", gate.answering()), deadline_ms=10_000, reserves=FORTY)
    coordinator = service_of(held, on_exhausted="wait", budget_wait_ms=10_000)
    async with under(40, coordinator, database_url) as service:
        first = asyncio.create_task(service.decided("first"))
        await gate.arrived.wait()
        second = await service.post("second", wait=0)
        assert isinstance(second, Pending)
        await service.service.cancel(service.caller, UUID((await listed(service, "running"))[-1]))
        assert (await first)["status"] == "cancelled"
        id = await root.fetchval("SELECT id FROM reservations")
        await service.service.budgets.resolve(service.caller, id, Money(0, "SGD"), "never billed")
        gate.open()
        decision = await service.decided("second")
    assert decision["status"] == "committed"
    assert "reserve" in {stage["stage"] for stage in decision["timeline"]}


async def test_whoever_waits_for_money_holds_no_slot(database_url: str, root: asyncpg.Connection) -> None:
    waits = service_of(paid(), on_exhausted="wait", budget_wait_ms=20_000)
    one_slot = {"max_running": 1, "classes": ONE_CLASS}
    async with under(40, waits, database_url, **one_slot) as service:
        await set_ceiling(service, 0)
        first = asyncio.create_task(service.decided("first"))

        async def waiting() -> bool:
            return await root.fetchval("SELECT count(*) FROM decisions WHERE status = 'running'") == 1

        await eventually(waiting, what="the first one waits for money")
        second = asyncio.create_task(service.decided("second"))

        async def both() -> bool:
            return await root.fetchval("SELECT count(*) FROM decisions WHERE status = 'running'") == 2

        await eventually(both, what="the second one has the only slot, and waits as well")
        await set_ceiling(service, 80)
        assert {(await first)["status"], (await second)["status"]} == {"committed"}


async def test_a_decision_that_waits_in_vain_rests_and_its_key_answers_the_refusal_for_ever(
    database_url: str, root: asyncpg.Connection
) -> None:
    source = Fact("cost")
    coordinator = service_of(paid(source=source), on_exhausted="wait", budget_wait_ms=50)
    async with under(39, coordinator, database_url) as service:
        for _ in range(2):
            answer = await service.post("k")
            assert not isinstance(answer, Pending)
            assert answer.status == 409
            assert b"budget-exhausted" in answer.body
        (decision,) = await listed(service, "unresolved")
        shown = await service.shown(decision)
    assert shown["outcome"]["code"] == "budget-exhausted"
    assert shown["budget"] == {"reserved": None, "settled": None, "uncertain": None}
    assert source.reads == 0
    assert await root.fetchval("SELECT count(*) FROM reservations") == 0


async def test_with_reduce_optional_paid_evidence_is_skipped_and_the_packet_says_why(
    database_url: str, root: asyncpg.Connection
) -> None:
    nice = Fact("nice")
    evidence = [paid(), paid("nice", nice, required=False)]
    async with under(60, service_of(*evidence, on_exhausted="reduce"), database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed"
    item = evidence_of(decision, "nice")
    assert (item["state"], item["error"]["code"], item["attempts"]) == ("skipped", "budget-exhausted", 0)
    assert nice.reads == 0
    assert decision["budget"]["reserved"]["amount_minor"] == 40
    assert await books(root) == (0, 0, 25, 0)


async def test_with_reduce_a_decision_whose_required_evidence_does_not_fit_is_refused(
    database_url: str,
) -> None:
    async with under(39, service_of(paid(), on_exhausted="reduce"), database_url) as service:
        await refusal(service)


async def test_the_callers_own_ceiling_reduces_as_well(database_url: str) -> None:
    evidence = [paid(), paid("nice", required=False)]
    ceiling = {"amount_minor": 50, "currency": "SGD"}
    async with under(1_000, service_of(*evidence, on_exhausted="reduce"), database_url) as service:
        decision = await service.decided(ceiling=ceiling)
    assert evidence_of(decision, "nice")["error"]["code"] == "budget-exhausted"


async def test_with_review_it_goes_to_a_person_with_nothing_read(database_url: str) -> None:
    source = Fact("cost")
    async with under(39, service_of(paid(source=source), on_exhausted="review"), database_url) as service:
        decision = await service.decided()
    assert (decision["status"], decision["outcome"]["code"]) == ("in_review", "budget-exhausted")
    assert source.reads == 0


# Settling --------------------------------------------------------------------------------------------------------------------


async def test_a_reading_that_never_says_what_it_cost_leaves_its_reservation_uncertain(
    database_url: str, root: asyncpg.Connection
) -> None:
    evidence = paid(source=Fact("cost", costing(None)))
    async with under(100, service_of(evidence), database_url) as service:
        decision = await service.decided()
    assert decision["budget"]["uncertain"]["amount_minor"] == 40
    assert await books(root) == (0, 40, 0, 0)


async def test_evidence_that_was_never_asked_for_gives_its_money_back(
    database_url: str, root: asyncpg.Connection
) -> None:
    spare = paid("spare", required=False, on_demand=True)
    async with under(100, service_of(paid(), spare), database_url) as service:
        decision = await service.decided()
    assert await states(root, UUID(decision["id"])) == [
        ("cost", "settled", None),
        ("spare", "released", None),
    ]
    assert await books(root) == (0, 0, 25, 0)


async def test_the_fences_reading_is_paid_from_the_same_reservation_and_the_excess_is_an_overage(
    database_url: str, root: asyncpg.Connection
) -> None:
    async with under(40, service_of(paid(freshness=Decisive("value"))), database_url) as service:
        await service.decided()
    assert await books(root) == (0, 0, 50, 10)


async def test_a_budget_that_a_bill_has_overdrawn_still_counts_the_next_one(
    database_url: str, root: asyncpg.Connection
) -> None:
    unasked = Evidence("cost", Fact("cost", costing(70)), deadline_ms=10_000)
    async with under(100, service_of(unasked), database_url) as service:
        for key in ("first", "second", "third"):
            assert (await service.decided(key))["status"] == "committed"
    assert await books(root) == (0, 0, 210, 210)


async def test_an_overdrawn_budget_of_one_provider_is_no_concern_of_anothers(
    database_url: str, root: asyncpg.Connection
) -> None:
    source = Fact("cost", costing(25), provider="other")
    async with running(service_of(paid(source=source)), database_url) as service:
        for name in ("one", "other"):
            budget = NewBudget(
                name=name, ceiling=Money(100, "SGD"), period="total", timezone="Etc/UTC", provider=name
            )
            await service.service.budgets.set(service.caller, budget)
        assert (await service.decided("first"))["status"] == "committed"
        await root.execute(
            "INSERT INTO budget_periods (tenant_id, name, starts_at, ends_at, ceiling_minor, settled, overage)"
            " SELECT tenant_id, 'one', starts_at, ends_at, 100, 150, 150 FROM budget_periods WHERE name = 'other'"
            " ON CONFLICT (tenant_id, name, starts_at) DO UPDATE SET settled = 150, overage = 150"
        )
        assert (await service.decided("second"))["status"] == "committed"


async def test_a_source_that_bills_unasked_is_an_overage(database_url: str, root: asyncpg.Connection) -> None:
    async with under(40, service_of(paid(reserves=None)), database_url) as service:
        decision = await service.decided()
    assert await states(root, UUID(decision["id"])) == [("cost", "settled", None)]
    assert await books(root) == (0, 0, 25, 25)


async def test_the_source_is_told_its_reservation(database_url: str, root: asyncpg.Connection) -> None:
    source = Fact("cost", costing(25))
    async with under(40, service_of(paid(source=source)), database_url) as service:
        await service.decided()
    (request,) = source.requests
    assert request.reservation == str(await root.fetchval("SELECT id FROM reservations"))


async def test_a_decision_that_is_cancelled_while_reading_may_still_be_billed(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    evidence = paid(source=Fact("cost", gate.answering()))
    async with under(
        40, service_of(evidence, paid("never", after=["cost"], reserves=None)), database_url
    ) as service:
        task = asyncio.create_task(service.decided())
        await gate.arrived.wait()
        (id,) = await listed(service, "running")
        await service.service.cancel(service.caller, UUID(id))
        assert (await task)["status"] == "cancelled"
    assert await books(root) == (0, 40, 0, 0)


class Oracle(Fact):
    """Never says what a reading costs, but can be asked later."""

    def __init__(self, *bills: Money | Exception | None) -> None:
        super().__init__("cost")
        self.asked: list[str] = []
        self._bills = list(bills)

    async def billed(self, reservation: str) -> Money | None:
        self.asked.append(reservation)
        said = self._bills.pop(0) if self._bills else None
        if isinstance(said, Exception):
            raise said
        return said


async def test_an_uncertain_reservation_is_settled_by_what_the_provider_says_in_the_end(
    database_url: str, root: asyncpg.Connection
) -> None:
    oracle = Oracle(None, RuntimeError("it is away"), Money(-1, "SGD"), Money(30, "SGD"))
    quick = {"budget_sweep_ms": 20, "budget_ask_ms": 1}
    async with under(40, service_of(paid(source=oracle)), database_url, **quick) as service:
        await service.decided()

        async def settled() -> bool:
            return await root.fetchval("SELECT state FROM reservations") == "settled"

        await eventually(settled, what="the reservation is settled")
    assert set(oracle.asked) == {str(await root.fetchval("SELECT id FROM reservations"))}
    assert await books(root) == (0, 0, 30, 0)
    body = await root.fetchval("SELECT body::text FROM receipts WHERE kind = 'reservation.settled'")
    assert '"provider":"cost"' in body


async def test_what_has_expired_is_found_by_the_sweep_and_never_released(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    evidence = paid(source=Fact("cost", gate.answering()))
    async with under(40, service_of(evidence), database_url, budget_sweep_ms=20) as service:
        task = asyncio.create_task(service.decided())
        await gate.arrived.wait()
        await root.execute("UPDATE reservations SET expires_at = clock_timestamp()")

        async def given_up() -> bool:
            return await root.fetchval("SELECT state FROM reservations") == "uncertain"

        await eventually(given_up, what="the reservation has expired")
        gate.open()
        await task
    assert await books(root) == (0, 40, 0, 0)


# Effects ---------------------------------------------------------------------------------------------------------------------


def sink(*results: SendResult) -> Sent:
    async def perform(_: Operation, n: int) -> SendResult:
        return results[min(n, len(results)) - 1]

    made = Sent(perform=perform)
    made.reserves = FORTY  # type: ignore[attr-defined]  # what makes it a PaidSink
    return made


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Accepted("r", Money(30, "SGD")), (0, 0, 30, 0)),
        (Accepted("r"), (0, 40, 0, 0)),
        (Rejected("no", "no"), (0, 0, 0, 0)),
        (Rejected("no", "no", Money(5, "SGD")), (0, 0, 5, 0)),
        (Ambiguous("lost", "lost"), (0, 40, 0, 0)),
        (Accepted("r", Money(30, "JPY")), (0, 40, 0, 0)),
    ],
)
async def test_an_effect_is_paid_by_what_its_provider_says(
    result: SendResult, expected: tuple[int, ...], database_url: str, root: asyncpg.Connection
) -> None:
    coordinator = service_of(policy=sending, effects=[sink(result)])
    async with under(40, coordinator, database_url) as service:
        decision = await service.decided()
        assert decision["budget"]["reserved"]["amount_minor"] == 40

        async def closed() -> bool:
            return await root.fetchval("SELECT held FROM budget_periods") == 0

        await eventually(closed, what="the operation has ended")
    assert await books(root) == expected


async def test_of_two_effects_of_one_sink_the_first_has_the_reservation(
    database_url: str, root: asyncpg.Connection
) -> None:
    def twice(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({}, effects=[Effect("send", {"n": 1}), Effect("send", {"n": 2})])

    coordinator = service_of(policy=twice, effects=[sink(Accepted("r", Money(30, "SGD")))])
    async with under(40, coordinator, database_url) as service:
        await service.decided()

        async def both() -> bool:
            return await root.fetchval("SELECT count(*) FROM operations WHERE state = 'succeeded'") == 2

        await eventually(both, what="both have happened")
    assert await books(root) == (0, 0, 60, 30)


# Taking over -----------------------------------------------------------------------------------------------------------------


async def test_what_a_silent_process_had_reserved_stays_uncertain_and_the_decision_reserves_anew(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    stuck, ready = service_of(paid(source=Fact("cost", gate.answering()))), service_of(paid())
    async with (
        running(stuck, database_url, max_running=1) as first,
        under(80, ready, database_url, poll_ms=20) as second,
    ):
        waiting = asyncio.create_task(first.post("k"))
        await gate.arrived.wait()
        await root.execute("UPDATE decisions SET lease_expires_at = clock_timestamp() - interval '1 s'")
        decision = await second.decided("k")
        gate.open()
        await waiting
        assert decision["status"] == "committed"
        assert await states(root, UUID(decision["id"])) == [
            ("cost", "uncertain", "lease-expired"),
            ("cost", "settled", None),
        ]
        assert await books(root) == (0, 40, 25, 0)


async def test_one_that_is_taken_over_when_nothing_is_left_rests_refused_at_once(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    patient: dict[str, Any] = {"budget_wait_ms": 3_600_000, "on_exhausted": "refuse"}
    stuck = service_of(paid(source=Fact("cost", gate.answering())), **patient)
    ready = service_of(paid(), **patient)
    async with (
        running(stuck, database_url, max_running=1) as first,
        under(40, ready, database_url, poll_ms=20) as second,
    ):
        waiting = asyncio.create_task(first.post("k"))
        await gate.arrived.wait()
        await root.execute("UPDATE decisions SET lease_expires_at = clock_timestamp() - interval '1 s'")
        answer = await second.post("k")
        gate.open()
        await waiting
    assert not isinstance(answer, Pending)
    assert (answer.status, b"budget-exhausted" in answer.body) == (409, True)
    assert await books(root) == (0, 40, 0, 0)


async def test_one_that_another_process_cancels_may_still_be_billed(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    coordinator = service_of(paid(source=Fact("cost", gate.answering())))
    async with under(40, coordinator, database_url) as first, running(coordinator, database_url) as second:
        waiting = asyncio.create_task(first.post("k"))
        await gate.arrived.wait()
        (id,) = await listed(first, "running")
        await second.service.cancel(second.caller, UUID(id))
        assert (await second.shown(id))["status"] == "cancelled"
        assert await books(root) == (0, 40, 0, 0)
        gate.open()
        await waiting
    assert await books(root) == (0, 40, 0, 0)


async def test_an_approval_reserves_again_and_stays_in_review_while_there_is_no_money(
    database_url: str, root: asyncpg.Connection
) -> None:
    def ask_somebody(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Review("a person decides", Commit({"ok": True}, effects=[Effect("send", {})]))

    coordinator = service_of(paid(), policy=ask_somebody, effects=[sink(Accepted("r", Money(30, "SGD")))])
    async with under(80, coordinator, database_url) as service:
        decision = await service.decided()
        assert decision["status"] == "in_review"
        assert await books(root) == (0, 0, 25, 0)
        reviewer = Key(service.tenant, uuid7(), frozenset({"review"}))

        async def approve() -> Any:
            etag = (await service.shown(decision["id"]))["review"]["etag"]
            await service.service.reviews.review(reviewer, UUID(decision["id"]), "approve", etag, "")
            return await service.shown(decision["id"])

        with pytest.raises(ReviewUnconfirmed, match="budget"):
            await approve()
        shown = await service.shown(decision["id"])
        (check,) = shown["review"]["unconfirmed"]
        assert (shown["status"], check["evidence"], check["field"]) == ("in_review", "budget", "all")
        assert check["then"].keys() | check["now"].keys() == {"needed", "available"}
        await set_ceiling(service, 200)
        shown = await approve()
        assert shown["status"] == "committed"

        async def paid_for() -> bool:
            return await books(root) == (0, 0, 55, 0)

        await eventually(paid_for, what="the effect is paid for")


async def test_a_reading_for_an_approval_that_does_not_say_what_it_cost_is_uncertain(
    database_url: str, root: asyncpg.Connection
) -> None:
    async def silent_at_last(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(1), cost=Money(25, "SGD") if n == 1 else None)

    def ask_somebody(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Review("a person decides", Commit({"ok": True}))

    evidence = paid(source=Fact("cost", silent_at_last), freshness=Decisive("value"))
    async with under(200, service_of(evidence, policy=ask_somebody), database_url) as service:
        decision = await service.decided()
        assert await books(root) == (0, 0, 25, 0)
        reviewer = Key(service.tenant, uuid7(), frozenset({"review"}))
        etag = decision["review"]["etag"]
        await service.service.reviews.review(reviewer, UUID(decision["id"]), "approve", etag, "")
    assert await books(root) == (0, 40, 25, 0)


async def test_a_leader_that_leaves_while_its_reading_flies_on_may_still_be_billed(
    database_url: str, root: asyncpg.Connection
) -> None:
    gate = Gate()
    evidence = paid(source=Fact("cost", gate.answering()))
    async with under(80, service_of(evidence), database_url) as service:
        leader = asyncio.create_task(service.decided("leader"))
        await gate.arrived.wait()
        (id,) = await listed(service, "running")
        follower = asyncio.create_task(service.decided("follower"))

        async def both() -> bool:
            return len(await listed(service, "running")) == 2

        await eventually(both, what="both are running")
        await service.service.cancel(service.caller, UUID(id))
        assert (await leader)["status"] == "cancelled"
        assert await states(root, UUID(id)) == [("cost", "uncertain", "cost-unknown")]
        gate.open()
        shared = await follower
    assert evidence_of(shared, "cost")["state"] == "found"
    assert gate.inside == 0


async def test_a_repeat_of_a_failed_reading_is_paid_twice_from_one_reservation(
    database_url: str, root: asyncpg.Connection
) -> None:
    async def second_time(_: ReadRequest, n: int) -> Found[Number] | Failed:
        cost = Money(15, "SGD")
        return Found(Number(1), cost=cost) if n > 1 else Failed("busy", "busy", True, 1, cost=cost)

    evidence = paid(source=Fact("cost", second_time), attempts=2)
    async with under(40, service_of(evidence), database_url) as service:
        await service.decided()
    assert await books(root) == (0, 0, 30, 0)
