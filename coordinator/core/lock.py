"""Who gets a named lock: the rule, applied to rows that are locked, in the order in which they are asked for.

    free     nobody has it; or its holder does not run (any more, or just now), or its time is over, past every legitimate run's end
    held     by a running decision under a fencing token, which rises whenever the lock changes hands
    wanted   held, and somebody has asked for it in vain: after some patience it goes to nobody else

A decision asks for its locks in the global order and gets the first ones of them, up to the first that it is refused; it lets go of
any that it has behind that: nobody waits for a lock while holding a later one. What a decision held before it was begun anew is its
own still, under a new token, unless another one took it meanwhile. Patience lets a process hand a lock on among its own decisions,
without a poll in between, and still gives every other process its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from coordinator.core.receipt import Receipt, receipt


class Terms(msgspec.Struct, frozen=True):
    """``margin_ms``: how long after its decision's time is over a lock is kept for it. ``patience_ms``: how long whoever waits lets
    others go first. ``asks_again_ms``: whoever does not ask again within this waits no more."""

    margin_ms: int
    patience_ms: int
    asks_again_ms: int


class Wish(msgspec.Struct, frozen=True):
    """A decision under its token wants the locks ``names``, all of them in order. Now it may take the first ``ready`` of them, and
    whatever is its own. Its run may still take ``lasts_ms``."""

    decision_id: UUID
    token: int
    names: Sequence[str]
    ready: int
    lasts_ms: int


@dataclass(slots=True)
class Lock:
    """One lock as it stands; ``token`` is that of its latest holder."""

    name: str
    token: int = 0
    decision_id: UUID | None = None
    decision_token: int | None = None
    taken_at: datetime | None = None
    expires_at: datetime | None = None
    wanted_by: UUID | None = None
    wanted_since: datetime | None = None
    wanted_until: datetime | None = None

    def is_held_by(self, decision_id: UUID, decision_token: int) -> bool:
        return (self.decision_id, self.decision_token) == (decision_id, decision_token)

    def release(self) -> Receipt:
        """Free it; the receipt says whose it was."""
        told = receipt(
            "lock.released", decision_id=str(self.decision_id), lock=self.name, fencing_token=self.token
        )
        self.decision_id = self.decision_token = self.taken_at = self.expires_at = None
        return told


class Locks:
    """The locks of one batch of wishes. ``now`` and ``running`` were read after they were locked; ``changed`` is what has to be
    written, ``receipts`` tell of it."""

    def __init__(
        self, locks: Mapping[str, Lock], terms: Terms, now: datetime, running: Collection[UUID]
    ) -> None:
        self.changed: dict[str, Lock] = {}
        self.receipts: list[Receipt] = []
        self._locks = locks
        self._terms = terms
        self._now = now
        self._running = {*running}

    def grant(self, wish: Wish) -> dict[str, int]:
        """The tokens of what ``wish``, whose decision runs, has from now on."""
        self._running.add(wish.decision_id)
        tokens: dict[str, int] = {}
        for place, name in enumerate(wish.names):
            lock = self._locks[name]
            if place >= wish.ready and lock.decision_id != wish.decision_id:
                break
            if not lock.is_held_by(wish.decision_id, wish.token):
                if not self._is_free_for(wish, lock):
                    self._want(wish, lock)
                    break
                self._take(wish, lock)
            tokens[name] = lock.token
        for name in wish.names[len(tokens) :]:
            if self._locks[name].decision_id == wish.decision_id:
                self._changes(self._locks[name], self._locks[name].release())
        return tokens

    def _is_free_for(self, wish: Wish, lock: Lock) -> bool:
        if lock.decision_id == wish.decision_id:
            return True
        in_time = lock.expires_at is not None and self._now < lock.expires_at
        if lock.decision_id in self._running and in_time:
            return False
        return not self._somebody_else_waits(wish, lock) or not self._has_been_patient(lock)

    def _somebody_else_waits(self, wish: Wish, lock: Lock) -> bool:
        asking = lock.wanted_until is not None and self._now < lock.wanted_until
        return asking and lock.wanted_by != wish.decision_id

    def _has_been_patient(self, lock: Lock) -> bool:
        patience = timedelta(milliseconds=self._terms.patience_ms)
        return lock.wanted_since is not None and lock.wanted_since + patience <= self._now

    def _take(self, wish: Wish, lock: Lock) -> None:
        before = lock.decision_id
        lock.token += 1
        lock.decision_id, lock.decision_token = wish.decision_id, wish.token
        lock.taken_at = self._now
        lock.expires_at = self._now + timedelta(milliseconds=wish.lasts_ms + self._terms.margin_ms)
        if lock.wanted_by == wish.decision_id:
            lock.wanted_by = lock.wanted_since = lock.wanted_until = None
        told = receipt(
            "lock.taken",
            decision_id=str(wish.decision_id),
            lock=lock.name,
            fencing_token=lock.token,
            decision_token=wish.token,
            taken_from=str(before) if before else None,
        )
        self._changes(lock, told)

    def _want(self, wish: Wish, lock: Lock) -> None:
        """Be the next, unless somebody else who still asks is."""
        if self._somebody_else_waits(wish, lock):
            return
        if lock.wanted_by != wish.decision_id:
            lock.wanted_by, lock.wanted_since = wish.decision_id, self._now
        lock.wanted_until = self._now + timedelta(milliseconds=self._terms.asks_again_ms)
        self._changes(lock)

    def _changes(self, lock: Lock, *receipts: Receipt) -> None:
        self.changed[lock.name] = lock
        self.receipts += receipts
