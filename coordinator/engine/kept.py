"""Kept readings: the last thing found for a question, for evidence that may be some time old (`MaxAge`).

Kept in this process only, as bytes: nobody who is handed a kept reading can change it for the next. Bounded by count and by bytes;
the least recently used go first. How old a reading is, is counted from before it began, so what is handed out is never older than
it says; whether it is still fresh enough at commit is the fence's business, as for any other.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from coordinator.core.evidence import Item
from coordinator.core.likeness import Question

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Item).decode


class _Kept(NamedTuple):
    item: bytes
    began: float


class Kept:
    """At most ``count`` readings of at most ``size`` bytes together."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._kept: OrderedDict[Question, _Kept] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, question: Question | None, item: Item, began: float) -> None:
        """What was found; what turned out to be absent takes the place of what was there. A failure says nothing."""
        if question is None or item.state not in ("found", "absent"):
            return
        older = self._kept.get(question)
        if older is not None and older.began > began:
            return
        self._drop(question)
        if item.state == "found":
            self._kept[question] = kept = _Kept(_encode(item), began)
            self.bytes += len(kept.item)
        while len(self._kept) > self._count or self.bytes > self._size:
            self._drop(next(iter(self._kept)))

    def fresh(self, question: Question | None, max_age_ms: int) -> tuple[Item, float] | None:
        """The kept item and when its reading began, if it is not older than that now."""
        kept = self._kept.get(question) if question is not None else None
        if question is None or kept is None or (time.monotonic() - kept.began) * 1000 > max_age_ms:
            return None
        self._kept.move_to_end(question)
        return _decode(kept.item), kept.began

    def _drop(self, question: Question) -> None:
        dropped = self._kept.pop(question, None)
        if dropped is not None:
            self.bytes -= len(dropped.item)
