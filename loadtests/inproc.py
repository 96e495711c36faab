"""The driver without HTTP: calls `Service.decide` in its own process, sources and sink in memory. What is left is the engine
and its storage. A child process; see `worker`."""

from __future__ import annotations

import asyncio
import os
from uuid import UUID

import msgspec
import uvloop
from uuid_utils.compat import uuid7

from coordinator.api.problems import render
from coordinator.config import Settings
from coordinator.core.request import DecisionRequest
from coordinator.engine.service import Rested, Service, run_service
from coordinator.errors import RequestRefused
from coordinator.store.keys import Key
from loadtests import worker
from loadtests.decision_types import in_memory
from loadtests.driver import body_of
from loadtests.load import Answer, Ask, Plan

DATABASE, TENANT = "LOADTEST_DATABASE", "LOADTEST_TENANT"
WAIT_S = 60.0


def direct_ask(service: Service, plan: Plan) -> Ask:
    caller = Key(UUID(os.environ[TENANT]), uuid7(), frozenset({"decide"}))

    async def ask(number: int) -> Answer:
        body = msgspec.json.decode(msgspec.json.encode(body_of(plan, number)))
        request = msgspec.convert(body, DecisionRequest)
        key = f"{plan.prefix}-{number}"
        try:
            result = await service.decide(caller, key, request, body, wait_s=WAIT_S, traceparent=None)
        except RequestRefused as refused:
            return Answer(refused.code, b"")
        if isinstance(result, Rested):
            return Answer(str(result.status), result.body)
        return Answer("pending", result.body)

    return ask


async def main(plan: Plan) -> None:
    async with run_service(in_memory(), os.environ[DATABASE], Settings(), render_refusal=render) as service:
        await worker.drive(plan, direct_ask(service, plan))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(worker.child(main))
