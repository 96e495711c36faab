"""Evidence from a Python function: a rule engine, a model in this process, a client library of the provider's.

An async generator streams: each `Part` that it yields goes to those who follow the decision, and what it yields at last is the answer.

    async def summarise(input: Ask, evidence: Mapping[str, JsonValue]) -> AsyncIterator[Part[str] | Summary]:
        text = ""
        async for piece in model.stream(input.question):
            text += piece
            yield Part(piece)
        yield Summary(text)

Protocol of the threads: a plain function runs in a thread of its own, which is counted before it starts and until it really
returns. Cancelling the reading gives up on the thread at once, but a thread can't be stopped: it stays counted, so a function
that hangs uses up its own ``max_threads`` and nothing else. With none free a reading fails at once rather than wait unseen. The
threads are daemons: one that hangs does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from adapters.declare import declared_at
from coordinator.core.canonical import InvalidJson, JsonValue, canonical, digest, parse
from coordinator.core.evidence import Absent, Answer, Failed, Found, Part, ReadRequest, clean_text, is_struct
from coordinator.errors import DeclarationError

T = TypeVar("T")

Returned: TypeAlias = "T | Found[T] | Absent | Failed | None"
Streamed: TypeAlias = "AsyncIterator[Part[Any] | Returned[T]]"
Function: TypeAlias = (
    "Callable[[Any, Mapping[str, JsonValue]], Returned[T] | Awaitable[Returned[T]] | Streamed[T]]"
)
"""Any: the first parameter is whatever request type the decision declares."""


class FunctionSource(Generic[T]):
    """``function(input, evidence)`` returns the struct, or `Found`, `Absent` or `Failed` to say more; None means absent.

    ``evidence`` holds the values, as JSON, of what the evidence was declared to come ``after``. What it raises becomes a `Failed`
    with the code ``source-raised``. A value without a revision gets the digest of its canonical bytes. ``max_threads`` bounds
    the running calls of a plain function, per process; ``stall_ms`` how long a generator may yield nothing. Raises
    `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        function: Function[T],
        *,
        returns: type[T],
        provider: str | None = None,
        max_threads: int = 8,
        stall_ms: int | None = None,
    ) -> None:
        where, what = declared_at(), f"source {name!r}"
        if not is_struct(returns):
            raise DeclarationError(f"{what} returns {returns!r}; it must be a msgspec.Struct", where)
        if not callable(function):
            raise DeclarationError(f"{what}: {function!r} is not a function", where)
        if not 1 <= max_threads <= 1_024:
            raise DeclarationError(f"{what}: max_threads must be within 1..1024", where)
        self._streams = inspect.isasyncgenfunction(function)
        if stall_ms is not None and (stall_ms < 1 or not self._streams):
            raise DeclarationError(f"{what}: stall_ms is for an async generator, and positive", where)
        self._stall_s = None if stall_ms is None else stall_ms / 1000
        self.name = name
        self.provider = provider or name
        self.returns = returns
        self.max_threads = max_threads
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ counts as async
        )
        self._busy = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FunctionSource({self.name!r}, provider={self.provider!r})"

    @property
    def busy_threads(self) -> int:
        """Threads that have not returned yet, abandoned ones included."""
        return self._busy

    async def read(self, request: ReadRequest) -> Answer[T]:
        """Within ``request.timeout_s``. Cancelling it cancels an async function and abandons a plain one."""
        limit = asyncio.timeout(request.timeout_s)
        try:
            async with limit:
                if self._streams:
                    return await self._streamed(request)
                if not self._is_async:
                    return await self._in_thread(request)
                return self._answer(await _awaited(self._function(request.input, request.evidence)))
        except Exception as error:  # noqa: BLE001 - the declarer's own code; what it raised is the answer
            if isinstance(error, TimeoutError) and limit.expired():
                return Failed("timed-out", f"no answer within {request.timeout_s:.3f} s")
            return _raised(error)

    async def _streamed(self, request: ReadRequest) -> Answer[T]:
        """Whatever is no part ends it."""
        pieces: AsyncGenerator[object, None] = self._function(request.input, request.evidence)  # type: ignore[assignment]  # checked
        async with aclosing(pieces):
            while True:
                stall = asyncio.timeout(self._stall_s)
                try:
                    async with stall:
                        piece = await anext(pieces, None)
                except TimeoutError:
                    if stall.expired():
                        return Failed("stalled", f"nothing for {self._stall_s} s", retryable=True)
                    raise
                if not isinstance(piece, Part):
                    return self._answer(piece)
                await request.emit(piece.value)

    async def _in_thread(self, request: ReadRequest) -> Answer[T]:
        with self._lock:
            if self._busy >= self.max_threads:
                return Failed("threads-exhausted", f"all {self.max_threads} threads are busy", retryable=True)
            self._busy += 1
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer[T]] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                answer = context.run(self._call, request)
            finally:
                with self._lock:
                    self._busy -= 1
            _deliver(loop, answered, answer)

        try:
            threading.Thread(target=run, name=f"source {self.name}", daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                self._busy -= 1
            return Failed("threads-exhausted", clean_text(str(error)), retryable=True)
        return await answered

    def _call(self, request: ReadRequest) -> Answer[T]:
        try:
            return self._answer(self._function(request.input, request.evidence))
        except BaseException as error:  # noqa: BLE001 - the end of a thread: also SystemExit has nowhere else to go
            return _raised(error)

    def _answer(self, returned: object) -> Answer[T]:
        match returned:
            case None:
                return Absent()
            case Absent() | Failed():
                return returned
            case Found(value=value):
                found = returned
            case value:
                found = Found(value)
        if inspect.iscoroutine(value):
            value.close()
        try:
            encoded = canonical(value)
            typed = msgspec.convert(parse(encoded), self.returns)
        except (TypeError, ValueError, InvalidJson) as error:
            return Failed("malformed-response", clean_text(f"not a {self.returns.__name__}: {error}"))
        if found.confidence is not None and not 0 <= found.confidence <= 1:
            return Failed("malformed-response", "the confidence is not within 0..1")
        return Found(
            typed,
            found.revision or digest(encoded),
            found.age_ms,
            found.cost,
            found.confidence,
            found.interval,
            found.units,
        )


async def _awaited(returned: object) -> object:
    return await returned if isinstance(returned, Awaitable) else returned


def _raised(error: BaseException) -> Failed:
    return Failed("source-raised", clean_text(f"{type(error).__name__}: {error}"))


def _deliver(loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[T], answer: T) -> None:
    """Hand an answer to a loop that may be closed by now, and a future that may be cancelled."""

    def arrive() -> None:
        if not waiting.done():
            waiting.set_result(answer)

    try:
        loop.call_soon_threadsafe(arrive)
    except RuntimeError:
        return
