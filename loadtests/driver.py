"""The driver over HTTP: asks a server for decisions. A child process; see `worker`."""

from __future__ import annotations

import asyncio
import os

import aiohttp
import msgspec
import uvloop

from loadtests import worker
from loadtests.decision_types import RECORD_KIND
from loadtests.load import Answer, Ask, Plan

URL, KEY = "LOADTEST_URL", "LOADTEST_KEY"
TIMEOUT_S = 60


def body_of(plan: Plan, number: int) -> dict[str, object]:
    """The request of that number: a subject and a record of its own, or the one hot record."""
    subject = f"{plan.prefix}-{number}"
    record = f"{plan.prefix}-hot" if plan.hot else subject
    return {"type": plan.type, "input": {"subject": subject}, "record": {"kind": RECORD_KIND, "id": record}}


def http_ask(session: aiohttp.ClientSession, plan: Plan) -> Ask:
    url = f"{os.environ[URL]}/v1/decisions"
    bearer = f"Bearer {os.environ[KEY]}"

    async def ask(number: int) -> Answer:
        headers = {
            "Authorization": bearer,
            "Content-Type": "application/json",
            "Idempotency-Key": f"{plan.prefix}-{number}",
        }
        try:
            async with session.post(
                url, data=msgspec.json.encode(body_of(plan, number)), headers=headers
            ) as response:
                return Answer(str(response.status), await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(type(error).__name__, b"")

    return ask


async def main(plan: Plan) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
    ) as session:
        await worker.drive(plan, http_ask(session, plan))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(worker.child(main))
