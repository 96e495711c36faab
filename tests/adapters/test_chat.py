"""`adapters.chat.ChatSource`: what it asks, what it makes of a streamed answer, and of everything that can go wrong with one."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any, Literal

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from adapters.chat import ChatSource
from adapters.completion import Completion, Prices, Usage
from adapters.schema import strict_schema
from coordinator import money
from coordinator.core.evidence import Answer, Failed, Found, Source, Unchanged
from coordinator.core.money import Money
from coordinator.core.sse import Parser
from coordinator.errors import DeclarationError
from tests.adapters.asking import TRACE, Site, ask
from tests.adapters.models import answer, chunk, cut, encoded, model, until_gone, usage
from tests.adapters.servers import hear, unused_port, wire_server
from tests.support import eventually

SECRET = "sk-very-secret-0123456789"
PRICES = (money("1.50 USD"), money("6.00 USD"))
COST = Money(1, "USD")
"""1,000 tokens at 150 cents and 500 at 600 cents a million are 0.45 cents, rounded up."""


class Place(msgspec.Struct, frozen=True):
    city: str
    country: str = "SG"


class Tone(msgspec.Struct, frozen=True):
    mood: Literal["calm", "angry"]
    reasons: list[str]
    place: Place | None = None


TEXT = '{"mood":"angry","reasons":["späte Lieferung ☹","no reply"],"place":{"city":"Zürich","country":"CH"}}'
VALUE = Tone("angry", ["späte Lieferung ☹", "no reply"], Place("Zürich", "CH"))


def source(url: str, **options: Any) -> ChatSource[Tone]:
    settings: dict[str, Any] = {"prompt": "How does {input.site} sound?", "prices": PRICES, "stall_ms": 2_000}
    return ChatSource("tone", base_url=url, model="m-1", returns=Tone, **{**settings, **options})


async def read(said: Any, **options: Any) -> Answer[Tone]:
    async with model(said) as there:
        return await source(there.url, **options).read(ask())


def failure(answered: Answer[Tone]) -> Failed:
    assert isinstance(answered, Failed), answered
    return answered


async def test_it_is_a_source_that_asks_for_structured_output_and_decodes_it() -> None:
    async with model(answer(TEXT)) as there:
        declared: Source[Tone] = source(there.url, system="Be brief.", max_tokens=200, options={"seed": 7})
        found = await declared.read(ask())
    assert isinstance(found, Found)
    assert (found.value, found.cost, found.units) == (VALUE, COST, 1_500)
    [asked] = there.asked
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How does sg-1 sound?"},
    ]
    assert (asked["model"], asked["max_tokens"], asked["seed"], asked["stream"]) == ("m-1", 200, 7, True)
    assert asked["stream_options"] == {"include_usage": True}
    assert asked["response_format"]["json_schema"]["schema"] == strict_schema(Tone)
    assert there.headers[0]["traceparent"] == TRACE
    assert "Authorization" not in there.headers[0]


async def test_pieces_of_the_text_are_streamed_as_they_come() -> None:
    received: list[Any] = []
    arrived = asyncio.Event()

    async def emit(value: object) -> None:
        received.append(value)
        arrived.set()

    async def say(response: web.StreamResponse) -> None:
        for one in answer(TEXT):
            await response.write(encoded(one))
            if isinstance(one, dict) and one["choices"] and one["choices"][0]["delta"].get("content"):
                await asyncio.wait_for(arrived.wait(), 5)  # not before this piece was passed on
                arrived.clear()

    async with model(say) as there:
        found = await source(there.url).read(ask(emit=emit))
    assert isinstance(found, Found)
    assert "".join(part["text"] for part in received) == TEXT
    assert len(received) > 10


async def test_while_nobody_has_room_for_a_piece_nothing_more_is_read() -> None:
    """The model is held back by TCP: what it has written stays far below what it has to say."""
    written = 0
    room = asyncio.Event()

    async def say(response: web.StreamResponse) -> None:
        nonlocal written
        await response.write(encoded(chunk('{"mood":"calm","reasons":["')))
        for _ in range(200):
            await response.write(encoded(chunk("x" * 65_536)))
            written += 1
        await response.write(encoded(chunk('"]}'), chunk(None, "stop"), usage(), "[DONE]"))

    async def emit(value: object) -> None:
        await room.wait()

    async with model(say) as there:
        reading = asyncio.create_task(source(there.url, max_bytes=2**25).read(ask(emit=emit, timeout_s=20)))
        seen: list[int] = []
        await eventually(lambda: seen.append(written) or (len(seen) > 30 and len(set(seen[-20:])) == 1))
        assert 0 < written < 150
        room.set()
        assert isinstance(await reading, Found)


async def test_the_key_comes_from_the_environment_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with model(answer(TEXT)) as there:
        declared = source(there.url, api_key_env="MODEL_KEY")
        monkeypatch.delenv("MODEL_KEY", raising=False)
        assert failure(await declared.read(ask())) == Failed(
            "no-credentials", "MODEL_KEY holds no API key", cost=Money(0, "USD"), units=0
        )
        monkeypatch.setenv("MODEL_KEY", SECRET)
        assert isinstance(await declared.read(ask()), Found)
        monkeypatch.setenv("MODEL_KEY", f"{SECRET}\n")
        broken = failure(await declared.read(ask()))
    assert there.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert broken.code == "no-credentials"
    assert SECRET not in f"{broken} {declared!r} {vars(declared)}"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500])
async def test_the_key_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MODEL_KEY", SECRET)
    echo = {"error": {"message": f"Incorrect API key provided: {SECRET}, see our pages"}}
    failed = failure(await read(web.json_response(echo, status=status), api_key_env="MODEL_KEY"))
    assert str(status) in failed.message
    assert SECRET not in failed.message
    assert SECRET not in caplog.text


async def test_the_revision_is_the_model_and_everything_it_was_asked() -> None:
    async with model(answer(TEXT)) as there:
        declared = source(there.url)
        first, second = await declared.read(ask()), await declared.read(ask())
        assert isinstance(first, Found)
        assert first == second
        assert first.revision is not None
        assert first.revision.startswith("m-1@sha256:")
        others = [
            await source(there.url, system="Be kind.").read(ask()),
            await source(there.url, max_tokens=5).read(ask()),
            await declared.read(ask(Site("my-1"))),
        ]
    revisions = [other.revision for other in others if isinstance(other, Found)]
    assert len({first.revision, *revisions}) == 4


async def test_the_same_question_need_not_be_asked_again_to_know_that_its_answer_stands() -> None:
    async with model(answer(TEXT)) as there:
        declared = source(there.url)
        found = await declared.read(ask())
        assert isinstance(found, Found)
        assert await declared.read(ask(if_revision=found.revision)) == Unchanged(
            cost=Money(0, "USD"), units=0
        )
        assert len(there.asked) == 1
        assert isinstance(await declared.read(ask(Site("my-1"), if_revision=found.revision)), Found)


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        ("length", "cut-by-length"),
        ("content_filter", "content-filtered"),
        ("tool_calls", "unexpected-tool-calls"),
        ("function_call", "unexpected-tool-calls"),
        ("surprise", "unexpected-finish"),
    ],
)
async def test_another_end_than_stop_is_a_failure_that_was_paid_for(finish: str, code: str) -> None:
    failed = failure(await read(answer(TEXT, finish)))
    assert (failed.code, failed.retryable, failed.cost, failed.units) == (code, False, COST, 1_500)


async def test_a_refusal_and_a_call_of_a_tool_are_failures_that_were_paid_for() -> None:
    refused = [chunk(refusal="I can't "), chunk(refusal="do that"), chunk(None, "stop"), usage(), "[DONE]"]
    called = [chunk(tool_calls=[{"index": 0}]), chunk(None, "stop"), usage(), "[DONE]"]
    assert failure(await read(refused)) == Failed("model-refused", "I can't do that", cost=COST, units=1_500)
    assert failure(await read(called)).code == "unexpected-tool-calls"
    assert failure(await read(called)).cost == COST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure! Here it is",
        '{"mood":"angry"}',
        '{"mood":"sad","reasons":[]}',
        '{"mood":"calm","mood":"angry","reasons":[]}',
        f"```json\n{TEXT}\n```",
        '{"mood":"calm","reasons":[NaN]}',
    ],
)
async def test_text_that_is_not_the_declared_type_is_a_failure_that_was_paid_for(text: str) -> None:
    failed = failure(await read(answer(text)))
    assert (failed.code, failed.retryable, failed.cost) == ("malformed-response", True, COST)


async def test_a_stream_that_is_cut_in_the_middle_of_a_token_is_a_failure_whose_cost_nobody_knows() -> None:
    whole = encoded(*answer(TEXT))

    async def say(response: web.StreamResponse) -> None:
        await response.write(whole[: whole.index("ä".encode()) + 1])  # half a character
        cut(response)
        await asyncio.Event().wait()

    failed = failure(await read(say))
    assert (failed.code, failed.retryable, failed.cost, failed.units) == ("cut-off", True, None, None)


async def test_a_stream_that_just_ends_too_early_is_a_failure() -> None:
    assert failure(await read(answer(TEXT)[:5])).code == "cut-off"
    assert failure(await read([])).code == "cut-off"
    assert failure(await read(["[DONE]"])).code == "cut-off"


async def test_a_whole_answer_whose_usage_was_cut_off_is_found_at_an_unknown_cost() -> None:
    async def say(response: web.StreamResponse) -> None:
        await response.write(encoded(*answer(TEXT)[:-2]))
        cut(response)
        await asyncio.Event().wait()

    found = await read(say)
    assert isinstance(found, Found)
    assert (found.value, found.cost, found.units) == (VALUE, None, None)


async def test_a_server_that_sends_no_end_mark_is_understood() -> None:
    found = await read(answer(TEXT)[:-1])
    assert isinstance(found, Found)
    assert found.cost == COST


async def test_a_stream_that_stalls_is_given_up_and_its_connection_closed() -> None:
    async def say(response: web.StreamResponse) -> None:
        await response.write(encoded(*answer(TEXT)[:4]))
        await until_gone(response)

    async with model(say) as there:
        failed = failure(await source(there.url, stall_ms=30).read(ask()))
        assert (failed.code, failed.retryable, failed.cost) == ("stalled", True, None)
        await asyncio.wait_for(there.gone.wait(), 5)


async def test_a_stream_that_trickles_for_ever_ends_with_the_deadline() -> None:
    async def say(response: web.StreamResponse) -> None:
        while True:
            await response.write(encoded(chunk("x")) + b": still here\n\n")
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)

    async with model(say) as there:
        failed = failure(await source(there.url).read(ask(timeout_s=0.3)))
        assert failed.code == "timed-out"
        await asyncio.wait_for(there.gone.wait(), 5)


async def test_cancelling_closes_the_connection() -> None:
    begun = asyncio.Event()

    async def emit(value: object) -> None:
        begun.set()

    async def say(response: web.StreamResponse) -> None:
        await response.write(encoded(chunk("x")))
        await until_gone(response)

    async with model(say) as there:
        reading = asyncio.create_task(source(there.url).read(ask(emit=emit)))
        await begun.wait()
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        await asyncio.wait_for(there.gone.wait(), 5)


@pytest.mark.parametrize(
    "junk",
    ["{", "[]", "null", '{"choices": 3}', '{"choices":[{"delta":{"content":5}}]}', '{"usage":{"prompt_tokens":"x"}}', "�"],
)  # fmt: skip
async def test_a_chunk_that_makes_no_sense_is_a_failure(junk: str) -> None:
    failed = failure(await read([*answer(TEXT)[:4], junk, *answer(TEXT)[4:]]))
    assert (failed.code, failed.retryable, failed.cost) == ("malformed-chunk", True, None)


async def test_members_that_nobody_declared_are_no_matter() -> None:
    extra = {**chunk(TEXT), "system_fingerprint": "f", "x": [{}]}
    extra["choices"][0]["logprobs"] = None
    found = await read(
        [extra, chunk(None, "stop"), {"choices": [], "usage": {"prompt_tokens": 1, "more": {}}}]
    )
    assert isinstance(found, Found)


async def test_an_error_within_the_stream_is_a_failure() -> None:
    failed = failure(await read([chunk("{"), json.dumps({"error": {"message": SECRET, "code": 500}})]))
    assert (failed.code, failed.retryable) == ("provider-error", True)
    assert SECRET not in failed.message


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "7"}),
         Failed("provider-busy", "429: slow down", retryable=True, retry_after_ms=7_000, cost=Money(0, "USD"), units=0)),
        (web.Response(status=429), Failed("provider-busy", "429", retryable=True, cost=Money(0, "USD"), units=0)),
        (web.json_response({"error": "loading"}, status=503),
         Failed("provider-busy", "503: loading", retryable=True, cost=Money(0, "USD"), units=0)),
        (web.Response(status=502, text="<html>"), Failed("provider-error", "502", retryable=True)),
        (web.json_response({"error": {"message": "no such model"}}, status=404),
         Failed("provider-refused", "404: no such model", cost=Money(0, "USD"), units=0)),
        (web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
         Failed("unexpected-status", "302", cost=Money(0, "USD"), units=0)),
    ],
)  # fmt: skip
async def test_a_status_that_is_no_answer(response: web.Response, expected: Failed) -> None:
    assert await read(response) == expected


async def test_an_answer_that_is_no_stream_is_a_failure() -> None:
    assert failure(await read(web.json_response({"choices": []}))).code == "wrong-content-type"


async def test_a_stream_without_end_is_not_collected() -> None:
    async def say(response: web.StreamResponse) -> None:
        while True:
            await response.write(b"data: " + b"x" * 65_536)

    async with model(say) as there:
        failed = failure(await source(there.url, max_bytes=200_000).read(ask()))
        assert failed.code == "response-too-large"
        await asyncio.wait_for(there.gone.wait(), 5)
    big = failure(await read([chunk("x" * 300), *answer(TEXT)], max_bytes=1_000))
    assert big.code == "response-too-large"


async def test_nobody_listening_and_a_connection_that_is_dropped() -> None:
    failed = failure(await source(f"http://127.0.0.1:{await unused_port()}/v1").read(ask()))
    assert (failed.code, failed.retryable, failed.cost) == ("unreachable", True, Money(0, "USD"))

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hear(reader)

    async with wire_server(drop) as url:
        failed = failure(await source(f"{url}/v1").read(ask()))
    assert (failed.code, failed.retryable, failed.cost) == ("connection-lost", True, None)


async def test_a_prompt_without_its_value_asks_nothing() -> None:
    async with model(answer(TEXT)) as there:
        failed = failure(await source(there.url, prompt="{input.nothing}").read(ask()))
        raising = failure(await source(there.url, prompt=lambda request: 1 / 0).read(ask()))
    assert (failed.code, failed.cost) == ("no-prompt", Money(0, "USD"))
    assert (raising.code, raising.cost) == ("source-raised", Money(0, "USD"))
    assert there.asked == []


async def test_a_prompt_may_be_a_function_that_gives_all_messages() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    async with model(answer(TEXT)) as there:
        assert isinstance(await source(there.url, prompt=lambda request: messages).read(ask()), Found)
    assert there.asked[0]["messages"] == messages


async def test_a_server_without_schemas_is_asked_for_some_json_and_checked_all_the_same() -> None:
    async with model(answer('{"mood":"odd","reasons":[]}')) as there:
        failed = failure(await source(there.url, response_format="json_object").read(ask()))
    assert there.asked[0]["response_format"] == {"type": "json_object"}
    assert failed.code == "malformed-response"


async def test_without_prices_nothing_is_said_of_the_cost() -> None:
    found = await read(answer(TEXT), prices=None)
    assert isinstance(found, Found)
    assert (found.cost, found.units) == (None, 1_500)


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "ftp://x"}, {"base_url": "http://{input.host}/v1"}, {"prompt": "{nothing}"}, {"max_tokens": 0}, {"stall_ms": 0},
        {"returns": dict}, {"returns": Tone | Place}, {"prices": (money("1 USD"), money("1 EUR"))},
        {"prices": (money("-1 USD"), money("1 USD"))}, {"headers": {"Authorization": "x"}},
    ],
)  # fmt: skip
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_chat\.py"):
        ChatSource(
            "s", **{"base_url": "http://x/v1", "model": "m", "returns": Tone, "prompt": "p", **options}
        )


def test_a_cost_is_rounded_up_once() -> None:
    prices = Prices(*PRICES)
    assert prices.of(Usage(0, 0)) == Money(0, "USD")
    assert prices.of(Usage(1, 0)) == Money(1, "USD")
    assert prices.of(Usage(1_000_000, 1_000_000)) == Money(750, "USD")


def test_a_schema_is_one_object_whose_members_are_all_required() -> None:
    schema = strict_schema(Tone)
    assert schema["type"] == "object"
    assert schema["required"] == ["mood", "reasons", "place"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Place"]["required"] == ["city", "country"]
    assert schema["$defs"]["Place"]["additionalProperties"] is False
    assert "default" not in json.dumps(schema)


@given(st.lists(st.integers(0, 2_000), max_size=40))
def test_an_answer_is_the_same_wherever_its_stream_was_cut(places: list[int]) -> None:
    stream = encoded(*answer(TEXT, step=3))
    edges = [0, *sorted(place % len(stream) for place in places), len(stream)]
    parser, completion = Parser(), Completion()
    said = [
        completion.take([frame.data for frame in parser.feed(stream[first:last])])
        for first, last in itertools.pairwise(edges)
    ]
    assert "".join(said) == completion.text == TEXT
    assert completion.failure() is None
    assert completion.usage == Usage(1_000, 500)


@given(st.binary(max_size=300))
def test_no_stream_at_all_makes_it_raise(junk: bytes) -> None:
    completion = Completion()
    completion.take([frame.data for frame in Parser().feed(b"data: " + junk + b"\n\n")])
    assert completion.failure() is not None
