"""`adapters.function.FunctionSource`: values, failures, and threads that are counted until they really return."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest

from adapters.function import FunctionSource
from coordinator.core.canonical import JsonValue, canonical, digest
from coordinator.core.evidence import Absent, Answer, Failed, Found, Part, Source, Unchanged
from coordinator.core.money import Money
from coordinator.errors import DeclarationError
from tests.adapters.asking import Capacity, Site, ask
from tests.support import eventually

VALUE = Capacity("sg-1", 40)
REVISION = digest(canonical(VALUE))


def source(function: Any, **options: Any) -> FunctionSource[Capacity]:
    return FunctionSource("capacity", function, returns=Capacity, **options)


def returning(value: object) -> Any:
    return lambda input, evidence: value


async def test_it_is_a_source_that_sees_the_input_and_what_it_comes_after() -> None:
    def capacity(input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        hours = evidence["hours"]
        assert isinstance(hours, int)
        return Capacity(input.site, hours)

    declared: Source[Capacity] = FunctionSource("capacity", capacity, returns=Capacity)
    assert await declared.read(ask(evidence={"hours": 40})) == Found(VALUE, REVISION)
    assert declared.provider == "capacity"


async def test_an_async_function_runs_on_the_loop_and_a_plain_one_does_not() -> None:
    ran_in: list[threading.Thread] = []

    async def on_the_loop(input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        ran_in.append(threading.current_thread())
        return VALUE

    def in_a_thread(input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        ran_in.append(threading.current_thread())
        return VALUE

    assert await source(on_the_loop).read(ask()) == Found(VALUE, REVISION)
    assert await source(in_a_thread).read(ask()) == Found(VALUE, REVISION)
    assert [thread is threading.current_thread() for thread in ran_in] == [True, False]
    assert ran_in[1].daemon


async def test_an_object_with_an_async_call_is_async() -> None:
    class Model:
        async def __call__(self, input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
            await asyncio.sleep(0)
            return VALUE

    assert await source(Model()).read(ask()) == Found(VALUE, REVISION)


async def test_a_plain_function_keeps_the_context_of_its_caller() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    answer = await source(lambda input, evidence: Capacity("x", variable.get())).read(ask())
    assert isinstance(answer, Found)
    assert answer.value.available_hours == 7


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        (None, Absent()),
        (Absent("3"), Absent("3")),
        (Failed("no-quota", "come back", True, 500), Failed("no-quota", "come back", True, 500)),
        (Found(VALUE), Found(VALUE, REVISION)),
        (
            Found(VALUE, "r-1", 20, Money(3, "SGD"), 0.9, (30.0, 50.0)),
            Found(VALUE, "r-1", 20, Money(3, "SGD"), 0.9, (30.0, 50.0)),
        ),
        ({"site": "sg-1", "available_hours": 40}, Found(VALUE, REVISION)),
    ],
)
async def test_what_it_returns_is_the_answer(returned: object, answer: Answer[Capacity]) -> None:
    assert await source(returning(returned)).read(ask()) == answer


class NotJson(msgspec.Struct):
    site: bytes


@pytest.mark.parametrize(
    "returned",
    [
        Capacity("x", float("nan")),
        Capacity("x", float("inf")),
        Capacity("x", 2**60),
        Capacity("a\x00b", 1),
        Capacity("\ud800", 1),
        Site("x"),
        {"site": 1},
        "text",
        object(),
        Unchanged(),
        Found(VALUE, confidence=1.5),
        Found(None),
    ],
)
async def test_what_is_no_value_of_the_declared_type_is_malformed(returned: object) -> None:
    answer = await source(returning(returned)).read(ask())
    assert isinstance(answer, Failed), answer
    assert answer.code == "malformed-response"
    assert answer.message.isprintable()


async def test_a_coroutine_from_a_plain_function_is_closed_and_refused() -> None:
    async def late() -> Capacity:
        return VALUE

    answer = await source(lambda input, evidence: late()).read(ask())
    assert isinstance(answer, Failed)
    assert answer.code == "malformed-response"


@pytest.mark.parametrize(
    "error",
    [ValueError("a\x00b"), TimeoutError("theirs"), StopIteration(), SystemExit(3), KeyboardInterrupt()],
)
async def test_what_a_plain_function_raises_is_a_failed_reading(error: BaseException) -> None:
    def broken(input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        raise error

    declared = source(broken)
    answer = await declared.read(ask())
    assert isinstance(answer, Failed)
    assert (answer.code, answer.retryable) == ("source-raised", False)
    assert answer.message.startswith(type(error).__name__)
    assert answer.message.isprintable()
    assert declared.busy_threads == 0


@pytest.mark.parametrize("error", [ValueError("\ud800"), TimeoutError("theirs")])
async def test_what_an_async_function_raises_is_a_failed_reading(error: Exception) -> None:
    async def broken(input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        raise error

    answer = await source(broken).read(ask())
    assert isinstance(answer, Failed)
    assert answer.code == "source-raised"


async def test_an_async_function_is_cancelled_when_its_time_is_over() -> None:
    cancelled = asyncio.Event()

    async def slow(input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return VALUE

    answer = await source(slow).read(ask(timeout_s=0.05))
    assert isinstance(answer, Failed)
    assert answer.code == "timed-out"
    assert cancelled.is_set()


class Hanging:
    """A plain function whose calls hang until they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.calls = 0

    def __call__(self, input: Site, evidence: Mapping[str, JsonValue]) -> Capacity:
        self.calls += 1
        assert self.let_go.wait(30)
        return VALUE


async def test_a_cancelled_reading_returns_at_once_and_its_thread_stays_counted() -> None:
    hanging = Hanging()
    declared = source(hanging, max_threads=2)
    readings = [asyncio.create_task(declared.read(ask())) for _ in range(2)]
    await eventually(lambda: hanging.calls == 2)
    for reading in readings:
        reading.cancel()
    results = await asyncio.wait_for(asyncio.gather(*readings, return_exceptions=True), 2)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    assert declared.busy_threads == 2

    refused = await asyncio.wait_for(declared.read(ask()), 2)
    assert isinstance(refused, Failed)
    assert (refused.code, refused.retryable) == ("threads-exhausted", True)
    assert hanging.calls == 2

    hanging.let_go.set()
    await eventually(lambda: declared.busy_threads == 0)
    assert await declared.read(ask()) == Found(VALUE, REVISION)


async def test_a_thread_that_outlives_its_time_stays_counted() -> None:
    hanging = Hanging()
    declared = source(hanging)
    answer = await declared.read(ask(timeout_s=0.05))
    assert isinstance(answer, Failed)
    assert answer.code == "timed-out"
    assert declared.busy_threads == 1
    hanging.let_go.set()
    await eventually(lambda: declared.busy_threads == 0)


async def test_never_more_threads_than_declared_run_at_once() -> None:
    hanging = Hanging()
    declared = source(hanging, max_threads=3)
    readings = [asyncio.create_task(declared.read(ask())) for _ in range(20)]
    await eventually(lambda: sum(reading.done() for reading in readings) == 17)
    assert declared.busy_threads == 3
    hanging.let_go.set()
    answers = await asyncio.gather(*readings)
    assert sum(isinstance(answer, Found) for answer in answers) == 3
    assert sum(isinstance(answer, Failed) and answer.code == "threads-exhausted" for answer in answers) == 17


def test_a_thread_that_outlives_its_loop_harms_nobody() -> None:
    hanging = Hanging()
    declared = source(hanging)

    async def give_up() -> None:
        await declared.read(ask(timeout_s=0.05))

    asyncio.run(give_up())
    threads = [thread for thread in threading.enumerate() if thread.name == "source capacity"]
    hanging.let_go.set()
    for thread in threads:
        thread.join(5)
    assert declared.busy_threads == 0


@pytest.mark.parametrize("options", [{"returns": dict}, {"max_threads": 0}, {"function": 3}])
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_function\.py"):
        FunctionSource("s", **{"function": returning(None), "returns": Capacity, **options})


async def streamed(function: Any, **options: Any) -> tuple[list[object], Answer[Capacity]]:
    parts: list[object] = []

    async def emit(value: object) -> None:
        parts.append(value)

    return parts, await source(function, **options).read(ask(emit=emit, timeout_s=1))


async def test_a_generators_parts_are_streamed_and_what_it_yields_at_last_is_the_answer() -> None:
    closed = asyncio.Event()

    async def generate(input: Site, evidence: Mapping[str, JsonValue]) -> AsyncIterator[Part[str] | Capacity]:
        try:
            yield Part("sg")
            yield Part("-1")
            yield VALUE
            raise AssertionError("nobody asks for more")
        finally:
            closed.set()

    assert await streamed(generate) == (["sg", "-1"], Found(VALUE, REVISION))
    assert closed.is_set()


async def test_a_generator_that_yields_no_answer_found_nothing_and_one_that_raises_failed() -> None:
    async def nothing(input: Site, evidence: Mapping[str, JsonValue]) -> AsyncIterator[Part[str]]:
        yield Part("well")

    async def breaking(input: Site, evidence: Mapping[str, JsonValue]) -> AsyncIterator[Part[str]]:
        yield Part("well")
        raise RuntimeError("no")

    assert await streamed(nothing) == (["well"], Absent())
    assert (await streamed(breaking))[1] == Failed("source-raised", "RuntimeError: no")


async def test_a_generator_that_stalls_is_closed() -> None:
    closed = asyncio.Event()

    async def stalling(input: Site, evidence: Mapping[str, JsonValue]) -> AsyncIterator[Part[str]]:
        try:
            yield Part("well")
            await asyncio.Event().wait()
        finally:
            closed.set()

    parts, answer = await streamed(stalling, stall_ms=20)
    assert parts == ["well"]
    assert isinstance(answer, Failed)
    assert answer.code == "stalled"
    assert closed.is_set()
    assert (await streamed(stalling))[1] == Failed("timed-out", "no answer within 1.000 s")


def test_only_a_generator_can_stall() -> None:
    with pytest.raises(DeclarationError, match="stall_ms"):
        source(returning(VALUE), stall_ms=10)
