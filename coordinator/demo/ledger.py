"""The ledger: which effects really happened, and how often. It is the truth that clients are judged by.

One append-only file of JSON lines, one line for each time an effect was performed; memory holds its replay.
One process owns it (an exclusive flock). The order of a performance is: look the key up, write the line with
one write(2), change memory, answer. Nothing is awaited between the look-up and the change of memory, so
concurrent requests with one key are one effect.

What durable means here. The line is in the kernel before anyone hears of the effect, so an answered effect
survives SIGKILL of this process at any point. Against loss of power an fdatasync runs in a thread, at most
one in flight, each covering all lines written before it began: every half second by default, so that up to
that much may be lost; without pause, and before the answer, when the ledger waits for it (`--fsync`). An
effect that was written but not answered (a kill in between) has happened: that is the uncertainty which
clients must resolve.

At start the file is replayed. A last line that is torn was never answered, and is cut off. A broken line
anywhere else is not an accident of ours and stops the start. When a write or fdatasync fails the ledger is
broken: the kernel may have dropped the pages, so it refuses everything until a restart has read the file
again.
"""

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec

from coordinator.demo.refusals import Refusal

_LEDGER_FILE = "ledger.jsonl"
_LAZY_SYNC_EVERY_S = 0.5


class Effect(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line: the `count`-th performance of this effect, at UNIX time `at`."""

    at: float
    name: str
    key: str
    count: int
    reference: str
    payload: msgspec.Raw


class Performance(NamedTuple):
    effect: Effect
    replayed: bool


class LedgerCorrupt(Exception):
    """The file holds something that this program did not write, or another process owns it."""


_LINE = msgspec.json.Decoder(Effect)


class Ledger:
    """Open it with `Ledger(folder, wait_for_sync=...)`, run `sync_forever` beside its users, close it."""

    def __init__(self, folder: Path, *, wait_for_sync: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._waits = wait_for_sync
        self._effects: dict[tuple[str, str], Effect] = {}
        self._broken = ""
        self._fd = os.open(folder / _LEDGER_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._performed = self._lock_and_replay()
        self._size = self._synced = os.fstat(self._fd).st_size
        self._dirty = anyio.Event()
        self._progress = anyio.Event()

    def perform(self, name: str, key: str, payload: bytes, now: float, window_s: float | None) -> Performance:
        """Perform the effect, or recall it when `key` was used within `window_s` seconds (None: ever).

        `payload` is canonical JSON. Refusal `idempotency-key-reused` for another payload within the window.
        """
        before = self._effects.get((name, key))
        if before and (window_s is None or now - before.at < window_s):
            if bytes(before.payload) != payload:
                raise Refusal("idempotency-key-reused", f"{key!r} was used with another payload.")
            return Performance(before, True)
        effect = Effect(
            at=now,
            name=name,
            key=key,
            count=before.count + 1 if before else 1,
            reference=f"{name}-{self._performed + 1:06d}",
            payload=msgspec.Raw(payload),
        )
        self._append(msgspec.json.encode(effect) + b"\n")
        self._performed += 1
        self._effects[name, key] = effect
        return Performance(effect, False)

    def find(self, name: str, key: str) -> Effect | None:
        """The newest performance of an effect."""
        return self._effects.get((name, key))

    def effects(self) -> list[Effect]:
        """The newest performance of each effect, in the order of first performances."""
        return list(self._effects.values())

    async def settled(self) -> None:
        """Return once what was written may be told: at once, or after its fdatasync when we wait for it."""
        target = self._size
        while self._waits and self._synced < target:
            self._refuse_when_broken()
            await self._progress.wait()

    async def sync_forever(self) -> None:
        """Sync what is written, one fdatasync at a time, until cancelled."""
        while not self._broken:
            await self._dirty.wait()
            self._dirty = anyio.Event()
            covered = self._size
            try:
                await anyio.to_thread.run_sync(os.fdatasync, self._fd)
                self._synced = covered
            except OSError as error:
                self._broken = f"fdatasync: {error}"
            progress, self._progress = self._progress, anyio.Event()
            progress.set()
            if not self._waits:
                await anyio.sleep(_LAZY_SYNC_EVERY_S)

    def close(self) -> None:
        """Sync what is left and give the file up."""
        os.fdatasync(self._fd)
        os.close(self._fd)

    def _append(self, line: bytes) -> None:
        self._refuse_when_broken()
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
        except OSError as error:
            self._broken = f"write: {error}"
            self._refuse_when_broken()
        self._size += len(line)
        self._dirty.set()

    def _refuse_when_broken(self) -> None:
        if self._broken:
            raise Refusal("ledger-broken", f"Nothing is performed until a restart: {self._broken}.")

    def _lock_and_replay(self) -> int:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerCorrupt("another process writes this ledger") from None
        with os.fdopen(os.dup(self._fd), "rb") as file:
            lines = file.read().split(b"\n")
        torn = lines.pop()
        good = 0
        for number, line in enumerate(lines, start=1):
            try:
                effect = _LINE.decode(line)
            except msgspec.DecodeError as error:
                raise LedgerCorrupt(f"line {number}: {error}") from None
            self._effects[effect.name, effect.key] = effect
            good += len(line) + 1
        if torn:
            os.ftruncate(self._fd, good)
        return len(lines)
