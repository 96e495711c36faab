"""The fence: every decisive field holds at commit, or the policy decides again on what is true now (I3); rounds are bounded (I17)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from adapters.records import RecordSource
from coordinator import Commit, Decisive, Evidence, MaxAge, Record, RecordKind
from coordinator.core.evidence import Absent, Answer, Failed, Found, ReadRequest, Unchanged
from coordinator.core.outcome import Outcome
from coordinator.core.packet import Packet
from tests.engine.harness import Ask, Fact, Number, evidence_of, running, service_of, values

SITE: RecordKind[Number] = RecordKind("site", Number)
LONG = 10_000


def checks(decision: Any) -> list[tuple[str, str, bool]]:
    return [(check["evidence"], check["field"], check["held"]) for check in decision["fence"]["checks"]]


async def test_a_revision_that_moves_while_the_decisive_fields_stand_holds(database_url: str) -> None:
    async def noisy(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(5, note=f"note {n}"), revision=str(n))

    source = Fact("a", noisy)
    declared = Evidence("a", source, deadline_ms=LONG, freshness=Decisive("value"))
    async with running(service_of(declared), database_url) as service:
        decision = await service.decided()
    assert (decision["status"], decision["fence"]["rounds"], source.reads) == ("committed", 1, 2)
    assert checks(decision) == [("a", "value", True)]
    assert evidence_of(decision, "a")["revision"] == "1", "the packet is what the policy saw"
    assert decision["fence"]["checks"][0]["confirmed_ms_before_commit"] >= 0


async def test_the_re_reading_is_conditional_and_unchanged_holds(database_url: str) -> None:
    async def conditional(request: ReadRequest, n: int) -> Answer[Number]:
        return Unchanged() if request.if_revision == "r1" else Found(Number(5), revision="r1")

    source = Fact("a", conditional)
    declared = Evidence("a", source, deadline_ms=LONG, freshness=Decisive())
    async with running(service_of(declared), database_url) as service:
        decision = await service.decided()
    assert [request.if_revision for request in source.requests] == [None, "r1"]
    assert checks(decision) == [("a", "", True)]


async def test_a_field_that_moves_makes_the_policy_decide_again_on_the_new_value(database_url: str) -> None:
    source = Fact("a", values(5, 7))
    declared = Evidence("a", source, deadline_ms=LONG, freshness=Decisive("value"))
    async with running(service_of(declared), database_url) as service:
        decision = await service.decided()
    assert decision["outcome"]["terms"] == {"total": 7}
    assert decision["fence"]["rounds"] == 2
    assert source.reads == 3, "read, re-read as moved, confirmed; the moved reading is the new one at once"
    assert checks(decision) == [("a", "value", False), ("a", "value", True)]


async def test_only_what_hangs_on_the_moved_reading_is_gathered_again(database_url: str) -> None:
    moving, child, grandchild, other = (
        Fact("moving", values(1, 2)),
        Fact("child"),
        Fact("grandchild"),
        Fact("other"),
    )
    coordinator = service_of(
        Evidence("moving", moving, deadline_ms=LONG, freshness=Decisive()),
        Evidence("child", child, deadline_ms=LONG, after=["moving"]),
        Evidence("grandchild", grandchild, deadline_ms=LONG, after=["child"]),
        Evidence("other", other, deadline_ms=LONG),
    )
    async with running(coordinator, database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed"
    assert (moving.reads, child.reads, grandchild.reads, other.reads) == (3, 2, 2, 1)
    assert child.requests[1].evidence == {"moving": {"value": 2, "note": ""}}


async def test_decisive_evidence_is_re_read_all_at_once(database_url: str) -> None:
    barrier = asyncio.Barrier(2)

    async def together(_: ReadRequest, n: int) -> Found[Number]:
        if n == 2:
            await barrier.wait()
        return Found(Number(1))

    both = [
        Evidence(name, Fact(name, together), deadline_ms=LONG, freshness=Decisive()) for name in ("a", "b")
    ]
    async with running(service_of(*both), database_url) as service:
        assert (await service.decided())["status"] == "committed"


@pytest.mark.parametrize("max_rounds", [1, 3])
async def test_evidence_that_never_stands_still_ends_as_conflicted_after_the_rounds(
    max_rounds: int, database_url: str, root: asyncpg.Connection
) -> None:
    async def moving(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(n))

    declared = Evidence("a", Fact("a", moving), deadline_ms=LONG, freshness=Decisive())
    coordinator = service_of(declared, record=SITE, max_rounds=max_rounds)
    async with running(coordinator, database_url) as service:
        decision = await service.decided(record={"kind": "site", "id": "s"})
    assert (decision["status"], decision["outcome"]["code"]) == ("conflicted", "evidence-moved")
    assert decision["fence"]["rounds"] == max_rounds
    assert await root.fetchval("SELECT count(*) FROM record_versions") == 0


async def test_evidence_that_is_too_old_at_commit_is_read_again(database_url: str) -> None:
    async def ageing(_: ReadRequest, n: int) -> Found[Number]:
        return Found(Number(n), age_ms=3_600_000 if n == 1 else 0)

    source = Fact("a", ageing)
    declared = Evidence("a", source, deadline_ms=LONG, freshness=MaxAge(timedelta(minutes=5)))
    async with running(service_of(declared), database_url) as service:
        decision = await service.decided()
    assert (source.reads, decision["outcome"]["terms"]) == (2, {"total": 2})
    assert checks(decision) == [("a", "age_ms", False), ("a", "age_ms", True)]


async def test_a_confirmation_that_is_too_old_at_commit_is_made_again_within_the_rounds(
    database_url: str,
) -> None:
    """With no time at all allowed between confirmation and commit, none is ever young enough."""
    source = Fact("a", 2)
    declared = Evidence("a", source, deadline_ms=LONG, freshness=Decisive())
    coordinator = service_of(declared, max_rounds=3)
    async with running(coordinator, database_url, confirm_max_age_ms=0) as service:
        decision = await service.decided()
    assert (decision["status"], decision["outcome"]["code"]) == ("conflicted", "evidence-moved")
    assert (decision["fence"]["rounds"], source.reads) == (3, 1 + 3)
    async with running(coordinator, database_url, confirm_max_age_ms=60_000) as service:
        assert (await service.decided("again"))["outcome"]["terms"] == {"total": 2}


@pytest.mark.parametrize(
    ("then", "now", "status"),
    [
        (Found(Number(1)), Failed("down", "it is down"), "unresolved"),
        (Found(Number(1)), Absent(), "unresolved"),
    ],
)
async def test_required_evidence_that_cannot_be_confirmed_leaves_the_decision_unresolved(
    then: Answer[Number], now: Answer[Number], status: str, database_url: str
) -> None:
    async def answer(_: ReadRequest, n: int) -> Answer[Number]:
        return then if n == 1 else now

    declared = Evidence("a", Fact("a", answer), deadline_ms=LONG, freshness=Decisive(), attempts=1)
    async with running(service_of(declared), database_url) as service:
        decision = await service.decided()
    assert (decision["status"], decision["outcome"]["code"]) == (status, "evidence-missing")


async def test_a_re_reading_that_is_given_up_by_its_source_does_not_count_as_confirmed(
    database_url: str,
) -> None:
    """A library inside the source was cancelled, which nobody asked for: the reading has no answer at all."""

    async def given_up(_: ReadRequest, n: int) -> Found[Number]:
        if n > 1:
            raise asyncio.CancelledError
        return Found(Number(1))

    both = [
        Evidence(name, Fact(name, given_up if name == "a" else 1), deadline_ms=LONG, freshness=Decisive())
        for name in ("a", "b")
    ]
    async with running(service_of(*both), database_url) as service:
        decision = await service.decided()
    assert decision["status"] != "committed"


async def test_evidence_that_was_absent_must_still_be_absent(database_url: str) -> None:
    async def appearing(_: ReadRequest, n: int) -> Answer[Number]:
        return Absent() if n == 1 else Found(Number(9))

    declared = Evidence("a", Fact("a", appearing), deadline_ms=LONG, freshness=Decisive(), required=False)
    async with running(service_of(declared), database_url) as service:
        decision = await service.decided()
    assert decision["outcome"]["terms"] == {"total": 9}


async def put_site(database_url: str, root: asyncpg.Connection, tenant: UUID, value: int) -> None:
    """Another process writes the record, past this service."""
    await root.execute(
        "INSERT INTO records (tenant_id, kind, id, version, data)"
        " VALUES ($1, 'site', 's', 1, json_build_object('value', $2::int))"
        " ON CONFLICT (tenant_id, kind, id) DO UPDATE SET version = records.version + 1, data = excluded.data",
        tenant,
        value,
    )


async def test_a_record_among_the_evidence_is_compared_under_lock(
    database_url: str, root: asyncpg.Connection
) -> None:
    """It moves after everything was read and confirmed, and before the commit: the policy decides on the new value."""
    declared = Evidence(
        "site",
        RecordSource("site", "site", "s", returns=Number),
        deadline_ms=LONG,
        freshness=Decisive("value"),
    )

    async def moves_it(_: ReadRequest, n: int) -> Found[Number]:
        if n == 2:
            await put_site(database_url, root, tenant, 7)
        return Found(Number(100))

    trigger = Evidence("trigger", Fact("trigger", moves_it), deadline_ms=LONG, freshness=Decisive())
    async with running(service_of(declared, trigger, records=[SITE]), database_url) as service:
        tenant = service.tenant
        await put_site(database_url, root, tenant, 5)
        decision = await service.decided()
    assert decision["outcome"]["terms"] == {"total": 107}
    assert decision["fence"]["rounds"] == 2
    record_checks = [check for check in decision["fence"]["checks"] if check["evidence"] == "site"]
    assert [check["held"] for check in record_checks] == [False, True]
    assert (record_checks[-1]["now"], record_checks[-1]["confirmed_ms_before_commit"]) == (7, 0)


async def test_a_record_whose_other_fields_move_still_holds(
    database_url: str, root: asyncpg.Connection
) -> None:
    declared = Evidence(
        "site",
        RecordSource("site", "site", "s", returns=Number),
        deadline_ms=LONG,
        freshness=Decisive("value"),
    )

    async def touches_it(_: ReadRequest, n: int) -> Found[Number]:
        if n == 2:
            await put_site(database_url, root, tenant, 5)
        return Found(Number(0))

    trigger = Evidence("trigger", Fact("trigger", touches_it), deadline_ms=LONG, freshness=Decisive())
    async with running(service_of(declared, trigger, records=[SITE]), database_url) as service:
        tenant = service.tenant
        await put_site(database_url, root, tenant, 5)
        decision = await service.decided()
    assert (decision["status"], decision["fence"]["rounds"]) == ("committed", 1)


async def test_the_callers_version_is_refused_when_the_record_moved_and_the_policy_is_not_asked_again(
    database_url: str, root: asyncpg.Connection
) -> None:
    asked: list[int] = []

    async def moves_it(_: ReadRequest, n: int) -> Found[Number]:
        if n == 2:
            await put_site(database_url, root, tenant, 7)
        return Found(Number(1))

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        asked.append(record.version)
        return Commit({}, changes=[record.becomes(Number(1))])

    trigger = Evidence("trigger", Fact("trigger", moves_it), deadline_ms=LONG, freshness=Decisive())
    async with running(service_of(trigger, policy=policy, record=SITE), database_url) as service:
        tenant = service.tenant
        await put_site(database_url, root, tenant, 5)
        record = {"kind": "site", "id": "s", "expected_version": 1}
        answer = await service.decided("k", record=record)
        assert (answer["code"], answer["current_version"]) == ("stale-version", 2)
        again = await service.post("k", record=record)
        shown = await service.shown(answer["decision"])
    assert asked == [1]
    assert (shown["status"], shown["outcome"]["code"]) == ("conflicted", "stale-version")
    assert getattr(again, "status", None) == 409, "a replay says the same"


async def test_without_an_expected_version_the_policy_reconsiders_on_the_new_record(
    database_url: str, root: asyncpg.Connection
) -> None:
    asked: list[int] = []

    async def moves_it(_: ReadRequest, n: int) -> Found[Number]:
        if n == 2:
            await put_site(database_url, root, tenant, 7)
        return Found(Number(1))

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        asked.append(record.version)
        return Commit({}, changes=[record.becomes(Number(1))])

    trigger = Evidence("trigger", Fact("trigger", moves_it), deadline_ms=LONG, freshness=Decisive())
    async with running(service_of(trigger, policy=policy, record=SITE), database_url) as service:
        tenant = service.tenant
        await put_site(database_url, root, tenant, 5)
        decision = await service.decided("k", record={"kind": "site", "id": "s"})
    assert asked == [1, 2]
    assert decision["record"] == {"kind": "site", "id": "s", "base_version": 2, "committed_version": 3}
