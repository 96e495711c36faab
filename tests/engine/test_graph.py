"""The task graph: conditions, fan-out, chains; ready work starts at once, and nothing waits for what will never be there (I4, I17)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from adapters.function import FunctionSource
from coordinator import Commit, Decisive, Each, Evidence, MaxAge, Missing, Packet, Skip, decision_type
from coordinator.core.decision import Coordinator
from coordinator.core.evidence import Absent, Failed, Found, ReadRequest, Unchanged
from coordinator.core.money import money
from tests.engine.harness import Fact, Gate, Number, evidence_of, running, service_of, values
from tests.support import eventually


def optional(name: str, source: Any = None, **more: Any) -> Evidence[Number, Any]:
    limits: dict[str, Any] = {"deadline_ms": 10_000, "required": False, "attempts": 1}
    return Evidence(name, source or Fact(name), **limits | more)


# Conditions ------------------------------------------------------------------------------------------------------------------

first = Evidence("first", Fact("first", 5), deadline_ms=10_000)


@pytest.mark.parametrize(
    ("answer", "state", "code", "reads"),
    [
        (True, "found", None, 1),
        (False, "skipped", "not-needed", 0),
        (Skip("cheap enough"), "skipped", "not-needed", 0),
        (None, "failed", "condition-returned-junk", 0),
        ("yes", "failed", "condition-returned-junk", 0),
    ],
)
async def test_a_condition_says_whether_evidence_is_read(
    answer: Any, state: str, code: str | None, reads: int, database_url: str
) -> None:
    source = Fact("extra")
    extra = optional("extra", source, when=lambda ask, packet: answer)
    async with running(service_of(extra), database_url) as service:
        item = evidence_of(await service.decided(), "extra")
    assert (item["state"], (item["error"] or {}).get("code"), source.reads) == (state, code, reads)
    if isinstance(answer, Skip):
        assert item["error"]["message"] == "cheap enough"


async def test_a_condition_that_raises_is_a_typed_failure(database_url: str) -> None:
    extra = optional("extra", when=lambda ask, packet: 1 // 0 == 0)
    async with running(service_of(extra), database_url) as service:
        item = evidence_of(await service.decided(), "extra")
    assert (item["state"], item["error"]["code"]) == ("failed", "condition-raised")


async def test_a_condition_sees_the_request_and_what_comes_before_however_indirectly_and_nothing_else(
    database_url: str,
) -> None:
    seen: list[Any] = []

    def condition(ask: Any, packet: Packet) -> bool:
        seen.append((ask.value, [item.name for item in packet.items], packet[first].value))
        return False

    coordinator = service_of(
        first,
        optional("beside"),
        optional("second", after=["first"]),
        optional("extra", after=["second"], when=condition),
    )
    async with running(coordinator, database_url) as service:
        await service.decided(value=3)
    assert seen == [(3, ["first", "second"], 5)]


async def test_a_condition_can_ask_for_what_makes_up_for_something_missing(database_url: str) -> None:
    async def down(_: ReadRequest, __: int) -> Failed:
        return Failed("down", "it is down")

    fast = optional("fast", Fact("fast", down))
    slow = optional(
        "slow", Fact("slow", 9), after=["fast"], when=lambda ask, packet: isinstance(packet[fast], Missing)
    )
    async with running(service_of(fast, slow), database_url) as service:
        decision = await service.decided()
    assert [item["state"] for item in decision["evidence"]] == ["failed", "found"]
    assert decision["outcome"]["terms"] == {"total": 9}


async def test_what_comes_after_something_skipped_is_skipped_too_and_a_condition_is_asked_again_when_things_moved(
    database_url: str,
) -> None:
    """`first` is 1, then 2: only then the extra is needed."""
    moving = Evidence("moving", Fact("moving", values(1, 2)), deadline_ms=10_000, freshness=Decisive())
    extra = optional("extra", after=["moving"], when=lambda ask, packet: packet[moving].value == 2)
    last = optional("last", after=["extra"])
    stages: list[Any] = []

    def policy(ask: Any, packet: Packet, record: Any) -> Commit:
        stages.append([(item.name, item.state) for item in packet.items[1:]])
        return Commit({})

    async with running(service_of(moving, extra, last, policy=policy), database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed"
    assert stages == [[("extra", "skipped"), ("last", "skipped")], [("extra", "found"), ("last", "found")]]


# For each --------------------------------------------------------------------------------------------------------------------


class Sites(msgspec.Struct, frozen=True):
    sites: list[str]


class Lines(msgspec.Struct, frozen=True):
    lines: list[dict[str, int]]


def fanned(
    *evidence: Evidence[Any, Any], policy: Any = lambda ask, packet, record: Commit({}), **limits: Any
) -> Coordinator:
    return Coordinator(
        [
            decision_type(
                "quote", request=Sites, policy=policy, policy_version="1", evidence=evidence, **limits
            )
        ]
    )


class PerSite(Fact):
    """Reads a number for each site: what ``by_site`` says of it."""

    def __init__(self, by_site: dict[str, Any], barrier: asyncio.Barrier | None = None) -> None:
        super().__init__("per-site")
        self.by_site = by_site
        self.barrier = barrier

    async def read(self, request: ReadRequest) -> Any:
        self.requests.append(request)
        if self.barrier is not None:
            await self.barrier.wait()
        answer = self.by_site[str(request.evidence["each"])]
        return await answer(request) if callable(answer) else answer

    @property
    def asked(self) -> list[str]:
        return [str(request.evidence["each"]) for request in self.requests]


def found(value: int, **more: Any) -> Found[Number]:
    return Found(Number(value), **more)


def each_site(source: Any, **more: Any) -> Evidence[Any, Any]:
    limits: dict[str, Any] = {"deadline_ms": 10_000, "for_each": "input.sites", "attempts": 1}
    return Evidence("prices", source, **limits | more)


async def test_a_list_is_read_all_at_once_into_one_item_in_its_order(database_url: str) -> None:
    """A barrier that opens only when all three are inside."""
    source = PerSite({"a": found(1), "b": found(2), "c": found(3)}, asyncio.Barrier(3))
    prices = Evidence("prices", source, deadline_ms=10_000, for_each="input.sites")

    def policy(ask: Sites, packet: Packet, record: Any) -> Commit:
        each: Each[Number] = packet[prices]
        return Commit({one.of: one.value.value for one in each.items if one.value})

    async with running(fanned(prices, policy=policy), database_url) as service:
        decision = await service.decided(input={"sites": ["c", "a", "b"]})
    assert decision["outcome"]["terms"] == {"a": 1, "b": 2, "c": 3}
    item = evidence_of(decision, "prices")
    assert [(one["of"], one["state"]) for one in item["value"]["items"]] == [
        ("c", "found"),
        ("a", "found"),
        ("b", "found"),
    ]
    assert item["attempts"] == 3


async def test_a_list_can_come_from_earlier_evidence_and_from_a_function(database_url: str) -> None:
    order = FunctionSource("order", lambda ask, _: Lines([{"id": 4}, {"id": 6}]), returns=Lines)

    def price_of(ask: Any, seen: Any) -> Number:
        return Number(10 * seen["each"]["id"])

    price = FunctionSource("price", price_of, returns=Number)
    lines = Evidence("order", order, deadline_ms=10_000)
    prices = Evidence("prices", price, deadline_ms=10_000, for_each="evidence.order.lines", after=["order"])

    def policy(ask: Sites, packet: Packet, record: Any) -> Commit:
        return Commit({"total": sum(number.value for number in packet[prices].found)})

    async with running(fanned(lines, prices, policy=policy), database_url) as service:
        decision = await service.decided(input={"sites": []})
    assert decision["outcome"]["terms"] == {"total": 100}


async def test_an_empty_list_is_found_and_empty(database_url: str) -> None:
    async with running(fanned(each_site(PerSite({}))), database_url) as service:
        item = evidence_of(await service.decided(input={"sites": []}), "prices")
    assert (item["state"], item["value"]) == ("found", {"items": []})


async def test_one_that_is_missing_is_enough_for_the_whole_not_to_be_found_and_the_rest_is_called_off(
    database_url: str,
) -> None:
    gate = Gate()

    async def hangs(_: ReadRequest) -> Found[Number]:
        await gate()
        raise AssertionError

    async def after_it_hangs(_: ReadRequest) -> Failed:
        await gate.arrived.wait()
        return Failed("down", "it is down")

    source = PerSite({"a": found(1), "b": after_it_hangs, "c": hangs})
    async with running(fanned(each_site(source, required=False)), database_url) as service:
        item = evidence_of(await service.decided(input={"sites": ["a", "b", "c"]}), "prices")
    assert (item["state"], item["value"], item["error"]["code"]) == ("failed", None, "not-enough-found")
    assert item["error"]["message"] == '1 of 3 found; "b": failed (down), "c": cancelled'
    assert gate.inside == 0


async def test_as_many_as_are_needed_are_enough_and_each_has_its_own_state(database_url: str) -> None:
    source = PerSite({"a": found(1), "b": Absent(), "c": Failed("down", "it is down"), "d": found(4)})
    async with running(fanned(each_site(source, need=2)), database_url) as service:
        item = evidence_of(await service.decided(input={"sites": ["a", "b", "c", "d"]}), "prices")
    assert item["state"] == "found"
    assert [(one["state"], one["value"]) for one in item["value"]["items"]] == [
        ("found", {"value": 1, "note": ""}),
        ("absent", None),
        ("failed", None),
        ("found", {"value": 4, "note": ""}),
    ]


async def test_all_absent_is_absent(database_url: str) -> None:
    source = PerSite({"a": Absent()})
    async with running(fanned(each_site(source, required=False)), database_url) as service:
        item = evidence_of(await service.decided(input={"sites": ["a"]}), "prices")
    assert item["state"] == "absent"


async def test_a_list_that_is_too_long_is_not_begun(database_url: str) -> None:
    source = PerSite({})
    async with running(fanned(each_site(source, required=False, max_items=2)), database_url) as service:
        item = evidence_of(await service.decided(input={"sites": ["a", "b", "c"]}), "prices")
    assert (item["state"], item["error"]["code"], source.reads) == ("failed", "too-many-items", 0)


async def test_the_fence_reads_every_member_again_by_its_own_revision(database_url: str) -> None:
    async def by_revision(request: ReadRequest) -> Any:
        return Unchanged() if request.if_revision == "r-a" else found(1, revision="r-a")

    source = PerSite({"a": by_revision, "b": found(2, revision="r-b")})
    async with running(fanned(each_site(source, freshness=Decisive("value"))), database_url) as service:
        decision = await service.decided(input={"sites": ["a", "b"]})
    assert (decision["status"], decision["fence"]["rounds"]) == ("committed", 1)
    asked = [(str(request.evidence["each"]), request.if_revision) for request in source.requests]
    assert sorted(asked, key=str) == [("a", "r-a"), ("a", None), ("b", "r-b"), ("b", None)]


async def test_one_member_that_moves_is_another_round(database_url: str) -> None:
    numbers = iter([2, 3, 3])

    async def moves(_: ReadRequest) -> Found[Number]:
        return found(next(numbers))

    source = PerSite({"a": found(1), "b": moves})
    async with running(fanned(each_site(source, freshness=Decisive("value"))), database_url) as service:
        decision = await service.decided(input={"sites": ["a", "b"]})
    assert (decision["status"], decision["fence"]["rounds"]) == ("committed", 2)
    assert [one["value"]["value"] for one in evidence_of(decision, "prices")["value"]["items"]] == [1, 3]


async def test_members_that_others_have_read_are_not_read_again(database_url: str) -> None:
    from datetime import timedelta

    source = PerSite({"a": found(1), "b": found(2), "c": found(3)})
    prices = each_site(source, freshness=MaxAge(timedelta(hours=1)))
    async with running(fanned(prices), database_url) as service:
        await service.decided("first", input={"sites": ["a", "b"]})
        second = await service.decided("second", input={"sites": ["b", "c"]})
    assert sorted(source.asked) == ["a", "b", "b", "c"]  # another request: the source sees all of it
    assert evidence_of(second, "prices")["reading"] == "own"


async def test_members_at_one_address_are_read_once_for_all_decisions_within_their_age(
    database_url: str,
) -> None:
    from datetime import timedelta

    source = PerSite({"a": found(1), "b": found(2), "c": found(3)})
    source.asks_for = ("each",)  # type: ignore[attr-defined]  # what makes it Addressed
    prices = each_site(source, freshness=MaxAge(timedelta(hours=1)))
    async with running(fanned(prices), database_url) as service:
        await service.decided("first", input={"sites": ["a", "b"]})
        await service.decided("second", input={"sites": ["b", "c"]})
        third = await service.decided("third", input={"sites": ["c", "a"]})
    assert sorted(source.asked) == ["a", "b", "c"]
    assert evidence_of(third, "prices")["reading"] == "reused"


async def test_its_reserve_is_for_the_whole_list(database_url: str) -> None:
    cent = money("0.01 SGD")
    source = PerSite({site: found(1, cost=cent) for site in "abcd"})
    prices = each_site(source, reserves=money("0.10 SGD"))
    async with running(fanned(prices), database_url) as service:
        made = await service.decided(
            input={"sites": ["a", "b", "c", "d"]}, ceiling={"amount_minor": 10, "currency": "SGD"}
        )
    assert made["status"] == "committed"
    assert evidence_of(made, "prices")["cost"]["amount_minor"] == 4
    assert made["budget"]["settled"]["amount_minor"] == 4


async def test_a_list_whose_readings_did_not_say_what_they_cost_counts_as_its_reserve_once(
    database_url: str,
) -> None:
    source = PerSite({site: found(1) for site in "abcd"})
    prices = each_site(source, reserves=money("0.10 SGD"), freshness=Decisive())
    asked: dict[str, Any] = {"input": {"sites": ["a", "b", "c", "d"]}}
    async with running(fanned(prices), database_url) as service:
        wide = await service.decided("wide", ceiling={"amount_minor": 20, "currency": "SGD"}, **asked)
        tight = await service.decided("tight", ceiling={"amount_minor": 19, "currency": "SGD"}, **asked)
    assert wide["status"] == "committed"
    assert tight["outcome"]["code"] == "cost-limit"


# The graph -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failed", "timed_out", "absent"])
async def test_what_depends_on_something_missing_is_resolved_at_once_and_not_at_its_deadline(
    how: str, database_url: str
) -> None:
    async def read(_: ReadRequest, __: int) -> Any:
        if how == "timed_out":
            await asyncio.Event().wait()
        return Absent() if how == "absent" else Failed("down", "it is down")

    chain = [optional("e0", Fact("e0", read), deadline_ms=50)]
    chain += [optional(f"e{n}", after=[f"e{n - 1}"], deadline_ms=600_000) for n in range(1, 6)]
    began = time.monotonic()
    async with running(service_of(*chain), database_url) as service:
        decision = await service.decided()
    assert [item["state"] for item in decision["evidence"]] == [how, *["skipped"] * 5]
    assert time.monotonic() - began < 60


async def test_a_decision_shows_its_critical_path_and_how_much_was_read(database_url: str) -> None:
    async def takes_a_while(_: ReadRequest, __: int) -> Found[Number]:
        await eventually(lambda: time.monotonic() > until[0])
        return found(1)

    until: list[float] = []

    async def starts_the_clock(_: ReadRequest, __: int) -> Found[Number]:
        until.append(time.monotonic() + 0.1)
        return found(1)

    coordinator = service_of(
        Evidence("top", Fact("top", starts_the_clock), deadline_ms=10_000),
        Evidence("left", Fact("left", takes_a_while), deadline_ms=10_000, after=["top"]),
        Evidence("right", Fact("right"), deadline_ms=10_000, after=["top"]),
        Evidence("bottom", Fact("bottom"), deadline_ms=10_000, after=["left", "right"]),
    )
    async with running(coordinator, database_url) as service:
        graph = (await service.decided())["graph"]
    assert graph["critical_path"] == ["top", "left", "bottom"]
    assert 90 <= graph["critical_path_ms"] <= graph["total_work_ms"]


async def test_in_a_diamond_of_twenty_everything_that_is_ready_is_under_way(database_url: str) -> None:
    """Eighteen stand between a top and a bottom: all of them are inside at the same time, and the bottom follows the last one."""
    barrier, order = asyncio.Barrier(18), []

    async def together(_: ReadRequest, __: int) -> Found[Number]:
        await barrier.wait()
        return found(1)

    async def last(request: ReadRequest, __: int) -> Found[Number]:
        order.append(len(request.evidence))
        return found(1)

    middle = [f"m{n}" for n in range(18)]
    coordinator = service_of(
        Evidence("top", Fact("top"), deadline_ms=10_000),
        *(Evidence(name, Fact(name, together), deadline_ms=10_000, after=["top"]) for name in middle),
        Evidence("bottom", Fact("bottom", last), deadline_ms=10_000, after=middle),
    )
    async with running(coordinator, database_url) as service:
        decision = await service.decided()
    assert decision["outcome"]["terms"] == {"total": 20}
    assert order == [18]
