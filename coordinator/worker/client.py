"""The coordinator over HTTP, as a worker uses it. What is worth repeating is repeated here; what is not is a `Refused`.

A registration, a report and a drain may be sent twice: the coordinator answers the second like the first. A claim that got no
answer may have been carried out; what it took comes back when its lease runs out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
import tenacity

from coordinator.core.task import TaskGiven, WorkerShown

log = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE = tenacity.wait_random_exponential(multiplier=0.1, max=5)
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""
ANSWER_S = 20.0


class Refused(Exception):
    """The coordinator says no, and would say it again. ``code`` is the problem's own."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail


class Unreachable(Exception):
    """No answer, or one that may be another the next time."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    tasks: list[TaskGiven]
    lease_ms: int
    draining: bool = False


class Client:
    """Use it as a context manager. ``key`` needs the scope ``work``."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self.key = key

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self.key}", "User-Agent": "coordinator-worker"}
        self._session = aiohttp.ClientSession(headers=headers, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def register(
        self, name: str, capabilities: list[str], max_tasks: int, incarnation: str
    ) -> WorkerShown:
        """Until it succeeds. Raises `Refused`."""
        body = {
            "name": name,
            "capabilities": capabilities,
            "max_tasks": max_tasks,
            "incarnation": incarnation,
        }
        return await self._repeated("/v1/workers", body, WorkerShown, None)

    async def claim(self, worker: str, *, limit: int, wait_s: int, incarnation: str) -> Claim:
        """Once. Raises `Refused`, `Unreachable`."""
        path = f"/v1/workers/{worker}/claim?wait={wait_s}&limit={limit}&incarnation={incarnation}"
        return await self._post(path, {}, Claim, wait_s + ANSWER_S)

    async def report(self, task: str, verb: str, body: Mapping[str, Any], *, for_s: float) -> None:
        """``verb`` is complete or fail; repeated for so long. Raises `Refused`, `Unreachable`."""
        await self._repeated(f"/v1/tasks/{task}/{verb}", body, msgspec.Raw, for_s)

    async def drain(self, worker: str, *, limit_ms: int, for_s: float) -> None:
        """Raises `Refused`, `Unreachable`."""
        await self._repeated(f"/v1/workers/{worker}/drain", {"limit_ms": limit_ms}, msgspec.Raw, for_s)

    async def _repeated(self, path: str, body: Mapping[str, Any], kind: type[T], for_s: float | None) -> T:
        def told(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            log.warning("%s%s: %s", self.url, path, error)

        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Unreachable),
            stop=tenacity.stop_never if for_s is None else tenacity.stop_after_delay(for_s),
            wait=PAUSE,
            before_sleep=told,
            reraise=True,
        )
        result: T = await attempts(self._post, path, body, kind, ANSWER_S)
        return result

    async def _post(self, path: str, body: Mapping[str, Any], kind: type[T], seconds: float) -> T:
        try:
            async with self._session.post(
                self.url + path,
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                status, text = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        if status in PASSING:
            raise Unreachable(f"status {status}")
        if status >= 400:
            raise _refused(status, text)
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise Unreachable(f"the answer is none of a coordinator's: {error}") from None


def _refused(status: int, text: bytes) -> Refused:
    try:
        problem = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        problem = {}
    return Refused(status, str(problem.get("code", status)), str(problem.get("detail", "")))


class Pause:
    """Between claims that fail: longer and longer, with jitter."""

    def __init__(self) -> None:
        self._state = tenacity.RetryCallState(tenacity.AsyncRetrying(), None, (), {})

    async def sleep(self) -> None:
        await asyncio.sleep(PAUSE(self._state))
        self._state.prepare_for_next_attempt()

    def reset(self) -> None:
        self._state.attempt_number = 1
        self._state.start_time = time.monotonic()
