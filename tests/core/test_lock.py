"""The rule of named locks: one holder, tokens that rise, first ones first, and everybody's turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.lock import Lock, Locks, Terms, Wish

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TERMS = Terms(margin_ms=30_000, patience_ms=500, asks_again_ms=1_000)
ONE, TWO, THREE = (UUID(int=n) for n in (1, 2, 3))


class Table:
    """The rows, and a clock in ms."""

    def __init__(self, *names: str) -> None:
        self.locks = {name: Lock(name) for name in names}
        self.running = {ONE, TWO, THREE}
        self.at = 0
        self.receipts: list[str] = []

    def asks(
        self, who: UUID, names: str = "a", *, token: int = 1, ready: int | None = None, limit_ms: int = 10_000
    ) -> dict[str, int]:
        now = NOON + timedelta(milliseconds=self.at)
        batch = Locks(self.locks, TERMS, now, self.running)
        granted = batch.grant(Wish(who, token, list(names), len(names) if ready is None else ready, limit_ms))
        self.receipts += [receipt.kind for receipt in batch.receipts]
        return granted

    def rests(self, who: UUID) -> None:
        self.running.discard(who)
        for lock in self.locks.values():
            if lock.decision_id == who:
                lock.release()

    def held(self) -> dict[str, UUID | None]:
        return {name: lock.decision_id for name, lock in self.locks.items()}


def test_a_free_lock_is_given_with_a_token_and_asking_again_changes_nothing() -> None:
    table = Table("a")
    assert table.asks(ONE) == {"a": 1}
    assert table.asks(ONE) == {"a": 1}
    assert table.receipts == ["lock.taken"]


def test_a_held_lock_is_refused_until_its_holder_rests_and_then_has_a_higher_token() -> None:
    table = Table("a")
    table.asks(ONE)
    assert table.asks(TWO) == {}
    table.rests(ONE)
    assert table.asks(TWO) == {"a": 2}


def test_what_comes_behind_a_refusal_is_not_given_and_what_was_held_of_it_is_let_go() -> None:
    table = Table("a", "b", "c")
    table.asks(TWO, "b")
    assert table.asks(ONE, "abc") == {"a": 1}
    table.locks["c"].decision_id = ONE
    table.asks(ONE, "abc")
    assert table.held() == {"a": ONE, "b": TWO, "c": None}
    assert table.receipts[-1] == "lock.released"


def test_only_as_many_as_are_ready_are_given() -> None:
    table = Table("a", "b")
    assert table.asks(ONE, "ab", ready=1) == {"a": 1}
    assert table.held() == {"a": ONE, "b": None}


def test_a_decision_that_runs_anew_has_its_locks_under_higher_tokens_before_its_turn() -> None:
    table = Table("a", "b", "c")
    table.asks(ONE, "ab", token=1)
    assert table.asks(ONE, "abc", token=2, ready=0) == {"a": 2, "b": 2}
    assert table.held() == {"a": ONE, "b": ONE, "c": None}


def test_a_decision_that_runs_anew_and_finds_a_lock_taken_lets_go_of_those_behind_it() -> None:
    table = Table("a", "b")
    table.asks(ONE, "ab", token=1)
    table.running.discard(ONE)
    assert table.asks(TWO, "a") == {"a": 2}
    assert table.asks(ONE, "ab", token=2, ready=0) == {}
    assert table.held() == {"a": TWO, "b": None}


def test_a_lock_is_kept_past_the_time_limit_of_its_decision_and_not_for_ever() -> None:
    table = Table("a")
    table.asks(ONE, limit_ms=10_000)
    for table.at in (10_000, 39_999):
        assert table.asks(TWO) == {}
    table.at = 40_000
    assert table.asks(TWO) == {"a": 2}


def test_a_lock_of_a_decision_that_does_not_run_is_free_whatever_it_says() -> None:
    table = Table("a")
    table.asks(ONE)
    table.running.discard(ONE)
    assert table.asks(TWO) == {"a": 2}


def test_whoever_has_been_refused_long_enough_is_the_next_and_nobody_else() -> None:
    table = Table("a")
    table.asks(ONE)
    assert table.asks(TWO) == {}
    table.rests(ONE)
    assert table.asks(THREE) == {"a": 2}, "its patience is not over"
    table.at = 600
    assert table.asks(TWO) == {}
    table.rests(THREE)
    assert table.asks(ONE) == {}
    assert table.asks(TWO) == {"a": 3}
    assert table.locks["a"].wanted_by is None


def test_whoever_does_not_ask_again_is_not_waited_for() -> None:
    table = Table("a")
    table.asks(ONE)
    table.asks(TWO)
    table.rests(ONE)
    table.at = 999
    assert table.asks(THREE) == {}
    table.at = 1_000
    assert table.asks(THREE) == {"a": 2}


@given(
    st.lists(
        st.tuples(st.sampled_from([ONE, TWO, THREE]), st.sampled_from(["a", "b", "ab"]), st.integers(0, 3)),
        max_size=40,
    )
)
def test_a_lock_has_one_holder_and_its_token_rises_with_each_change_of_hands(
    steps: Sequence[tuple[UUID, str, int]],
) -> None:
    table = Table("a", "b")
    seen: dict[str, list[tuple[int, UUID]]] = {"a": [], "b": []}
    for who, names, act in steps:
        if act == 0:
            table.rests(who)
            continue
        table.at += act * 300
        table.running.add(who)
        before = table.held()
        for name, token in table.asks(who, names).items():
            assert before[name] in (None, who)
            seen[name].append((token, who))
    for history in seen.values():
        assert [token for token, _ in history] == sorted(token for token, _ in history)
        assert len({token for token, _ in history}) == len(set(history)), "a token has one holder"
