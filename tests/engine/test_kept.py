"""Evidence that may be some time old can be answered by what was found a short while ago: within its age, and never older (I3, I14)."""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import Decisive, Evidence, MaxAge
from coordinator.core.evidence import Absent, Answer, Failed, Found, Item, ReadRequest, Snapshot
from coordinator.core.money import money
from coordinator.engine.kept import Kept
from tests.engine.harness import Fact, Number, Running, evidence_of, running, service_of, values
from tests.store.given import new_tenant
from tests.support import eventually

HOUR = MaxAge(timedelta(hours=1))


async def passed(moment: float) -> None:
    await eventually(lambda: time.monotonic() > moment)


def a(source: Fact, **more: Any) -> Evidence[Number, Any]:
    limits: dict[str, Any] = {"deadline_ms": 20_000, "freshness": HOUR}
    return Evidence("a", source, **limits | more)


async def test_a_reading_within_its_age_is_used_again_as_it_was_and_costs_nothing(database_url: str) -> None:
    async def paid(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(n), "r1", cost=money("0.01 SGD"))

    source = Fact("a", paid)
    evidence = a(source, reserves=money("0.40 SGD"))
    async with running(service_of(evidence), database_url) as service:
        first, second = await service.decided("first"), await service.decided("second")
    then, now = evidence_of(first, "a"), evidence_of(second, "a")
    assert source.reads == 1
    assert (now["reading"], now["attempts"], now["cost"]) == ("reused", 0, None)
    assert [now[key] for key in ("state", "value", "revision", "observed_at")] == [
        then[key] for key in ("state", "value", "revision", "observed_at")
    ]
    assert second["budget"]["settled"] is None
    age = next(check for check in second["fence"]["checks"] if check["field"] == "age_ms")
    earlier = next(check for check in first["fence"]["checks"] if check["field"] == "age_ms")
    assert age["now"] >= earlier["now"]


async def test_a_reading_that_is_too_old_by_now_is_read_again(database_url: str) -> None:
    """The source says that its value is nearly an hour old already."""

    async def old(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(n), age_ms=3_600_000 - 100)

    source = Fact("a", old)
    async with running(service_of(a(source)), database_url) as service:
        first = await service.decided("first")
        await passed(time.monotonic() + 0.11)  # and now it is older than it may be
        second = await service.decided("second")
    assert source.reads == 2
    assert [evidence_of(made, "a")["reading"] for made in (first, second)] == ["own", "own"]


async def test_evidence_with_a_shorter_age_does_not_take_what_is_young_enough_for_another(
    database_url: str,
) -> None:
    async def aged(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(n), age_ms=60_000)

    source = Fact("source", aged)
    evidence: list[Evidence[Number, Any]] = [
        Evidence("long", source, deadline_ms=20_000, freshness=HOUR),
        Evidence(
            "short", source, deadline_ms=20_000, freshness=MaxAge(timedelta(seconds=50)), required=False
        ),
    ]
    async with running(service_of(*evidence, max_rounds=1), database_url) as service:
        await service.decided("first")
        second = await service.decided("second")
    assert evidence_of(second, "long")["reading"] == "reused"
    assert evidence_of(second, "short")["reading"] != "reused"


async def test_a_reading_again_because_of_its_age_asks_the_source(database_url: str) -> None:
    """What was kept is found too old by the fence: the second round must not find it again."""
    gate, waiting_for = asyncio.Event(), asyncio.Event()
    read_at: list[float] = []

    async def slow(_: ReadRequest, __: int) -> Found[Number]:
        waiting_for.set()
        await gate.wait()
        return Found(Number(1))

    async def timed(_: ReadRequest, n: int) -> Found[Number]:
        read_at.append(time.monotonic())
        return Found(Number(min(n, 2)))

    source = Fact("a", timed)
    evidence = [
        Evidence("a", source, deadline_ms=20_000, freshness=MaxAge(timedelta(milliseconds=500))),
        Evidence("slow", Fact("slow", slow), deadline_ms=20_000, after=["a"]),
    ]
    async with running(service_of(*evidence), database_url) as service:
        warm = asyncio.ensure_future(service.decided("warm"))
        other = asyncio.ensure_future(service.decided("other"))
        await eventually(lambda: len(read_at) == 1 and waiting_for.is_set())
        await passed(read_at[0] + 0.55)  # and now what was read is older than it may be
        gate.set()
        made = await asyncio.gather(warm, other)
    assert [decision["status"] for decision in made] == ["committed", "committed"]
    assert max(decision["fence"]["rounds"] for decision in made) >= 2
    assert [evidence_of(decision, "a")["value"]["value"] for decision in made] == [2, 2]


async def test_what_is_gathered_again_because_something_before_it_moved_is_not_taken_from_what_was_kept(
    database_url: str,
) -> None:
    """`b` comes after `a`, which moves; what b's source is asked does not depend on a's value."""
    a, b = Fact("a", values(1, 2)), Fact("b", values(10, 20))
    b.asks_for = ()  # type: ignore[attr-defined]  # what makes it Addressed
    evidence = [
        Evidence("a", a, deadline_ms=20_000, freshness=Decisive()),
        Evidence("b", b, deadline_ms=20_000, freshness=HOUR, after=["a"]),
    ]
    async with running(service_of(*evidence), database_url) as service:
        decision = await service.decided()
    assert (decision["fence"]["rounds"], decision["outcome"]["terms"]) == (2, {"total": 22})
    assert evidence_of(decision, "b")["reading"] == "own"


@pytest.mark.parametrize("freshness", [Decisive(), Snapshot()])
async def test_what_must_be_read_now_is_never_answered_by_what_was_kept(
    freshness: Any, database_url: str
) -> None:
    source = Fact("source", values(1, 2, 3, 4, 5, 6))
    evidence = [
        Evidence("aged", source, deadline_ms=20_000, freshness=HOUR),
        Evidence("now", source, deadline_ms=20_000, freshness=freshness, after=["aged"]),
    ]
    async with running(service_of(*evidence), database_url) as service:
        await service.decided("first")
        before = source.reads
        second = await service.decided("second")
    assert evidence_of(second, "now")["reading"] == "own"
    assert source.reads > before


async def test_no_tenant_is_answered_by_what_another_one_read(database_url: str) -> None:
    source = Fact("a", values(1, 2))
    async with running(service_of(a(source)), database_url) as service:
        await service.decided("k")
        caller = msgspec.structs.replace(service.caller, tenant=await new_tenant(database_url, "two"))
        second = await Running(service.service, caller, service.url).decided("k")
    assert evidence_of(second, "a")["value"]["value"] == 2
    assert source.reads == 2


@pytest.mark.parametrize(
    ("later", "kept"), [(Absent(), False), (Failed("down", "it is down"), True)], ids=["absent", "failed"]
)
async def test_what_turns_out_to_be_gone_is_not_kept_and_a_failure_says_nothing(
    later: Answer[Number], kept: bool, database_url: str
) -> None:
    """The second reading is one that may not take what is kept: a policy that reconsiders after the record has moved."""
    store = Kept(10, 10_000)
    found = item("found")
    store.keep(("q",), found, time.monotonic())
    store.keep(("q",), item("absent" if isinstance(later, Absent) else "failed"), time.monotonic())
    assert (store.fresh(("q",), 60_000) is not None) == kept


async def test_with_no_room_nothing_is_kept(database_url: str) -> None:
    source = Fact("a")
    async with running(service_of(a(source)), database_url, max_kept_readings=0) as service:
        await service.decided("first")
        await service.decided("second")
    assert source.reads == 2


def item(state: Any, text: str = "") -> Item:
    return Item(
        name="a",
        source="a",
        state=state,
        value={"text": text},
        observed_at="2026-01-01T00:00:00.000000Z",
        freshness={},
        elapsed_ms=1,
        attempts=1,
    )


steps = st.lists(
    st.tuples(st.sampled_from(["keep", "absent", "fresh"]), st.integers(0, 6), st.integers(0, 300)),
    max_size=60,
)


@given(steps, st.integers(0, 4), st.integers(0, 1500))
def test_it_never_holds_more_than_it_may_and_gives_back_what_was_kept_last(
    done: list[tuple[str, int, int]], count: int, size: int
) -> None:
    kept, last, clock = Kept(count, size), {}, itertools.count()
    for what, n, length in done:
        if what == "keep":
            last[n] = "x" * length
            kept.keep((n,), item("found", last[n]), time.monotonic() + next(clock) * 1e-9)
        elif what == "absent":
            last.pop(n, None)
            kept.keep((n,), item("absent"), time.monotonic() + 1)
        elif (found := kept.fresh((n,), 60_000)) is not None:
            assert found[0].value == {"text": last[n]}
        assert len(kept) <= count
        assert 0 <= kept.bytes <= size
        assert kept.bytes == sum(len(each.item) for each in kept._kept.values())


def test_the_least_recently_used_goes_first() -> None:
    kept = Kept(2, 10_000)
    for name in ("a", "b"):
        kept.keep((name,), item("found", name), time.monotonic())
    assert kept.fresh(("a",), 60_000)
    kept.keep(("c",), item("found", "c"), time.monotonic())
    assert [kept.fresh((name,), 60_000) is not None for name in "abc"] == [True, False, True]


def test_who_changes_what_it_was_handed_changes_it_for_nobody_else() -> None:
    kept = Kept(2, 10_000)
    kept.keep(("a",), item("found", "mine"), time.monotonic())
    handed = kept.fresh(("a",), 60_000)
    assert handed is not None
    assert isinstance(handed[0].value, dict)
    handed[0].value["text"] = "yours"
    again = kept.fresh(("a",), 60_000)
    assert again is not None
    assert again[0].value == {"text": "mine"}


def test_an_older_reading_that_ends_later_does_not_take_the_place_of_a_younger_one() -> None:
    kept, now = Kept(2, 10_000), time.monotonic()
    kept.keep(("a",), item("found", "young"), now)
    kept.keep(("a",), item("found", "old"), now - 1)
    found = kept.fresh(("a",), 60_000)
    assert found is not None
    assert found[0].value == {"text": "young"}
