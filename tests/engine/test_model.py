"""A decision that asks a model: its words are streamed, its answer is typed evidence, and what it used is settled."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import anyio
import msgspec
from aiohttp import web

from adapters.chat import ChatSource
from coordinator import Commit, Evidence, Packet, Record, money
from coordinator.core.outcome import Outcome
from tests.adapters.models import answer, chunk, encoded, model
from tests.engine.harness import Ask, running, service_of


class Tone(msgspec.Struct, frozen=True):
    mood: str


def asking(url: str) -> Any:
    source = ChatSource(
        "tone",
        base_url=url,
        model="m-1",
        returns=Tone,
        prompt="How is {input.value}?",
        prices=(money("10.00 SGD"), money("20.00 SGD")),
    )
    tone = Evidence("tone", source, deadline_ms=20_000, reserves=money("0.40 SGD"), attempts=2)

    def policy(ask: Ask, packet: Packet, record: Record[Any]) -> Outcome:
        return Commit({"mood": packet[tone].mood})

    return service_of(tone, policy=policy)


async def test_a_models_words_are_followed_and_its_tokens_are_settled(database_url: str) -> None:
    seen = asyncio.Event()

    async def say(response: web.StreamResponse) -> None:
        first, *rest = answer('{"mood":"calm"}')
        await response.write(encoded(first, rest[0]))
        await asyncio.wait_for(seen.wait(), 10)  # not before a follower was told of the first word
        await response.write(encoded(*rest[1:]))

    async with model(say) as there, running(asking(there.url), database_url) as service:
        id = (await service.post(wait=0)).id
        words = ""
        with anyio.fail_after(20):
            async with aclosing(service.service.streams.follow(service.tenant, id, 0)) as batches:
                async for batch in batches:
                    for event in batch:
                        if event.kind == "part":
                            words += json.loads(event.data)["value"]["text"]
                            seen.set()
        decision = await service.shown(id)
    assert words == '{"mood":"calm"}'
    assert decision["outcome"]["terms"] == {"mood": "calm"}
    [item] = decision["evidence"]
    assert item["cost"] == {"amount_minor": 2, "currency": "SGD"}
    assert item["revision"].startswith("m-1@sha256:")
    assert decision["budget"]["settled"] == {"amount_minor": 2, "currency": "SGD"}
    assert decision["budget"]["uncertain"] is None


async def test_an_attempt_that_broke_off_may_still_be_billed(database_url: str) -> None:
    tries = 0

    async def say(response: web.StreamResponse) -> None:
        nonlocal tries
        tries += 1
        await response.write(encoded(chunk("{")) if tries == 1 else encoded(*answer('{"mood":"calm"}')))

    async with model(say) as there, running(asking(there.url), database_url) as service:
        decision = await service.decided()
    assert decision["status"] == "committed"
    assert decision["evidence"][0]["attempts"] == 2
    assert decision["budget"]["settled"] == {"amount_minor": 2, "currency": "SGD"}
    assert decision["budget"]["uncertain"] is not None
