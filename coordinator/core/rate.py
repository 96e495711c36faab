"""How many calls may begin per minute: strict in every 60 seconds as the provider counts them, whoever asks and whenever.

What was granted is kept by the second for 62 seconds, and a grant fits only while all of them together stay within the limit. A
grant may arrive at the provider up to `ARRIVES_WITHIN_S` after it was made. Why 62: take any 60 s at the provider and the last grant
that arrived in them, made at t. All others that arrived in them were made after t - 61, so their seconds are among the newest 62 at
t, and the sum at t was within the limit. So at least 60/62 of the limit can be used.

Within that, a minute's grants are not all gone in its first seconds: a quarter may go at once, the rest at the rate at which the
window frees them, so that who comes late in a busy minute still finds something. While the window is full no more is saved up than
one call needs.

What was granted and certainly not used is given back; units that turn out to be more than was estimated delay those that follow.
Pure: time is an argument, in seconds of one clock; if that runs backwards, it is taken to stand still.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from coordinator.core.pool import Limits

ARRIVES_WITHIN_S = 1.0
KEPT_S = 62
AT_ONCE = 4
"""The part of a minute that may go at once is 1 / this."""


class Window(msgspec.Struct):
    """``used`` by second, the newest first, which is ``second``. ``level`` may go at once, as of ``at``; None: nothing went yet.
    ``largest``: what one call ever took."""

    second: int = 0
    at: float = 0.0
    used: list[int] = msgspec.field(default_factory=list)
    level: float | None = None
    largest: int = 0

    def advance(self, now: float, limit: int) -> None:
        """Let time pass. To be called before anything else is asked."""
        now = max(now, self.at)
        passed = int(now) - self.second
        self.used = [0] * min(passed, KEPT_S) + self.used[: max(0, KEPT_S - passed)]
        most, gained = burst(limit), (now - self.at) * limit / KEPT_S
        level = most if self.level is None else self.level + gained
        self.level = min(level, most, max(self.largest, self.left(limit)))
        self.second, self.at = int(now), now

    def left(self, limit: int) -> int:
        """Negative while there is a debt."""
        return limit - sum(self.used)

    def fits(self, amount: int, limit: int) -> bool:
        return amount <= self.left(limit) and (self.level or 0) >= min(amount, burst(limit))

    def take(self, amount: int) -> None:
        self.used[0] += amount
        self.level = (self.level or 0) - amount
        self.largest = max(self.largest, amount)

    def correct(self, second: int, amount: int) -> None:
        """``amount`` more was used than was granted in ``second``; if it is negative, less was: then it counts no longer."""
        if amount >= 0:
            self.used[0] += amount
        elif 0 <= self.second - second < len(self.used):
            freed = min(-amount, self.used[self.second - second])
            self.used[self.second - second] -= freed
            self.level = (self.level or 0) + freed

    def wait_s(self, amount: int, limit: int) -> float:
        """When ``amount`` fits at the earliest, nobody else taking it; infinity if it never does."""
        if amount > limit:
            return math.inf
        paced = (min(amount, burst(limit)) - (self.level or 0)) * KEPT_S / limit
        return max(0.0, paced, self._frees_in_s(amount - self.left(limit)))

    def _frees_in_s(self, lacking: int) -> float:
        for age in range(len(self.used) - 1, -1, -1):
            if lacking <= 0:
                break
            lacking -= self.used[age]
            if lacking <= 0:
                return self.second + KEPT_S - age - self.at
        return 0.0

    def resets_in_s(self) -> float:
        """When all of it is there again, if nothing more is taken."""
        newest = next((age for age, used in enumerate(self.used) if used), None)
        return 0.0 if newest is None else self.second + KEPT_S - newest - self.at


def burst(limit: int) -> int:
    """How much may go at once."""
    return math.ceil(limit / AT_ONCE)


class Correction(msgspec.Struct, frozen=True):
    """Of what was granted in ``second``: so many requests and units more (or, if negative, fewer) were used."""

    second: int
    requests: int = 0
    units: int = 0


class Granted(msgspec.Struct, frozen=True):
    """The first ``count`` of the calls may begin. ``wait_s`` until the next may at the earliest; 0 if all may begin."""

    count: int
    second: int
    wait_s: float


class Rates(msgspec.Struct):
    """Requests and units of one provider. A call begins only when both have room for it."""

    requests: Window = msgspec.field(default_factory=Window)
    units: Window = msgspec.field(default_factory=Window)

    def claim(
        self, limits: Limits, now: float, calls: Sequence[int], corrections: Sequence[Correction] = ()
    ) -> Granted:
        """``calls`` are the units that each waiting call is estimated to use, in the order in which they wait."""
        windows = self._advanced(limits, now)
        for each in corrections:
            self.requests.correct(each.second, each.requests)
            self.units.correct(each.second, each.units)
        for count, units in enumerate(calls):
            amounts = [(window, limit, (1, units)[unit]) for unit, (window, limit) in windows.items()]
            if not all(window.fits(amount, limit) for window, limit, amount in amounts):
                wait_s = max(window.wait_s(amount, limit) for window, limit, amount in amounts)
                return Granted(count, self.requests.second, wait_s)
            for window, _, amount in amounts:
                window.take(amount)
        return Granted(len(calls), self.requests.second, 0.0)

    def _advanced(self, limits: Limits, now: float) -> dict[int, tuple[Window, int]]:
        """The windows that have a limit: 0 for requests, 1 for units."""
        windows: dict[int, tuple[Window, int]] = {}
        for unit, (window, limit) in enumerate(
            ((self.requests, limits.requests_per_min), (self.units, limits.units_per_min))
        ):
            window.advance(now, limit or 1)
            if limit is not None:
                windows[unit] = window, limit
        return windows
