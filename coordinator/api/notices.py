"""`/v1/notices`: what providers tell us of themselves about an operation's key.

There is no API key here: the sink that performs the effect checks the sender's signature, over the bytes as they were sent, before
anything else is made of them. Until then nothing is looked up and nothing is told: a wrong signature, an old event, a body that
makes no sense and a tenant that does not exist are one and the same refusal, whose reason is in the log alone.

    effect without a sink that reads notices      404    before the body is read
    the sink refuses; no such tenant              401    one answer for all
    a key that this effect never used             404    of a tenant that exists, to a sender that was proven
    an event that was seen before                 200    with the present state; nothing is changed
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from litestar.types import Scope

from coordinator.api import examples
from coordinator.api.answer import Answer
from coordinator.api.endpoint import Call, Parameter, Sent, Shown, endpoint, nothing_here
from coordinator.api.paging import uuid
from coordinator.api.views import encode
from coordinator.core import effect as effects
from coordinator.core.effect import Notice, NoticeReader
from coordinator.core.evidence import clean_text
from coordinator.engine.service import Service
from coordinator.errors import BodyTooLarge, NotFound, NoticeRefused, Overloaded
from coordinator.store import reading

log = logging.getLogger(__name__)
MAX_EVENT_ID = 255
MAX_KEY = 1000

Readers = Mapping[str, NoticeReader]
"""By decision type: the same effect may be another provider's in another type, who then may not speak of this one's keys."""


class Noticed(msgspec.Struct, frozen=True):
    """``operation`` is whose key it was, ``state`` the state it is in now."""

    operation: str
    state: str


@endpoint(
    "POST",
    "/v1/notices/{tenant}/{effect}",
    "Tell what became of an effect",
    parameters=[
        Parameter("tenant", "path", "The tenant's id.", {"type": "string", "format": "uuid"}, required=True),
        Parameter("effect", "path", "The effect's name.", required=True, example="send-quote"),
    ],
    body=Sent(None, examples.NOTICE),
    answers={200: Shown("The operation that it was about, and its state now.", Noticed)},
    problems=[NoticeRefused, NotFound, BodyTooLarge, Overloaded],
)
async def receive(call: Call) -> Answer:
    """For providers: an event about an operation's key, signed as the effect's sink demands (for the webhook sink that is Standard
    Webhooks, with a secret of its own for this direction). It settles the operation at once. Each event counts once, by its id;
    one that comes after the operation has ended is kept as a receipt."""
    effect = call.segment(4)
    readers = readers_of(call.service, effect)
    if not readers:
        raise nothing_here()
    body = await call.raw_body()
    notices = _proven(readers, effect, _headers(call.scope), body)
    return Answer(200, encode(await _settle(call, effect, notices)))


def readers_of(service: Service, effect: str) -> Readers:
    return {
        type: sink
        for (type, name), sink in service.coordinator.sinks.items()
        if name == effect and isinstance(sink, NoticeReader)
    }


def _headers(scope: Scope) -> Mapping[str, str]:
    """One line for each name, those that came more than once joined as RFC 9110 section 5.3 has it."""
    joined: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        joined[key] = f"{joined[key]}, {text}" if key in joined else text
    return joined


def _proven(readers: Readers, effect: str, headers: Mapping[str, str], body: bytes) -> Mapping[str, Notice]:
    """What it says, by the decision types whose sink has proven the sender."""
    notices: dict[str, Notice] = {}
    for type, reader in readers.items():
        try:
            notice = reader.notice(headers, body)
        except effects.NoticeRefused as refusal:
            log.info("notice for effect %s of type %s refused: %s", effect, type, clean_text(str(refusal)))
        except Exception:  # the boundary to adapters: whatever it could not read is not proven
            log.exception("sink %s of type %s raised at a notice", effect, type)
        else:
            notices[type] = notice
    if not notices:
        raise _refused()
    return notices


async def _settle(call: Call, effect: str, notices: Mapping[str, Notice]) -> Noticed:
    tenant = uuid(call.segment(3))
    if tenant is None:
        raise _refused()
    for type, notice in notices.items():
        if not _is_text(notice.event_id, MAX_EVENT_ID):
            log.warning("effect %s of type %s: an event id of 1..%d characters", effect, type, MAX_EVENT_ID)
            raise _refused()
        async with call.service.database.transaction(tenant) as connection:
            key = notice.key if _is_text(notice.key, MAX_KEY) else ""
            found = await reading.addressed(connection, tenant, effect, key)
        if found is None:
            log.info("notice for effect %s refused: there is no tenant %s", effect, tenant)
            raise _refused()
        if found.operation is not None and found.decision_type == type:
            state = await call.service.operations.notice(
                tenant,
                effect=effect,
                event_id=notice.event_id,
                key=notice.key,
                happened=notice.happened,
                reference=notice.reference,
                reason=notice.reason,
                cost=notice.cost,
            )
            return Noticed(str(found.operation), state)
    raise nothing_here()


def _is_text(text: str, limit: int) -> bool:
    return bool(text) and clean_text(text, limit) == text


def _refused() -> NoticeRefused:
    return NoticeRefused(
        "Its address, its signature or its time is wrong, or it cannot be understood. The service's log says which."
    )


ENDPOINTS = (receive,)
