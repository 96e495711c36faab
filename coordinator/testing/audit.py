"""The audit: what the clients were told (H), what really happened at the provider (P), and what the service shows (D) must agree.

lost        a decision that a client was told of is not there, or an effect that was promised did not happen
duplicated  an effect happened more than once, or two decisions made one version
unsettled   a decision or an operation has not come to an end, though everything has healed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator.testing.world import World, until

ENDED = ("succeeded", "failed", "compensated", "cancelled")
WAITING = ("queued", "running")


class Verdict(msgspec.Struct, kw_only=True):
    """What one scenario found; ``notes`` are sentences for people, the first of them the reason if it is not ok."""

    scenario: str
    invariants: str
    lost: int = 0
    duplicated: int = 0
    unsettled: int = 0
    wrong: list[str] = []
    notes: list[str] = []
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.unsettled or self.wrong)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)


async def settled_decision(
    world: World, id: str, *, server: int = 0, seconds: float = 30
) -> Mapping[str, Any]:
    """The decision once it rests and each of its operations has ended."""

    async def at_rest() -> Mapping[str, Any] | None:
        decision: Mapping[str, Any] = await world.get(f"/v1/decisions/{id}", server=server)
        going_on = [op for op in decision["operations"] if op["state"] not in ENDED]
        return None if going_on or decision["status"] in WAITING else decision

    found: Mapping[str, Any] = await until(at_rest, seconds=seconds)
    return found


async def audit(world: World, verdict: Verdict, decisions: Sequence[str], *, server: int = 0) -> None:
    """Add to ``verdict`` what is lost, duplicated or unsettled among these decisions and their effects."""
    made: Counter[tuple[str, str, int]] = Counter()
    for id in decisions:
        try:
            decision = await settled_decision(world, id, server=server)
        except AssertionError as error:
            verdict.unsettled += 1
            verdict.notes.append(f"decision {id}: {error}")
            continue
        record = decision["record"]
        if decision["status"] == "committed":
            made[record["kind"], record["id"], record["committed_version"]] += 1
        ledger = await world.ledger()  # after the operations have ended
        for op in decision["operations"]:
            operation = await world.get(f"/v1/operations/{op['id']}", server=server)
            _compare(verdict, operation, ledger.get(operation["key"], 0))
    verdict.duplicated += sum(count - 1 for count in made.values())


def _compare(verdict: Verdict, operation: Mapping[str, Any], happened: int) -> None:
    if happened > 1:
        verdict.duplicated += happened - 1
    if operation["state"] == "succeeded" and happened == 0:
        verdict.lost += 1
        verdict.notes.append(
            f"operation {operation['id']} is said to have succeeded; the provider does not know it"
        )
    if operation["state"] != "succeeded" and happened:
        verdict.lost += 1
        verdict.notes.append(f"operation {operation['id']} happened, and is {operation['state']} here")


async def contiguous(world: World, verdict: Verdict, kind: str, id: str) -> list[Mapping[str, Any]]:
    """The record's history, oldest first; its versions must be 1, 2, 3 and so on, each made by one decision or one PUT (I2)."""
    history = sorted(
        await world.all_of(f"/v1/records/{kind}/{id}/history"), key=lambda version: version["version"]
    )
    versions = [version["version"] for version in history]
    verdict.expect(
        versions == list(range(1, len(versions) + 1)), f"the versions of {kind}/{id} are {versions}"
    )
    makers = [version["decision"] for version in history if version.get("decision")]
    verdict.expect(len(set(makers)) == len(makers), f"one decision made two versions of {kind}/{id}")
    return history
