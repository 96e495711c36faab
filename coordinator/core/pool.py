"""Pools: the limits of a provider that all processes of a service keep together, as a deployer declares them.

    Coordinator([quote], pools=[Pool("planner", concurrency=20, requests_per_min=600)])

A provider without a pool has only the limit of each process (``provider_concurrency``), and costs the database nothing. How slots
are shared is in `share`, how many calls a minute may begin in `rate`.
"""

from __future__ import annotations

import msgspec

from coordinator.core.evidence import MAX_UNITS
from coordinator.core.where import declared_at
from coordinator.errors import DeclarationError

MAX_CONCURRENCY = 10_000
MAX_REQUESTS_PER_MIN = 10_000_000
MAX_LINGER_MS = 600_000
LINGERS_MS = 1_000
"""Closing the connection does not stop most providers."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None: not limited."""

    concurrency: int | None = None
    requests_per_min: int | None = None
    units_per_min: int | None = None

    @property
    def has_rate(self) -> bool:
        return self.requests_per_min is not None or self.units_per_min is not None


class Pool:
    """What the provider of this name permits, counted over all processes: calls at once, calls begun per minute, and units (tokens,
    cost, whatever it counts) per minute, as `Evidence` estimates them and its source reports them afterwards.

    Calls per minute are calls in any 60 s, as the provider counts them. ``lingers_ms``: how long a call that we gave up on (its
    deadline passed, or it was cancelled) may still keep the provider busy; its slot stays taken that long. Raises `DeclarationError`.
    """

    def __init__(
        self,
        provider: str,
        *,
        concurrency: int | None = None,
        requests_per_min: int | None = None,
        units_per_min: int | None = None,
        lingers_ms: int = LINGERS_MS,
    ) -> None:
        self.where = declared_at()
        self.provider = provider
        self.limits = Limits(
            concurrency=concurrency, requests_per_min=requests_per_min, units_per_min=units_per_min
        )
        self.lingers_ms = lingers_ms
        if self.limits == Limits():
            raise self.wrong(
                "it limits nothing: add concurrency=..., requests_per_min=... or units_per_min=..."
            )
        self._check("concurrency", concurrency, 1, MAX_CONCURRENCY)
        self._check("requests_per_min", requests_per_min, 1, MAX_REQUESTS_PER_MIN)
        self._check("units_per_min", units_per_min, 1, MAX_UNITS)
        self._check("lingers_ms", lingers_ms, 0, MAX_LINGER_MS)

    def wrong(self, message: str) -> DeclarationError:
        """The error that names this declaration's line."""
        return DeclarationError(f"pool {self.provider!r}: {message}", self.where)

    def _check(self, name: str, value: int | None, least: int, most: int) -> None:
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self.wrong(f"{name} must be within {least}..{most}, not {value!r}")
