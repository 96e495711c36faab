"""The audit: what the clients were told (H), what really happened at the provider (P), and what the service shows (D) must agree.

lost        a decision that a client was told of is not there, or an effect that was promised did not happen
duplicated  an effect happened more than once, or two decisions made one version
unsettled   a decision or an operation has not come to an end, though everything has healed; one that is parked, uncertain with a
            reason and with nothing planned, has: only a person or the provider can end that
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator.core.canonical import canonical, digest
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
    """The decision once it rests and each of its operations has ended or is parked."""

    async def at_rest() -> Mapping[str, Any] | None:
        """the decision rests, and its operations have ended or are parked"""
        decision: Mapping[str, Any] = await world.get(f"/v1/decisions/{id}", server=server)
        if decision["status"] in WAITING:
            return None
        for op in decision["operations"]:
            if op["state"] not in ENDED and not await parked(world, op["id"], server=server):
                return None
        return decision

    found: Mapping[str, Any] = await until(at_rest, seconds=seconds)
    return found


async def parked(world: World, operation: str, *, server: int = 0) -> bool:
    """Whether it is uncertain, says why, and nothing more is planned for it; nor is its provider being asked just now."""
    shown = await world.get(f"/v1/operations/{operation}", server=server)
    resting = shown["state"] == "uncertain" and shown["reason"] and shown["due_at"] is None
    return bool(resting and ("could not be asked" in shown["reason"] or not can_be_asked(shown["guarantee"])))


def can_be_asked(guarantee: Mapping[str, Any]) -> bool:
    """Whether the sink's guarantee includes a lookup."""
    return guarantee["kind"] == "lookup" or guarantee.get("lookup_lag_ms") is not None


async def audit(
    world: World, verdict: Verdict, decisions: Sequence[str], *, server: int = 0, seconds: float = 30
) -> None:
    """Add to ``verdict`` what is lost, duplicated or unsettled among these decisions and their effects. All of them have to come
    to their ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    made: Counter[tuple[str, str, int]] = Counter()
    ended = []
    for id in decisions:
        try:
            left = deadline - time.monotonic()
            decision = await settled_decision(world, id, server=server, seconds=max(left, 0.1))
        except AssertionError as error:
            verdict.unsettled += 1
            verdict.notes.append(f"decision {id}: {error}")
            continue
        ended.append(decision)
        record = decision["record"]
        if decision["status"] == "committed":
            made[record["kind"], record["id"], record["committed_version"]] += 1
    verdict.duplicated += sum(count - 1 for count in made.values())
    ledger = {item["key"]: item for item in await world.happened()}  # after the operations have ended
    for decision in ended:
        operations = [
            await world.get(f"/v1/operations/{op['id']}", server=server) for op in decision["operations"]
        ]
        for operation in operations:
            _compare(verdict, operation, ledger.get(operation["key"]))
        promised = {operation["key"] for operation in operations}
        for stray in [key for key in ledger if key.startswith(decision["id"]) and key not in promised]:
            verdict.duplicated += 1
            verdict.notes.append(f"effect {stray} happened, and no operation has that key")


def _compare(verdict: Verdict, operation: Mapping[str, Any], effect: Mapping[str, Any] | None) -> None:
    """An operation, and what the provider has under its key."""
    happened = effect["count"] if effect else 0
    if effect and digest(canonical(effect["payload"])) != operation["payload_hash"]:
        verdict.wrong.append(f"operation {operation['id']} was sent with another payload than was committed")
    if happened > 1:
        verdict.duplicated += happened - 1
    if operation["state"] == "succeeded" and happened == 0:
        verdict.lost += 1
        verdict.notes.append(
            f"operation {operation['id']} is said to have succeeded; the provider does not know it"
        )
    if operation["state"] in ("failed", "cancelled") and happened:
        verdict.lost += 1
        verdict.notes.append(f"operation {operation['id']} happened, and is {operation['state']} here")


async def contiguous(world: World, verdict: Verdict, kind: str, id: str) -> list[Mapping[str, Any]]:
    """The record's history, oldest first; its versions must be 1, 2, 3 and so on, each made by one decision or one PUT (I2)."""
    history = await world.history(kind, id)
    versions = [version["version"] for version in history]
    verdict.expect(
        versions == list(range(1, len(versions) + 1)), f"the versions of {kind}/{id} are {versions}"
    )
    makers = [version["decision"] for version in history if version.get("decision")]
    verdict.expect(len(set(makers)) == len(makers), f"one decision made two versions of {kind}/{id}")
    return history
