"""The log of one run: when its numbers may become known, what is stored of it, and who waits for whom."""

from __future__ import annotations

import asyncio

from coordinator.core.events import first_of
from coordinator.engine.events import BATCH, BATCH_BYTES, EventLog


def log_of(*kinds: str, token: int = 1) -> EventLog:
    log = EventLog(token)
    for kind in kinds:
        log.add(kind, {})
    return log


async def test_a_log_that_nobody_follows_stores_nothing_and_one_that_is_followed_stores_all_of_it() -> None:
    log = log_of("a", "b")
    assert log.seal() == []
    log.unseal()
    with log.follow(0) as follower:
        assert [event.kind for event in log.read(follower)] == ["a", "b"]
    assert [event.number for event in log.seal()] == [2, 3], "also when the follower has gone"


async def test_who_comes_while_the_rest_is_being_committed_is_told_nothing_of_a_log_that_is_not_stored() -> (
    None
):
    log = log_of("a", "b")
    log.seal()
    with log.follow(0) as follower:
        assert log.read(follower) == []
        log.close()
        assert log.read(follower) == []
    assert not log.followed


async def test_who_comes_while_a_commit_is_tried_in_vain_is_told_as_soon_as_that_is_known() -> None:
    log = log_of("a", "b")
    log.seal()
    with log.follow(0) as follower:
        assert log.read(follower) == []
        log.unseal()
        assert await follower.changed(1)
        assert [event.kind for event in log.read(follower)] == ["a", "b"]


async def test_who_came_before_the_rest_is_told_to_the_end() -> None:
    log = log_of("a")
    with log.follow(0) as follower:
        log.sent(follower, len(log.read(follower)))
        log.add("b", {})
        log.seal()
        log.close()
        assert [event.kind for event in log.read(follower)] == ["b"]


async def test_a_cursor_starts_behind_the_event_that_was_seen() -> None:
    log = log_of("a", "b", "c", token=3)
    for seen, expected in [(0, "abc"), (first_of(3), "bc"), (first_of(3) + 2, ""), (first_of(9), "")]:
        with log.follow(seen) as follower:
            assert "".join(event.kind for event in log.read(follower)) == expected


async def test_a_batch_is_bounded_in_number_and_in_bytes() -> None:
    log = log_of(*["a"] * (BATCH + 1))
    with log.follow(0) as follower:
        assert len(log.read(follower)) == BATCH
    heavy = EventLog(1)
    for _ in range(10):
        heavy.add("a", "x" * (BATCH_BYTES // 2))
    with heavy.follow(0) as follower:
        assert len(heavy.read(follower)) == 2


async def test_a_follower_that_leaves_lets_the_producer_go_on() -> None:
    log = log_of(*["a"] * 9)
    with log.follow(0):
        waiting = asyncio.create_task(log.room(4, 60))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await asyncio.wait_for(waiting, 1) < 1


async def test_the_producer_waits_for_the_slowest_and_only_as_long_as_it_may() -> None:
    log = log_of(*["a"] * 9)
    with log.follow(0) as slow, log.follow(0) as quick:
        log.sent(quick, 9)
        waited = await log.room(4, 0.05)
        assert 0.04 < waited < 1
        assert slow.cut
        assert not quick.cut
        assert await slow.changed(0)
        log.add("a", {})
        assert await log.room(4, 60) < 0.05, "nobody lags now"


async def test_nothing_is_told_after_the_last_word_of_a_run() -> None:
    """It would have a number that is not stored."""
    log = log_of("a")
    with log.follow(0) as follower:
        log.sent(follower, len(log.read(follower)))
        log.seal()
        log.add("late", {})
        log.close()
        log.add("later", {})
        assert log.read(follower) == []
