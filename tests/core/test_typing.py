"""What a policy sees is typed: mypy accepts the right use of a packet and refuses the wrong one.

One file is checked in one run; every line that is marked has to be an error of that kind, and no other line may be one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ERROR = re.compile(r":(\d+): error: .*\[([a-z-]+)\]$")
MARK = re.compile(r"# error: ([a-z-]+)$")

SNIPPETS = """
from typing import assert_never, assert_type

import msgspec

from coordinator import (
    Commit, Coordinator, Decisive, Decline, Evidence, Found, Missing, NeedMore, Outcome, Packet, Present,
    ReadRequest, Record, RecordKind, Review, decision_type, money,
)


class Request(msgspec.Struct):
    site: str


class Other(msgspec.Struct):
    name: str


class Capacity(msgspec.Struct):
    hours: int


class Quote(msgspec.Struct):
    price: int


class Planner:
    name = "planner"
    provider = "planner"
    returns = Capacity

    async def read(self, request: ReadRequest) -> Found[Capacity]:
        return Found(Capacity(40))


class Numbers:
    name = "numbers"
    provider = "numbers"
    returns = int

    async def read(self, request: ReadRequest) -> Found[str]:
        return Found("1")


needed = Evidence("needed", Planner(), deadline_ms=5, freshness=Decisive("hours"))
spare = Evidence("spare", Planner(), deadline_ms=5, required=False, reserves=money("1 SGD"))
later = Evidence("later", Planner(), deadline_ms=5, required=False, on_demand=True)
Evidence("late", Planner(), deadline_ms=5, on_demand=True)  # error: call-overload
Evidence("text", Planner(), deadline_ms="5")  # error: call-overload
Evidence("mixed", Numbers(), deadline_ms=5)  # error: misc
quotes = RecordKind("quote", Quote)


def price(request: Request, packet: Packet, record: Record[Quote]) -> Outcome:
    assert_type(packet[needed], Capacity)
    assert_type(packet[needed].hours, int)
    assert_type(packet[spare], Present[Capacity] | Missing)
    assert_type(packet[later].or_else(Capacity(0)), Capacity)
    assert_type(packet[spare].or_else(None), Capacity | None)
    packet[needed].minutes  # error: attr-defined
    packet[needed].value  # error: attr-defined
    packet[spare].value  # error: union-attr
    packet[spare].hours  # error: union-attr
    packet["needed"]  # error: call-overload
    packet[spare].or_else(None).hours  # error: union-attr
    record.data.price  # error: union-attr
    record.becomes(Other("x"))  # error: arg-type
    match packet[spare]:
        case Present(value):
            assert_type(value, Capacity)
        case Missing(state, code):
            assert_type(code, str | None)
        case never:
            assert_never(never)
    if record.data is None or record.data.price > 5:
        return Commit({"hours": packet[needed].hours}, changes=[record.becomes(Quote(1))])
    return NeedMore(["later"]) if request.site else Review("who asked?")


def forgets_missing(request: Request, packet: Packet, record: Record[Quote]) -> Outcome:
    match packet[spare]:
        case Present(value):
            return Commit(value)
        case never:
            assert_never(never)  # error: arg-type


def returns_none(request: Request, packet: Packet, record: Record[Quote]) -> Outcome | None:
    return None


async def waits(request: Request, packet: Packet, record: Record[Quote]) -> Outcome:
    return Decline("late")


good = decision_type("quote", request=Request, policy=price, policy_version="1", evidence=[needed, spare], record=quotes)
assert_type(good.request, type[Request])
Coordinator([good], records=[quotes])
decision_type("a", request=Other, policy=price, policy_version="1", evidence=[])  # error: arg-type
decision_type("b", request=Request, policy=returns_none, policy_version="1", evidence=[])  # error: arg-type
decision_type("c", request=Request, policy=waits, policy_version="1", evidence=[])  # error: arg-type
decision_type("d", request=Request, policy=price, policy_version=1, evidence=[])  # error: arg-type
decision_type("e", request=Request, policy=price, evidence=[])  # error: call-arg
"""


def errors_of_mypy(file: Path) -> dict[int, str]:
    """Line and kind of each error."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "snippets"), "--no-error-summary", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [
        ERROR.search(line) for line in done.stdout.splitlines() if file.name in line and ": error: " in line
    ]
    assert all(found), done.stdout
    return {int(match[1]): match[2] for match in found if match}


def test_a_policy_that_mistakes_what_it_sees_does_not_pass_the_type_checker(tmp_path: Path) -> None:
    lines = SNIPPETS.splitlines()
    expected = {number: mark[1] for number, line in enumerate(lines, 1) if (mark := MARK.search(line))}
    file = tmp_path / "policies.py"
    file.write_text(SNIPPETS)
    found = errors_of_mypy(file)
    wrong = {
        f"{number}: {lines[number - 1].strip()}": (expected.get(number), found.get(number))
        for number in expected.keys() | found.keys()
        if expected.get(number) != found.get(number)
    }
    assert wrong == {}
