"""The pulse: a process beside a worker that sends its heartbeats, so that work which blocks the worker's event loop, holds the
interpreter's lock or takes all its time does not make it look dead.

What it vouches for is that the worker's process lives and runs: it sends nothing for one that is stopped (SIGSTOP, a frozen
container), and it ends when the worker does, at the end of its input. It then kills the process groups of the programs that the
worker had started, which nobody else would. What bounds a worker that hangs all the same is each task's deadline.

    in     {"url", "key", "parent", "lease_ms"} first; then {"hold", "token", "group"}, {"say", "lines"}, {"flush"} and {"drop"},
           each with a task's id
    out    {"kept", "remaining_ms", "draining"}, {"lost", "why"} and {"flushed"}, with a task's id

Standard library and msgspec alone, and no event loop: it has little to start, and nothing in it waits for anything but its input,
the clock and one answer at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

LINES_AT_ONCE = 100
MAX_LINES = 1_000
"""Lines of one task that wait to be sent; the oldest give way."""
KILL_AFTER_S = 2.0
CHECK_S = 0.05


class Start(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    key: str
    parent: int
    lease_ms: int


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of ``hold``, ``say``, ``flush`` and ``drop`` is a task's id. ``flush`` asks to be told when all was sent."""

    hold: str | None = None
    token: int = 0
    group: int | None = None
    say: str | None = None
    lines: list[str] = []
    flush: str | None = None
    drop: str | None = None


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of ``kept``, ``lost`` and ``flushed`` is a task's id."""

    kept: str | None = None
    remaining_ms: int = 0
    draining: bool = False
    lost: str | None = None
    why: str = ""
    flushed: str | None = None


class Held:
    """A task that the worker has. ``due`` is when its next heartbeat is, on the monotonic clock."""

    def __init__(self, token: int, due: float) -> None:
        self.token = token
        self.due = due
        self.flush = False
        self.lines: deque[str] = deque(maxlen=MAX_LINES)


class Coordinator:
    """Heartbeats over one connection that is kept open."""

    def __init__(self, start: Start) -> None:
        self._place = urlsplit(start.url)
        self._headers = {"Authorization": f"Bearer {start.key}", "Content-Type": "application/json"}
        self._timeout_s = max(1.0, start.lease_ms / 3000)
        self._connection: http.client.HTTPConnection | None = None

    def beat(self, task: str, token: int, lines: list[str]) -> tuple[int, dict[str, Any]]:
        """Status and answer. Raises ``OSError`` or ``http.client.HTTPException`` if there is none."""
        body = msgspec.json.encode({"fencing_token": token, "progress": lines})
        try:
            connection = self._connection = self._connection or self._connect()
            connection.request("POST", f"{self._place.path}/v1/tasks/{task}/heartbeat", body, self._headers)
            answer = connection.getresponse()
            return answer.status, _decoded(answer.read())
        except (OSError, http.client.HTTPException):
            self.hang_up()
            raise

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._place.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._place.hostname or "", self._place.port, timeout=self._timeout_s)

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


class Pulse:
    """The loop: orders as they come, heartbeats when they are due, progress at once."""

    def __init__(self, start: Start) -> None:
        self._parent = start.parent
        self._every_s = start.lease_ms / 3000
        self._again_s = min(0.5, start.lease_ms / 10_000)
        self._coordinator = Coordinator(start)
        self._held: dict[str, Held] = {}
        self._groups: dict[str, int] = {}
        """Until the worker drops the task: of a lost one, too, which the worker may not have stopped yet."""
        self._text = b""

    def run(self) -> None:
        """Returns when the worker has ended, or has closed its end."""
        while self._read_orders(self._until_due()):
            now = time.monotonic()
            for id, held in list(self._held.items()):
                if held.due <= now:
                    self._beat(id, held)
        self._kill_groups()

    def _until_due(self) -> float | None:
        if not self._held:
            return None
        return max(0.0, min(held.due for held in self._held.values()) - time.monotonic())

    def _read_orders(self, timeout: float | None) -> bool:
        """False at the end of the input."""
        readable, _, _ = select.select([0], [], [], timeout)
        if not readable:
            return True
        chunk = os.read(0, 1 << 16)
        *lines, self._text = (self._text + chunk).split(b"\n")
        for line in lines:
            self._obey(msgspec.json.decode(line, type=Order))
        return bool(chunk)

    def _obey(self, order: Order) -> None:
        if order.hold is not None:
            self._held.setdefault(order.hold, Held(order.token, time.monotonic() + self._every_s))
            if order.group is not None:
                self._groups[order.hold] = order.group
        elif order.say is not None and order.say in self._held:
            self._held[order.say].lines += order.lines
            self._held[order.say].due = time.monotonic()
        elif order.flush is not None and order.flush in self._held:
            self._held[order.flush].flush = True
            self._flush(order.flush)
        elif order.drop is not None:
            self._held.pop(order.drop, None)
            self._groups.pop(order.drop, None)

    def _beat(self, id: str, held: Held) -> None:
        lines = list(held.lines)[:LINES_AT_ONCE]
        if not runs(self._parent):
            held.due = time.monotonic() + self._again_s
            return
        try:
            status, answer = self._coordinator.beat(id, held.token, lines)
        except (OSError, http.client.HTTPException):
            held.due = time.monotonic() + self._again_s
            return
        if status == 200:
            for _ in lines:
                held.lines.popleft()
            held.due = time.monotonic() + (0.0 if held.lines else self._every_s)
            _tell(News(kept=id, remaining_ms=answer["remaining_ms"], draining=answer["draining"]))
            self._flush(id)
        elif status in (404, 409):
            del self._held[id]
            _tell(News(lost=id, why=str(answer.get("detail", status))))
        else:
            held.due = time.monotonic() + self._again_s

    def _flush(self, id: str) -> None:
        held = self._held[id]
        if held.flush and not held.lines:
            held.flush = False
            _tell(News(flushed=id))

    def _kill_groups(self) -> None:
        """Of programs that the worker has left behind."""
        groups = list(self._groups.values())
        for number in (signal.SIGTERM, signal.SIGKILL) if groups else ():
            for group in groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
            if number == signal.SIGTERM:
                _until_gone(groups)


def _until_gone(groups: list[int]) -> None:
    until = time.monotonic() + KILL_AFTER_S
    while time.monotonic() < until and any(_exists(group) for group in groups):
        time.sleep(CHECK_S)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def runs(pid: int) -> bool:
    """Whether a process is there and is not stopped, as the kernel (or ``ps``, where there is no /proc) says."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        asked = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True)
        state = asked.stdout.strip()[:1] or "X"
    return state not in "TtZX"


def _tell(news: News) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle; its end is ours
    Pulse(msgspec.json.decode(_first_line(), type=Start)).run()


def _first_line() -> bytes:
    """Byte by byte: what follows it is for `select` to see."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


if __name__ == "__main__":
    main()
