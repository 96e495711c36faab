"""After the load: is what was acknowledged there, and did each effect happen once? A fast wrong answer is no figure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loadtests.decision_types import EFFECT
from loadtests.world import World, fetch

COMMITTED = "SELECT count(*) FROM decisions WHERE status = 'committed' AND idempotency_key LIKE '{prefix}-%'"
SENT = "SELECT count(*) FROM operations WHERE state = 'succeeded' AND reference NOT LIKE 'm-%'"


class LedgerItem(msgspec.Struct, frozen=True):
    key: str
    count: int


class Ledger(msgspec.Struct, frozen=True):
    items: list[LedgerItem]


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """``lost``: acknowledged and not in the database. ``unasked``: in the database and not acknowledged."""

    acknowledged: int
    lost: int
    unasked: int
    effects_succeeded: int
    effects_in_ledger: int
    effects_more_than_once: int

    @property
    def ok(self) -> bool:
        same = self.effects_succeeded == self.effects_in_ledger
        return same and not (self.lost or self.unasked or self.effects_more_than_once)


def check(world: World, acknowledged: Mapping[str, int]) -> Checked:
    """``acknowledged``: 201s by the prefix of their keys."""
    differences = {
        prefix: world.number(COMMITTED.format(prefix=prefix)) - count
        for prefix, count in acknowledged.items()
    }
    ledger = msgspec.json.decode(fetch(f"{world.providers.url}/ledger?name={EFFECT}"), type=Ledger)
    return Checked(
        acknowledged=sum(acknowledged.values()),
        lost=-sum(min(0, difference) for difference in differences.values()),
        unasked=sum(max(0, difference) for difference in differences.values()),
        effects_succeeded=world.number(SENT),
        effects_in_ledger=len(ledger.items),
        effects_more_than_once=sum(item.count != 1 for item in ledger.items),
    )
