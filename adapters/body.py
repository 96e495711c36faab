"""A JSON body with placeholders, for a provider that wants another shape than the payload has.

    {"order": {"id": "{payload.order.id}", "amount": "{payload.amount_minor}"}, "ref": "decision {decision}, {key}"}

A text that is one placeholder and nothing else becomes the value as it is: a number stays a number, an object an object. Anywhere
else the value is written into the text. A value that is missing or null is a `NoValue`: no hole is ever sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

import msgspec

from adapters.template import NoValue, Path, Root, Template
from coordinator.core.canonical import JsonValue
from coordinator.core.effect import Operation, payload_json
from coordinator.errors import DeclarationError


class Content:
    """An operation as templates see it: its payload is decoded at most once, and only if a placeholder asks for it."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    @cached_property
    def payload(self) -> JsonValue:
        try:
            return payload_json(self.operation.payload)
        except msgspec.DecodeError as error:
            raise NoValue(f"the payload is not JSON: {error}") from None


CONTENT: Mapping[str, Root[Content]] = {
    "payload": Root(lambda content: content.payload, 0, 16),
    "key": Root(lambda content: content.operation.key, 0, 0),
    "tenant": Root(lambda content: content.operation.tenant, 0, 0),
    "effect": Root(lambda content: content.operation.effect, 0, 0),
    "decision": Root(lambda content: content.operation.decision_id, 0, 0),
}
Render: TypeAlias = Callable[[Content], object]


class BodyTemplate:
    """Compiled once, when declared. Raises `DeclarationError`."""

    def __init__(self, shape: JsonValue, what: str, where: str) -> None:
        self._render = _compiled(shape, f"{what}: body", where)

    def encoded(self, content: Content) -> bytes:
        """Raises `NoValue`."""
        return msgspec.json.encode(self._render(content))


def member(said: JsonValue, dotted: str) -> JsonValue:
    """A member of an object, at any depth; None if it isn't there."""
    for step in dotted.split("."):
        said = said.get(step) if isinstance(said, dict) else None
    return said


def _compiled(shape: JsonValue, what: str, where: str) -> Render:
    if isinstance(shape, dict):
        members = {name: _compiled(value, f"{what}.{name}", where) for name, value in shape.items()}
        return lambda content: {name: render(content) for name, render in members.items()}
    if isinstance(shape, list):
        items = [_compiled(value, f"{what}[]", where) for value in shape]
        return lambda content: [render(content) for render in items]
    if isinstance(shape, str) and ("{" in shape or "}" in shape):
        template = Template(shape, CONTENT, what, where)
        if len(template.paths) == 1 and shape == f"{{{template.paths[0].text}}}":
            path: Path[Content] = template.paths[0]
            return path.value
        return template.plain
    if shape is None or isinstance(shape, str | int | float | bool):
        return lambda content: shape
    raise DeclarationError(f"{what} holds a {type(shape).__name__}, which is no JSON", where)
