"""Slots of a provider shared between processes: never above the limit, fairly, and nobody starves (pure arithmetic, I15)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.share import KEEPS_MS, Holder, fair_parts, home_of, share_of


def parts(
    limit: int, *wants: int, waited: dict[int, int] | None = None, slots: dict[int, int] | None = None
) -> list[int]:
    holders = [
        Holder(slots=(slots or {}).get(n, 0), waited_ms=(waited or {}).get(n, 0)) for n in range(len(wants))
    ]
    return fair_parts(limit, holders, wants)


def test_everybody_gets_an_equal_part_and_what_some_leave_the_others_divide() -> None:
    assert parts(20, 100, 100) == [10, 10]
    assert parts(20, 2, 100, 100) == [2, 9, 9]
    assert parts(20, 0, 0, 100) == [0, 0, 20]
    assert parts(20, 3, 4) == [3, 4]


def test_what_cannot_be_divided_goes_to_whoever_has_waited_longest() -> None:
    assert parts(2, 1, 1, 1, waited={0: 10, 1: 700, 2: 900}) == [0, 1, 1]
    assert parts(3, 5, 5, waited={1: 10}) == [1, 2]


def test_who_holds_an_indivisible_slot_keeps_it_until_another_has_waited_clearly_longer() -> None:
    held = {0: 1}
    assert parts(1, 5, 5, waited={0: 100, 1: 100 + KEEPS_MS - 1}, slots=held) == [1, 0]
    assert parts(1, 5, 5, waited={0: 100, 1: 100 + KEEPS_MS + 1}, slots=held) == [0, 1]


@given(st.integers(0, 60), st.lists(st.integers(0, 40), min_size=1, max_size=10))
def test_parts_are_all_there_is_if_it_is_wanted_and_differ_by_one_at_most(
    limit: int, wants: list[int]
) -> None:
    shared = parts(limit, *wants)
    assert sum(shared) == min(limit, sum(wants))
    unsatisfied = [part for part, want in zip(shared, wants, strict=True) if part < want]
    assert not unsatisfied or max(shared) <= min(unsatisfied) + 1


@dataclass
class Process:
    """What one process of the simulation has: calls under way and calls that wait."""

    busy: int = 0
    waiting: int = 0
    slots: int = 0
    part: int = 0
    told: Holder = field(default_factory=lambda: Holder(slots=0))

    def sync(self, limit: int, all_: list[Process], home: int) -> None:
        me = next(index for index, each in enumerate(all_) if each is self)
        self.told = Holder(slots=self.slots, wanted=self.busy + self.waiting)
        share = share_of(limit, [each.told for each in all_], me, home=home, busy=self.busy)
        self.slots, self.part = share.slots, share.part
        self.told = msgspec.structs.replace(self.told, slots=share.slots)
        self.begin()

    def begin(self) -> None:
        begun = min(self.waiting, max(0, min(self.slots, self.part) - self.busy))
        self.waiting, self.busy = self.waiting - begun, self.busy + begun


events = st.lists(
    st.tuples(st.sampled_from(["sync", "call", "end"]), st.integers(0, 7), st.integers(1, 9)), max_size=120
)


@given(limit=st.integers(1, 12), count=st.integers(1, 8), events=events)
@settings(max_examples=300)
def test_whatever_the_interleaving_the_slots_held_and_the_calls_under_way_stay_within_the_limit(
    limit: int, count: int, events: list[tuple[str, int, int]]
) -> None:
    processes, home = [Process() for _ in range(count)], home_of(limit, count)
    for what, who, amount in events:
        process = processes[who % count]
        match what:
            case "sync":
                process.sync(limit, processes, home)
            case "call":
                process.waiting += amount
                process.begin()
            case _:
                process.busy -= min(process.busy, amount)
                process.begin()
        assert sum(each.slots for each in processes) <= limit
        assert all(each.busy <= each.slots for each in processes)


@given(limit=st.integers(1, 12), demands=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_once_everybody_has_synced_a_few_times_no_slot_is_idle_while_a_call_waits(
    limit: int, demands: list[int]
) -> None:
    processes, home = [Process(waiting=demand) for demand in demands], home_of(limit, len(demands))
    for _ in range(4):
        for process in processes:
            process.sync(limit, processes, home)
    kept_ready = sum(1 for each in processes if not each.busy) if home else 0
    assert sum(each.busy for each in processes) >= min(limit - kept_ready, sum(demands))


def test_a_process_above_its_part_comes_down_only_as_its_calls_end() -> None:
    holders = [Holder(slots=10, wanted=10), Holder(slots=0, wanted=5)]
    share = share_of(10, holders, 0, home=5, busy=10)
    assert (share.part, share.slots) == (5, 10)
    assert share_of(10, holders, 0, home=5, busy=7).slots == 7
    assert share_of(10, holders, 1, home=5, busy=0).slots == 0


def test_the_slots_of_a_dead_process_are_nobodys_until_they_are_freed() -> None:
    holders = [Holder(slots=0, wanted=9), Holder(slots=6, wanted=9, alive=False)]
    assert share_of(10, holders, 0, home=5, busy=0).slots == 4


def test_a_process_whose_slots_were_taken_meanwhile_claims_none_for_its_calls_under_way() -> None:
    holders = [Holder(slots=0, wanted=3), Holder(slots=10, wanted=10)]
    assert share_of(10, holders, 0, home=5, busy=3).slots == 0


def test_an_idle_process_keeps_its_part_ready_until_another_lacks_slots_and_then_one() -> None:
    assert share_of(10, [Holder(slots=5), Holder(slots=2, wanted=2)], 0, home=5, busy=0).slots == 5
    assert share_of(10, [Holder(slots=5), Holder(slots=5, wanted=9)], 0, home=5, busy=0).slots == 1
    assert share_of(2, [Holder(slots=1), Holder(slots=0)], 0, home=home_of(2, 8), busy=0).slots == 0
