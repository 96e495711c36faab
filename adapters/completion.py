"""A chat completion as its chunks come in, and what it is in the end; no I/O.

    finish_reason   stop             the text is whole
                    length           cut-by-length: `max_tokens` was not enough
                    content_filter   content-filtered
                    tool_calls       unexpected-tool-calls: no tool was offered
    none, and the stream ends        cut-off: what is there may be anything; retryable

What is billed is what the provider says it used. It says so with the last chunk, so a completion that breaks off before it has cost
something that nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal

import msgspec

from coordinator.core.evidence import Failed, clean_text
from coordinator.core.money import Money

PRICED_TOKENS = 1_000_000


class Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[object] | None = None


class Choice(msgspec.Struct):
    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Prices(msgspec.Struct, frozen=True):
    """Of a million tokens of the prompt, and of the completion."""

    prompt: Money
    completion: Money

    def of(self, usage: Usage) -> Money:
        """Rounded up to a whole minor unit, once: a budget is never told less than was spent."""
        exact = Decimal(usage.prompt_tokens) * self.prompt.amount_minor
        exact += Decimal(usage.completion_tokens) * self.completion.amount_minor
        whole = (exact / PRICED_TOKENS).to_integral_value(ROUND_CEILING)
        return Money(int(whole), self.prompt.currency)


decode_chunk = msgspec.json.Decoder(Chunk).decode


class Completion:
    """``usage`` is None until the provider said it; ``whole`` once nothing more is to come."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self.usage: Usage | None = None
        self.whole = False
        self._failed: Failed | None = None
        self._refusal = ""
        self._calls_tools = False
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def take(self, data: Sequence[str]) -> str:
        """Take the data of some events in; the text that they add."""
        before = len(self._text)
        for each in data:
            if self.whole:
                break
            self._take(each)
        return "".join(self._text[before:])

    def _take(self, data: str) -> None:
        if data.strip() == "[DONE]":
            self.whole = True
            return
        try:
            chunk = decode_chunk(data)
        except msgspec.DecodeError as error:
            self._break_off("malformed-chunk", f"a chunk that makes no sense: {error}")
            return
        if bytes(chunk.error) not in (b"", b"null"):
            self._break_off("provider-error", "the provider reported an error within its answer")
            return
        if chunk.usage is not None and min(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) >= 0:
            self.usage = chunk.usage
        for choice in chunk.choices[:1]:
            self._choose(choice)

    def _choose(self, choice: Choice) -> None:
        if choice.delta.content:
            self._text.append(choice.delta.content)
        self._calls_tools = self._calls_tools or bool(choice.delta.tool_calls)
        self._refusal += choice.delta.refusal or ""
        self.finish = choice.finish_reason or self.finish

    def _break_off(self, code: str, message: str) -> None:
        """What comes after this cannot be relied on."""
        self._failed = Failed(code, clean_text(message), retryable=True)
        self.whole = True

    def failure(self) -> Failed | None:
        """Why there is no answer in it, if there is none."""
        if self._failed is not None:
            return self._failed
        if self._refusal:
            return Failed("model-refused", clean_text(self._refusal))
        if self._calls_tools:
            return Failed("unexpected-tool-calls", "the model called a tool; none was offered")
        match self.finish:
            case "stop":
                return None
            case None:
                return Failed("cut-off", "the stream ended before the answer did", retryable=True)
            case "length":
                return Failed("cut-by-length", "the answer is longer than max_tokens allows")
            case "content_filter":
                return Failed("content-filtered", "the provider's filter held the answer back")
            case "tool_calls" | "function_call":
                return Failed("unexpected-tool-calls", "the model called a tool; none was offered")
            case other:
                return Failed("unexpected-finish", clean_text(f"finish_reason is {other!r}"))
