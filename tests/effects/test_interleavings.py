"""The interleavings of an effect that matter, each driven step by step: I5 (at most once), I7 (every operation ends, or is parked
with a reason; `succeeded` iff the provider has it), I8 (a stale token changes nothing, what its holder learnt is kept).

`first` is the service that decides and sends; `second` takes over what it no longer holds, or what falls due. The provider is a
process of its own; sinks hold calls back where a test says so.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from aiohttp import web
from uuid_utils.compat import uuid7

from adapters.webhook import WebhookSink
from coordinator.core.effect import (
    MAX_SENDS,
    Accepted,
    Keyed,
    Lookup,
    Operation,
    Rejected,
    SendResult,
    Unguarded,
    keyed,
)
from coordinator.errors import StateConflict
from coordinator.store.keys import Key
from coordinator.testing.world import own_world
from tests.adapters.servers import web_server
from tests.effects.given import EAGER, PATIENT, Held, Look, Outside, kinds, placing
from tests.engine.harness import Gate, Running, running
from tests.store.proxy import proxy
from tests.support import eventually

DAY = keyed(hours=24)
SEND: dict[str, Any] = {"effects": ["send"]}


@pytest.fixture
def look(root: asyncpg.Connection) -> Look:
    return Look(root)


async def notice(service: Running, key: str, *, event: str = "event-1", happened: bool = True) -> str:
    state: str = await service.service.operations.notice(
        service.tenant,
        effect="send",
        event_id=event,
        key=key,
        happened=happened,
        reference="told-by-notice" if happened else "",
        reason="" if happened else "the card expired",
    )
    return state


async def test_a_success_that_arrives_after_a_take_over_wins(
    database_url: str, look: Look, outside: Outside
) -> None:
    answered = Gate()
    sink = outside.sink("send", Unguarded())
    async with (
        running(placing(Held(sink, after=answered)), database_url, **PATIENT) as first,
        running(placing(sink), database_url, **EAGER),
    ):
        await first.decided(input=SEND)
        await answered.arrived.wait()
        await look.expire((await look.at())["id"])
        parked = await look.until("uncertain")
        answered.open()
        row = await look.until("succeeded")
    assert parked["reason"].startswith("holder-lost")
    assert await outside.count(row["key"]) == 1
    receipts = await look.receipts(row["id"])
    assert kinds(receipts) == ["dispatching", "taken-over", "uncertain", "succeeded"]
    assert receipts[-1]["fencing_token"] < row["fencing_token"], "it was the stale holder who knew"


async def test_a_crash_after_the_provider_accepted_is_repeated_under_the_same_key_and_happens_once(
    database_url: str, look: Look, outside: Outside
) -> None:
    """What crashes is the task: the answer is lost with it, and the lease stays behind until it runs out."""
    answered = Gate()
    crashed = asyncio.Event()

    class Crashing(Held):
        async def perform(self, operation: Operation) -> SendResult:
            await super().perform(operation)
            crashed.set()
            await asyncio.Event().wait()
            raise AssertionError

    sink = outside.sink("send", DAY)
    async with running(placing(sink), database_url, **EAGER) as second:
        stopped = asyncio.create_task(_decide_and_hang(database_url, Crashing(sink, before=answered)))
        answered.open()
        await crashed.wait()
        before = await look.at()
        assert (before["state"], before["sends"]) == ("dispatching", 0)
        stopped.cancel()
        await look.expire(before["id"])
        row = await look.until("succeeded")
        assert second.tenant == row["tenant_id"]
        await asyncio.gather(stopped, return_exceptions=True)
    assert (row["sends"], row["fencing_token"], await outside.count(row["key"])) == (1, 2, 1)


async def _decide_and_hang(url: str, sink: Held) -> None:
    async with running(placing(sink), url, **PATIENT, drain_s=0) as service:
        await service.decided(input=SEND)
        await asyncio.Event().wait()


async def test_a_lookup_that_lags_behind_is_no_proof_and_nothing_is_sent_again(
    database_url: str, look: Look, outside: Outside
) -> None:
    """Asked too early, the provider says 404 of an effect that has happened. It would act again on every repeat."""
    sink = outside.sink("send", Lookup(lag_ms=1_000))
    await outside.faults(
        {
            "POST /effects/send": {
                "lose_answer": True,
                "lookup_lag_ms": 60_000,
                "dedup_window_s": 0,
                "times": 1,
            }
        }
    )
    async with running(placing(sink), database_url, **EAGER) as service:
        await service.decided(input=SEND)
        await look.until("uncertain")
        assert await service.service.operations.ask_now(service.tenant) == 1

        async def asked() -> list[asyncpg.Record]:
            row = await look.at()
            return [row] if row["lookups"] and row["lease_owner"] is None else []

        (early,) = await eventually(asked)
        await outside.faults({})  # what lagged is visible from now on
        row = await look.until("succeeded")
    assert (early["state"], early["reason"]) == ("uncertain", "asked too early to be proof")
    assert (row["sends"], row["lookups"], await outside.count(row["key"])) == (1, 2, 1)


async def test_a_key_whose_window_runs_out_between_two_attempts_is_parked_and_not_sent_again(
    database_url: str, look: Look, outside: Outside
) -> None:
    row = await _window_runs_out(database_url, look, outside, DAY, "uncertain")
    assert row["reason"].startswith("an earlier attempt may have been acted upon")
    assert (row["sends"], row["due_at"], await outside.count(row["key"])) == (1, None, 1)


async def test_a_provider_that_has_forgotten_the_key_is_asked_and_not_sent_to(
    database_url: str, look: Look, outside: Outside
) -> None:
    """The same with a provider that can be asked: it would act again on a repeat, and is found to have acted."""
    guarantee = Keyed(window_ms=DAY.window_ms, lookup_lag_ms=0)
    row = await _window_runs_out(database_url, look, outside, guarantee, "succeeded")
    assert (row["sends"], row["lookups"], await outside.count(row["key"])) == (1, 1, 1)


async def _window_runs_out(
    url: str, look: Look, outside: Outside, guarantee: Keyed, state: str
) -> asyncpg.Record:
    """The answer is lost, a repeat is planned, and nobody is there to send it until two days later."""
    sink = outside.sink("send", guarantee, timeout_ms=100)
    await outside.faults({"POST /effects/send": {"lose_answer": True, "dedup_window_s": 0, "times": 1}})
    async with running(placing(sink), url, **PATIENT) as first:
        await first.decided(input=SEND)
        row = await look.until("ready")
    await outside.faults({"POST /effects/send": {"dedup_window_s": 0}})
    await look.age(row["id"])
    async with running(placing(sink), url, **EAGER):
        return await look.until(state)


@pytest.mark.parametrize(("undo", "state"), [(["send"], "compensated"), ([], "succeeded")])
async def test_a_cancel_between_acceptance_and_receipt_is_too_late_and_is_compensated_if_it_can_be(
    undo: list[str], state: str, database_url: str, look: Look, outside: Outside
) -> None:
    answered = Gate()
    sinks = (Held(outside.sink("send", DAY), after=answered), outside.sink("undo", DAY))
    async with running(placing(*sinks), database_url, **PATIENT) as service:
        decision = await service.decided(input={**SEND, "undo": undo})
        await answered.arrived.wait()
        await service.service.cancel(service.caller, UUID(decision["id"]))
        assert (await look.at())["state"] == "dispatching", (
            "it is under way; nobody can say that it was stopped"
        )
        answered.open()
        row = await look.until(state)
    assert await outside.count(row["key"]) == 1
    told = kinds(await look.receipts(row["id"]))
    assert told[:3] == ["dispatching", "cancel-requested", "succeeded"]
    if undo:
        undone = await look.at("undo")
        assert (undone["state"], await outside.count(undone["key"])) == ("succeeded", 1)
        assert told[3:] == ["compensating", "compensated"]


async def test_a_notice_before_our_own_response_settles_it_and_the_response_is_kept(
    database_url: str, look: Look, outside: Outside
) -> None:
    answered = Gate()
    sink = Held(outside.sink("send", Unguarded()), after=answered)
    async with running(placing(sink), database_url, **PATIENT) as service:
        await service.decided(input=SEND)
        await answered.arrived.wait()
        assert await notice(service, (await look.at())["key"]) == "succeeded"
        settled = await look.at()
        answered.open()
        late = await look.until_receipt(settled["id"], "operation.late-evidence")
        assert await look.at() == settled
    assert (settled["reference"], late["learnt"]) == ("told-by-notice", "succeeded")
    assert await outside.count(settled["key"]) == 1


async def test_a_notice_that_comes_twice_counts_once(database_url: str, look: Look, outside: Outside) -> None:
    await outside.faults({"POST /effects/send": {"lose_answer": True}})
    async with running(placing(outside.sink("send", Unguarded())), database_url, **PATIENT) as service:
        await service.decided(input=SEND)
        key = (await look.until("uncertain"))["key"]
        states = await asyncio.gather(*(notice(service, key) for _ in range(5)))
        row = await look.at()
        once = kinds(await look.receipts(row["id"]))
        other = await notice(service, key, event="event-2", happened=False)
        late = await look.receipts(row["id"])
    assert (states, other) == (["succeeded"] * 5, "succeeded")
    assert once == ["dispatching", "uncertain", "succeeded"]
    assert (late[-1]["kind"], late[-1]["learnt"]) == ("operation.late-evidence", "failed")
    assert await look.at() == row


async def test_a_provider_that_answers_twice_is_believed_once(
    database_url: str, look: Look, outside: Outside
) -> None:
    """Both holders are told that it happened: the second one first, then the one that fell silent."""
    answered = Gate()
    sink = outside.sink("send", DAY)
    async with (
        running(placing(Held(sink, after=answered)), database_url, **PATIENT) as first,
        running(placing(sink), database_url, **EAGER),
    ):
        await first.decided(input=SEND)
        await answered.arrived.wait()
        await look.expire((await look.at())["id"])
        row = await look.until("succeeded")
        answered.open()
        late = await look.until_receipt(row["id"], "operation.late-evidence")
        assert await look.at() == row
    assert (late["learnt"], late["fencing_token"], row["fencing_token"]) == ("succeeded", 1, 2)
    assert kinds(await look.receipts(row["id"])).count("succeeded") == 1
    assert await outside.count(row["key"]) == 1


async def test_a_holder_that_wakes_from_a_stop_signal_changes_nothing_and_what_it_learnt_is_kept(
    database_url: str, look: Look
) -> None:
    """A process of its own, stopped in the middle of its call until another one has settled the operation."""
    async with own_world(database_url) as world:
        assert world.start is not None
        async with world.start("") as stopped:
            world.servers.append(stopped.url)
            await world.faults(**{"POST /effects/drill-send": {"hang": True, "times": 1}})
            told = await world.quote("k", "r", site="s", server=2)
            row = await look.at("drill-send")

            async def sent() -> bool:
                stats = await world.call("GET", world.providers_url + "/stats")
                return int(stats.body["effects"]["concurrent"]) == 1

            await eventually(sent)
            stopped.pause()
            settled = await look.until("succeeded", effect="drill-send")
            await world.faults()  # the provider goes on with the call that hung, and answers it
            stopped.resume()
            late = await look.until_receipt(row["id"], "operation.late-evidence")
        counted = (await world.ledger())[row["key"]]
    assert told.status == 201
    assert (late["learnt"], late["fencing_token"]) == ("succeeded", 1)
    assert await look.at("drill-send") == settled
    assert counted == 1


async def test_a_provider_that_replays_its_own_error_is_asked_and_not_sent_to_for_ever(
    database_url: str, look: Look
) -> None:
    """It acted, failed to say so, and answers every repeat with that stored 500."""
    acted: dict[str, int] = {}

    async def provider(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            found = acted.get(request.path.rpartition("/")[2])
            return web.json_response({"reference": "r-1"}, status=200 if found else 404)
        key = request.headers["Idempotency-Key"]
        replayed = {"Idempotent-Replayed": "true"} if key in acted else {}
        acted[key] = acted.get(key, 0) + 1
        return web.json_response({"detail": "out of order"}, status=500, headers=replayed)

    async with web_server(provider) as url:
        sink = WebhookSink(
            "send",
            url + "/send",
            guarantee=Keyed(window_ms=DAY.window_ms, lookup_lag_ms=0),
            lookup_url=url + "/send/{key}",
            timeout_ms=100,
        )
        async with running(placing(sink), database_url, **EAGER) as service:
            await service.decided(input=SEND)
            row = await look.until("succeeded")
    assert acted == {row["key"]: 2}, "sent, and repeated once: then the answer was recognised as the old one"
    assert (row["sends"], row["lookups"], row["reference"]) == (2, 1, "r-1")


async def test_two_dispatchers_that_look_for_work_at_once_never_send_the_same_operation(
    database_url: str, look: Look, outside: Outside
) -> None:
    """Forty operations wait to be repeated at a provider that acts on every repeat, and fall due under two dispatchers at once."""
    sink = outside.sink("send", DAY)
    await outside.faults({"POST /effects/send": {"status": 503, "retry_after_s": 60}})
    async with running(placing(sink), database_url, **PATIENT, pool_size=8) as service:
        made = await asyncio.gather(*(service.decided(f"k{n}", input=SEND) for n in range(40)))
        for decision in made:
            await look.until("ready", decision=decision["id"])
    await outside.faults({"POST /effects/send": {"dedup_window_s": 0}})
    both = (running(placing(sink), database_url, **EAGER), running(placing(sink), database_url, **EAGER))
    async with both[0], both[1]:
        await look.make_due()
        rows = [await look.until("succeeded", decision=decision["id"]) for decision in made]
    assert {(row["sends"], row["fencing_token"]) for row in rows} == {(2, 2)}
    assert [await outside.count(row["key"]) for row in rows] == [1] * 40


async def test_a_settlement_whose_commit_lost_its_answer_counts_once(
    database_url: str, look: Look, outside: Outside
) -> None:
    answered = Gate()
    sink = Held(outside.sink("send", DAY), after=answered)
    async with proxy(database_url) as way, running(placing(sink), way.url, **PATIENT) as service:
        await service.decided(input=SEND)
        await answered.arrived.wait()
        way.answers_to_lose = 1  # the next COMMIT is that of the settlement
        answered.open()
        row = await look.until("succeeded")
        await look.until_receipt(row["id"], "operation.late-evidence")
        assert await look.at() == row
    assert (way.lost, row["sends"], await outside.count(row["key"])) == (1, 1, 1)
    assert kinds(await look.receipts(row["id"])) == ["dispatching", "succeeded", "late-evidence"]


async def test_a_compensation_that_fails_leaves_the_original_standing_and_says_so(
    database_url: str, look: Look, outside: Outside
) -> None:
    sinks = [outside.sink(name, DAY) for name in ("send", "charge", "undo")]
    await outside.faults({"POST /effects/charge": {"status": 400}, "POST /effects/undo": {"status": 400}})
    async with running(placing(*sinks), database_url, **PATIENT) as service:
        order = {"effects": ["send", "charge"], "undo": ["send"], "on_failure": "compensate"}
        decision = await service.decided(input=order)
        await look.until("failed", effect="undo")
        row = await look.until("succeeded")
        shown = await service.shown(decision["id"])
    assert row["reason"].startswith("its compensation undo failed")
    assert await outside.count(row["key"]) == 1
    assert kinds(await look.receipts(row["id"]))[-2:] == ["compensating", "succeeded"]
    states = {op["effect"]: op["state"] for op in shown["operations"]}
    assert states == {"send": "succeeded", "charge": "failed", "undo": "failed"}


async def test_a_person_and_a_late_success_that_speak_at_once_settle_it_once(
    database_url: str, look: Look, outside: Outside
) -> None:
    answered = Gate()
    sink = outside.sink("send", Unguarded())
    async with (
        running(placing(Held(sink, after=answered)), database_url, **PATIENT) as first,
        running(placing(sink), database_url, **EAGER) as second,
    ):
        await first.decided(input=SEND)
        await answered.arrived.wait()
        await look.expire((await look.at())["id"])
        op = (await look.until("uncertain"))["id"]
        answered.open()
        with suppress(StateConflict):  # the provider was first
            await resolve(second, op, "happened")
        await look.until("succeeded")
        await eventually(lambda: first.service.idle)
        told = kinds(await look.receipts(op))
    assert told.count("succeeded") == 1
    assert await outside.count((await look.at())["key"]) == 1


async def test_a_person_who_was_wrong_is_contradicted_by_a_receipt(
    database_url: str, look: Look, outside: Outside
) -> None:
    """A terminal state absorbs; what the provider said is there for whoever looks."""
    answered = Gate()
    sink = outside.sink("send", Unguarded())
    async with (
        running(placing(Held(sink, after=answered)), database_url, **PATIENT) as first,
        running(placing(sink), database_url, **EAGER) as second,
    ):
        await first.decided(input=SEND)
        await answered.arrived.wait()
        await look.expire((await look.at())["id"])
        op = (await look.until("uncertain"))["id"]
        assert await resolve(second, op, "did-not-happen") == "failed"
        answered.open()
        late = await look.until_receipt(op, "operation.late-evidence")
        assert (await look.at())["state"] == "failed"
    assert late["learnt"] == "succeeded"
    assert late["reference"]


async def resolve(service: Running, op: UUID, verdict: Any) -> str:
    return await service.service.operations.resolve(service.caller, op, verdict, "", "")


async def test_a_retry_by_hand_is_sent_under_the_same_key(
    database_url: str, look: Look, outside: Outside
) -> None:
    await outside.faults({"POST /effects/send": {"status": 400, "times": 1}})
    async with running(placing(outside.sink("send", DAY)), database_url, **PATIENT) as service:
        await service.decided(input=SEND)
        failed = await look.until("failed")
        assert await outside.count(failed["key"]) == 0
        person = Key(service.tenant, uuid7(), frozenset({"operate"}))
        assert await service.service.operations.retry(person, failed["id"], "it was our fault") == "ready"
        row = await look.until("succeeded")
        with pytest.raises(StateConflict):
            await service.service.operations.retry(person, failed["id"], "again")
    assert (row["key"], await outside.count(row["key"])) == (failed["key"], 1)
    assert kinds(await look.receipts(row["id"])) == [
        "dispatching",
        "failed",
        "ready",
        "dispatching",
        "succeeded",
    ]


class Choosy:
    """A sink that cannot stand one payload, each time in its own way; everything else goes to the provider."""

    timeout_ms = 5_000
    name = provider = "send"

    def __init__(self, sink: WebhookSink, way: str, together: Gate) -> None:
        self.guarantee = sink.guarantee
        self._sink = sink
        self._way = way
        self._together = together

    async def perform(self, operation: Operation) -> SendResult:
        await self._together()
        if b"poison" not in operation.payload:
            return await self._sink.perform(operation)
        if self._way == "raises":
            raise ValueError("it holds a \x00 and a \ud800")
        if self._way == "rejects":
            return Rejected("too-large", "413: \x00\ud800" + "x" * 100_000)
        if self._way == "says nothing":
            return None  # type: ignore[return-value]  # a user's own sink need not have met a type checker
        return Accepted(reference=7)  # type: ignore[arg-type]  # nor this

    lookup = WebhookSink.lookup


@pytest.mark.parametrize(
    ("way", "state"),
    [
        ("raises", "uncertain"),
        ("rejects", "failed"),
        ("says nothing", "uncertain"),
        ("says junk", "uncertain"),
    ],
)
async def test_a_payload_that_its_sink_cannot_stand_stops_none_of_its_neighbours(
    way: str, state: str, database_url: str, look: Look, outside: Outside
) -> None:
    """Twelve operations in flight at once, whose outcomes are settled together; one of them is poison."""
    together = Gate()
    sink = Choosy(outside.sink("send", Unguarded(), timeout_ms=5_000), way, together)
    async with running(placing(sink), database_url, **PATIENT, pool_size=8) as service:
        payloads = ["poison" if n == 5 else f"fine-{n}" for n in range(12)]
        made = await asyncio.gather(
            *(service.decided(f"k{n}", input={**SEND, "payload": text}) for n, text in enumerate(payloads))
        )
        await eventually(lambda: together.inside == len(made))
        together.open()
        ids = [decision["id"] for decision in made]
        poison = await look.until(state, decision=ids.pop(5))
        rows = [await look.until("succeeded", decision=id) for id in ids]
    assert poison["reason"].isprintable()
    assert poison["due_at"] is None
    assert [await outside.count(row["key"]) for row in rows] == [1] * 11


async def test_an_operation_that_nobody_survives_is_parked_and_not_passed_on_for_ever(
    database_url: str, look: Look, outside: Outside
) -> None:
    """Each holder falls silent in the middle of its call; none of them lives to count it."""
    sink = Held(outside.sink("send", DAY), before=Gate())
    async with running(placing(sink), database_url, **EAGER, drain_s=0) as service:
        await service.decided(input=SEND)
        for token in range(1, MAX_SENDS + 1):

            async def held(token: int = token) -> bool:
                row = await look.at()
                return bool(row["fencing_token"] == token and row["state"] == "dispatching")

            await eventually(held)
            await look.expire((await look.at())["id"])
        row = await look.until("uncertain")
    assert row["reason"].startswith("holder-lost")
    assert row["due_at"] is None
