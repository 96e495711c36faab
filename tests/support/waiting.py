"""Waiting for a condition with a bound, never for a time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import anyio

T = TypeVar("T")


@overload
async def eventually(
    predicate: Callable[[], Awaitable[T | None]],
    timeout: float = ...,
    *,
    interval: float = ...,
    what: str = ...,
) -> T: ...
@overload
async def eventually(
    predicate: Callable[[], T | None], timeout: float = ..., *, interval: float = ..., what: str = ...
) -> T: ...
async def eventually(
    predicate: Callable[[], object],
    timeout: float = 10.0,
    *,
    interval: float = 0.01,
    what: str = "",
) -> object:
    """Polls until `predicate` (plain or async) returns something true, and returns that; fails after `timeout` seconds.

    An AssertionError inside the predicate counts as "not yet", and is shown if the time runs out.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            value = predicate()
            result = await value if inspect.isawaitable(value) else value
            if result:
                return result
            last = result
        except AssertionError as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout} s: {what or inspect.getsource(predicate).strip()}; last: {last!r}"
            )
        await anyio.sleep(interval)


def eventually_now(
    predicate: Callable[[], T], timeout: float = 10.0, *, interval: float = 0.01, what: str = ""
) -> T:
    """The same for tests without an event loop."""
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout} s: {what or inspect.getsource(predicate).strip()}; last: {result!r}"
            )
        time.sleep(interval)
    return result
