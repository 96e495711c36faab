"""Evidence from a model behind an OpenAI-compatible chat completions endpoint, streamed, and decoded into a declared struct.

    200, a stream that ends well        Found, if its text is strict JSON of the declared type
    200, a stream that does not         Failed: see `adapters.completion`; stalled after `stall_ms` without a byte
    429 503                             Failed, retryable, with the pause that the provider asked for
    408 425 other 5xx                   Failed, retryable
    everything else                     Failed: asking again would not help

The pieces of text go to those who follow the decision as they come; while the slowest of them has no room, nothing more is read
from the provider. The revision is the model and the digest of everything it was asked; the same question need not be asked again
to know that its answer still stands, so a conditional reading costs nothing. What it cost is what the provider says it used, at the
declared prices; a refused request costs nothing, and what broke off before it was said is unknown.

The API key is read from the environment at each call and is shown nowhere: not in errors, logs or what the provider echoes.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import aiohttp
import msgspec

from adapters.client import close_clients, describe, session, within
from adapters.completion import Completion, Prices, Usage
from adapters.declare import checked_headers, declared_at, provider_of
from adapters.schema import strict_schema
from adapters.template import REQUEST, NoValue, Template
from adapters.wire import json_object, retry_after_ms, spare_body
from coordinator.core.canonical import InvalidJson, canonical, digest, parse
from coordinator.core.evidence import Answer, Failed, Found, ReadRequest, Unchanged, clean_text, is_struct
from coordinator.core.money import Money
from coordinator.core.sse import FrameTooLarge, Parser
from coordinator.errors import DeclarationError

T = TypeVar("T")
Prompt = Callable[[ReadRequest], "str | Sequence[Mapping[str, str]]"]
"""Gives the user's message, or all messages with their roles. It must say the same for the same request."""

_KEY = re.compile(r"[!-~]{1,4096}\Z")
_RESERVED = frozenset(
    {"accept", "authorization", "content-type", "content-length", "host", "traceparent", "connection"}
)


class ChatSource(Generic[T]):
    """One model that is asked one thing.

    ``base_url`` ends before ``/chat/completions``. ``prompt`` is a template (see `adapters.template`) or a function; ``system`` is
    said before it. ``api_key_env`` names the environment variable with the key. ``prices`` are those of a million tokens of the
    prompt and of the completion, in one currency. ``stall_ms`` bounds the silence between two pieces, ``max_bytes`` the stream.
    ``response_format``: ``json_schema`` has the provider keep to the declared type, ``json_object`` is for one that can only be
    asked for some JSON; what comes is checked either way. ``options`` are further members of the request, such as
    ``{"seed": 1}``. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        model: str,
        returns: type[T],
        prompt: str | Prompt,
        system: str | None = None,
        api_key_env: str | None = None,
        max_tokens: int = 1_024,
        prices: tuple[Money, Money] | None = None,
        stall_ms: int = 10_000,
        max_bytes: int = 4_194_304,
        response_format: Literal["json_schema", "json_object"] = "json_schema",
        options: Mapping[str, Any] | None = None,
        provider: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        where, what = declared_at(), f"source {name!r}"
        host = provider_of(base_url, what, where)
        if not is_struct(returns) or not inspect.isclass(returns):
            raise DeclarationError(f"{what} returns {returns!r}; it must be one msgspec.Struct", where)
        for limit, value in (("max_tokens", max_tokens), ("stall_ms", stall_ms), ("max_bytes", max_bytes)):
            if value < 1:
                raise DeclarationError(f"{what}: {limit} must be positive", where)
        self.name = name
        self.provider = provider or host
        self.returns = returns
        self.asks_for: tuple[str, ...] = ()
        self._prompt = self._rendered(prompt, what, where)
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._system = system
        self._key_env = api_key_env
        self._prices = _checked(prices, what, where)
        self._stall_s = stall_ms / 1000
        self._max_bytes = max_bytes
        self._headers = checked_headers(headers, _RESERVED, what, where)
        self._asked: dict[str, Any] = {
            **(options or {}),
            "model": model,
            "max_tokens": max_tokens,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": _format(returns, response_format, what, where),
        }
        self.model = model

    def _rendered(self, prompt: str | Prompt, what: str, where: str) -> Prompt:
        if not isinstance(prompt, str):
            return prompt
        template: Template[ReadRequest] = Template(prompt, REQUEST, f"{what}: prompt", where)
        self.asks_for = tuple(path.text for path in template.paths)
        return template.plain

    def __repr__(self) -> str:
        return f"ChatSource({self.name!r}, model={self.model!r}, provider={self.provider!r})"

    async def aclose(self) -> None:
        await close_clients()

    async def read(self, request: ReadRequest) -> Answer[T]:
        """One completion within ``request.timeout_s``. Cancelling it closes the connection, which ends the generation."""
        try:
            asked = {**self._asked, "messages": self._messages(request)}
            revision = f"{self.model}@{digest(canonical(asked))}"
        except (NoValue, InvalidJson) as error:
            return self._free(Failed("no-prompt", clean_text(str(error))))
        except Exception as error:  # noqa: BLE001 - the declarer's own code; what it raised is the answer
            return self._free(Failed("source-raised", clean_text(f"{type(error).__name__}: {error}")))
        if request.if_revision == revision:
            return Unchanged(cost=self._cost(Usage()), units=0)
        key = os.environ.get(self._key_env, "") if self._key_env else None
        if key is not None and not _KEY.match(key):
            return self._free(Failed("no-credentials", f"{self._key_env} holds no API key"))
        return await _Conversation(self, request, revision, key).hold(asked)

    def _messages(self, request: ReadRequest) -> list[Mapping[str, str]]:
        said = self._prompt(request)
        messages: list[Mapping[str, str]] = []
        if self._system:
            messages.append({"role": "system", "content": self._system})
        if isinstance(said, str):
            return [*messages, {"role": "user", "content": said}]
        return [*messages, *said]

    def _cost(self, usage: Usage | None) -> Money | None:
        return self._prices.of(usage) if self._prices and usage else None

    def _free(self, failed: Failed) -> Failed:
        """A failure before the model was asked anything."""
        return msgspec.structs.replace(failed, cost=self._cost(Usage()), units=0)


class _Stalled(Exception):
    """Nothing came for too long."""


class _Conversation(Generic[T]):
    """One request and its streamed answer."""

    def __init__(self, source: ChatSource[T], request: ReadRequest, revision: str, key: str | None) -> None:
        self._source = source
        self._request = request
        self._revision = revision
        self._key = key
        self._completion = Completion()

    async def hold(self, asked: Mapping[str, Any]) -> Answer[T]:
        free = self._source._free
        try:
            async with asyncio.timeout(self._request.timeout_s):  # also while a piece waits for room
                return await self._post(msgspec.json.encode(asked))
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            return free(Failed("unreachable", describe(error), retryable=True))
        except TimeoutError:
            return self._billed(Failed("timed-out", f"no end within {self._request.timeout_s:.3f} s"))
        except aiohttp.ClientPayloadError:
            return self._concluded()  # it broke off; what is there may be whole all the same
        except aiohttp.ClientResponseError as error:
            return Failed("malformed-response", describe(error))
        except aiohttp.ClientError as error:
            return self._billed(Failed("connection-lost", describe(error), retryable=True))

    async def _post(self, body: bytes) -> Answer[T]:
        headers = {**self._source._headers, "Accept": "text/event-stream", "Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        if self._request.traceparent:
            headers["traceparent"] = self._request.traceparent
        timeout = within(self._request.timeout_s)
        async with session().post(
            self._source._url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                return await self._refused(response)
            if response.content_type != "text/event-stream":
                response.close()
                said = response.headers.get("Content-Type")
                return Failed("wrong-content-type", clean_text(f"expected an event stream, got {said}"))
            return await self._stream(response)

    async def _stream(self, response: aiohttp.ClientResponse) -> Answer[T]:
        limit, size = self._source._max_bytes, 0
        parser, completion = Parser(limit), self._completion
        try:
            while not completion.whole and (piece := await self._piece(response)):
                size += len(piece)
                if size > limit:
                    raise FrameTooLarge
                if text := completion.take([frame.data for frame in parser.feed(piece)]):
                    await self._request.emit({"text": text})
        except _Stalled:
            response.close()
            why = f"silent for {self._source._stall_s:.3f} s"
            return self._billed(Failed("stalled", why, retryable=True))
        except FrameTooLarge:
            response.close()
            return self._billed(Failed("response-too-large", f"the stream is larger than {limit} bytes"))
        return self._concluded()

    async def _piece(self, response: aiohttp.ClientResponse) -> bytes:
        """What has come; nothing at the end. Raises `_Stalled`."""
        silence = asyncio.timeout(self._source._stall_s)
        try:
            async with silence:
                return await response.content.readany()
        except TimeoutError:
            if silence.expired():
                raise _Stalled from None
            raise

    def _concluded(self) -> Answer[T]:
        failure = self._completion.failure()
        if failure is not None:
            return self._billed(failure)
        try:
            value = msgspec.convert(parse(self._completion.text.encode()), self._source.returns)
        except (InvalidJson, msgspec.ValidationError, UnicodeEncodeError) as error:
            return self._billed(Failed("malformed-response", clean_text(str(error)), retryable=True))
        usage = self._completion.usage
        return Found(value, self._revision, cost=self._source._cost(usage), units=_units(usage))

    def _billed(self, failed: Failed) -> Failed:
        usage = self._completion.usage
        return msgspec.structs.replace(failed, cost=self._source._cost(usage), units=_units(usage))

    async def _refused(self, response: aiohttp.ClientResponse) -> Failed:
        """What the provider says to a key it does not know may hold the key: then its words are left out."""
        status, body = response.status, await spare_body(response)
        words = "" if status in (401, 403) else self._without_key(_words(body))
        why = clean_text(f"{status}: {words}" if words else f"{status}")
        if status in (429, 503):
            pause = retry_after_ms(response)
            return self._source._free(Failed("provider-busy", why, retryable=True, retry_after_ms=pause))
        if status >= 500:
            return Failed("provider-error", why, retryable=True)
        if status in (408, 425):
            return self._source._free(Failed("provider-error", why, retryable=True))
        return self._source._free(Failed("provider-refused" if status >= 400 else "unexpected-status", why))

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _words(body: bytes) -> str:
    """``{"error": {"message": "..."}}``, as these providers have it, or ``{"error": "..."}``."""
    error = json_object(body).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _units(usage: Usage | None) -> int | None:
    return None if usage is None else usage.prompt_tokens + usage.completion_tokens


def _checked(prices: tuple[Money, Money] | None, what: str, where: str) -> Prices | None:
    if prices is None:
        return None
    made = Prices(*prices)
    if made.prompt.currency != made.completion.currency:
        raise DeclarationError(f"{what}: prices must be in one currency", where)
    if min(made.prompt.amount_minor, made.completion.amount_minor) < 0:
        raise DeclarationError(f"{what}: prices must not be negative", where)
    return made


def _format(returns: type, wanted: str, what: str, where: str) -> dict[str, Any]:
    if wanted == "json_object":
        return {"type": "json_object"}
    try:
        schema = strict_schema(returns)
    except TypeError as error:
        raise DeclarationError(f"{what}: {returns.__name__} has no JSON Schema: {error}", where) from None
    named = {"name": returns.__name__, "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}
