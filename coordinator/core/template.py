"""Templates: texts with placeholders, compiled when they are declared, and what of a request goes where when they are rendered.

    {input.field}    a value at a dotted path below one of the roots that whoever compiles the template allows

A placeholder that can't be known is a `DeclarationError` when the module loads. A value that is missing, empty or not a plain
text, number or truth value is a `NoValue` when rendering. In a URL every value is percent-encoded, ``/`` included, and no value may
become the path segment ``.`` or ``..``, which URLs resolve away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import UUID

import msgspec

from coordinator.errors import DeclarationError

S = TypeVar("S")

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_STEP = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_DOT_SEGMENT = re.compile(r"(?:^|/)\.{1,2}(?:[/?]|$)")


class NoValue(ValueError):
    """A placeholder has no usable value in this request; the text says which and why, and not what the value is."""


class Root(NamedTuple, Generic[S]):
    """Where a placeholder starts. ``members`` is None if they are only known when rendering."""

    get: Callable[[S], object]
    shortest: int
    longest: int
    members: frozenset[str] | None = None


class Path(Generic[S]):
    """One compiled placeholder, such as ``input.site``."""

    def __init__(self, text: str, roots: Mapping[str, Root[S]], what: str, where: str) -> None:
        first, *steps = text.split(".")
        root = roots.get(first)
        if root is None:
            raise DeclarationError(f"{what}: {{{text}}} starts with none of {', '.join(roots)}", where)
        if not root.shortest <= len(steps) <= root.longest or not all(_STEP.match(step) for step in steps):
            raise DeclarationError(f"{what}: {{{text}}} is not a path such as {_example(first, root)}", where)
        if root.members is not None and not root.members.issuperset(steps):
            raise DeclarationError(f"{what}: {{{text}}}: {first} has only {sorted(root.members)}", where)
        self.text = text
        self._root = root.get
        self._steps = tuple(steps)

    def value(self, subject: S) -> object:
        """The value as it is. Raises `NoValue` if a step leads nowhere or the value is None."""
        value = self._root(subject)
        for step in self._steps:
            if isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(value, msgspec.Struct) and step in value.__struct_fields__:
                value = getattr(value, step)
            else:
                raise NoValue(f"{self.text} leads nowhere at {step!r}")
        if value is None:
            raise NoValue(f"{self.text} has no value")
        return value

    def written(self, subject: S) -> str:
        """The value as text. Raises `NoValue` also for a structure, an empty text or one with a NUL or lone surrogate."""
        match value := self.value(subject):
            case Enum():
                text = str(value.value)
            case str():
                text = value
            case bool() | float():
                text = msgspec.json.encode(value).decode()
            case int() | Decimal() | UUID():
                text = str(value)
            case datetime() | date():
                text = str(msgspec.to_builtins(value))
            case _:
                raise NoValue(f"{self.text} is a {type(value).__name__}, not a plain value")
        if not text or "\x00" in text:
            raise NoValue(f"{self.text} is empty" if not text else f"{self.text} contains NUL")
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise NoValue(f"{self.text} contains a lone surrogate")
        return text


class Template(Generic[S]):
    """Compiled once, when declared."""

    def __init__(self, text: str, roots: Mapping[str, Root[S]], what: str, where: str) -> None:
        pieces = _PLACEHOLDER.split(text)
        self.paths = tuple(Path(placeholder, roots, what, where) for placeholder in pieces[1::2])
        self._literals = tuple(pieces[::2])
        if any("{" in literal or "}" in literal for literal in self._literals):
            raise DeclarationError(f"{what}: a brace without its partner in {text!r}", where)

    @property
    def only(self) -> Path[S] | None:
        """The placeholder that is all there is of it, if so."""
        return self.paths[0] if self._literals == ("", "") else None

    def plain(self, subject: S) -> str:
        """Rendered with the values as they are. Raises `NoValue`."""
        return self._join([path.written(subject) for path in self.paths])

    def url(self, subject: S) -> str:
        """Rendered with percent-encoded values. Raises `NoValue`."""
        rendered = self._join([quote(path.written(subject), safe="") for path in self.paths])
        if "/." in rendered and _DOT_SEGMENT.search(rendered.partition("?")[0]):
            raise NoValue("a value would become the path segment . or ..")
        return rendered

    def _join(self, values: list[str]) -> str:
        literals = self._literals
        return literals[0] + "".join(value + after for value, after in zip(values, literals[1:], strict=True))


def _example(first: str, root: Root[S]) -> str:
    if root.members is not None:
        return f"{{{first}.{min(root.members)}}}"
    return "{" + ".".join([first, *(["name", "field"][-root.shortest :] if root.shortest else [])]) + "}"
