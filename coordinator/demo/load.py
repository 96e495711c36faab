"""What the providers count of the calls they get, as a provider that has limits would: calls at once, and calls in any 60 seconds.

A call counts from its arrival until its answer is ready, whether its caller still waits for it or not. Calls are counted by route, the
first part of the path; effects by name (`effects/NAME`), their look-ups included.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MINUTE_S = 60.0


class Counted:
    """The calls of one route."""

    def __init__(self) -> None:
        self.calls = self.now = self.most_at_once = self.most_per_minute = 0
        self._arrived: deque[float] = deque()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call."""
        arrived = time.monotonic()
        self._arrived.append(arrived)
        while self._arrived[0] <= arrived - MINUTE_S:
            self._arrived.popleft()
        self.calls += 1
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        self.most_per_minute = max(self.most_per_minute, len(self._arrived))
        try:
            yield
        finally:
            self.now -= 1

    def forget(self) -> None:
        """Count anew, from what is under way."""
        self.calls = self.most_per_minute = 0
        self.most_at_once = self.now
        self._arrived.clear()


class Load:
    """All routes."""

    def __init__(self) -> None:
        self._routes: dict[str, Counted] = {}

    def of(self, route: str, rest: str) -> Counted:
        name = f"{route}/{rest.partition('/')[0]}" if route == "effects" else route
        counted = self._routes.get(name)
        if counted is None:
            counted = self._routes[name] = Counted()
        return counted

    def forget(self) -> None:
        for counted in self._routes.values():
            counted.forget()

    def items(self) -> list[dict[str, Any]]:
        return [
            {
                "route": name,
                "calls": counted.calls,
                "concurrent_now": counted.now,
                "concurrent_max": counted.most_at_once,
                "per_minute_max": counted.most_per_minute,
            }
            for name, counted in sorted(self._routes.items())
        ]
