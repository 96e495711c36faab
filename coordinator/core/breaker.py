"""A circuit breaker: when a provider fails again and again, stop asking for a while, then let one call try.

    closed     calls pass; `threshold` failures in a row open it
    open       no call passes until the pause is over
    half-open  one call passes; its success closes the breaker, its failure opens it for twice as long, up to `longest_ms`

Pure: time is an argument, in ms of any clock that only goes forward. (M. Nygard, *Release It!*, 2007.)
"""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


class Breaker:
    """One per provider and process."""

    def __init__(self, *, threshold: int = 5, pause_ms: int = 2_000, longest_ms: int = 60_000) -> None:
        self._threshold = threshold
        self._first_pause_ms = pause_ms
        self._longest_ms = longest_ms
        self._pause_ms = pause_ms
        self._failures = 0
        self._opened_at: int | None = None
        self._probing = False

    def state(self, now_ms: int) -> BreakerState:
        if self._opened_at is None:
            return "closed"
        return "half-open" if now_ms >= self._opened_at + self._pause_ms else "open"

    def wait_ms(self, now_ms: int) -> int:
        """0 if a call may pass now, which then has to be followed by `succeeded`, `failed` or `dropped`; else how long to wait."""
        if self._opened_at is None:
            return 0
        left = self._opened_at + self._pause_ms - now_ms
        if left > 0:
            return left
        if self._probing:
            return self._first_pause_ms
        self._probing = True
        return 0

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_at = None
        self._probing = False
        self._pause_ms = self._first_pause_ms

    def failed(self, now_ms: int) -> None:
        self._failures += 1
        if self._probing:
            self._pause_ms = min(self._longest_ms, 2 * self._pause_ms)
        if self._probing or self._failures >= self._threshold:
            self._opened_at = now_ms
        self._probing = False

    def dropped(self) -> None:
        """The call ended without saying anything of the provider."""
        self._probing = False
