"""Named locks: what a decision type declares for the little that cannot be partitioned.

Records come first. Two decisions that change different records never wait for each other, and two that change the same one are told
apart by its version: nothing has to be held while evidence is read. A lock serialises whole runs, reading included, so it is for what
has no record to carry a version: a ledger elsewhere that must be read and changed by one at a time, a region's timetable.

A decision takes all its locks before it reads anything, in one order for everybody: that of their names by code point, whatever the
order in which a type declares them. Nobody waits for a lock while holding a later one, so no circle of waiting can close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec

from coordinator.core.request import RecordRef
from coordinator.core.template import NoValue, Root, Template
from coordinator.errors import DeclarationError

MAX_LOCKS = 8
MAX_NAME_LENGTH = 255
_COLLECTIONS = (list, tuple, set, frozenset, dict)


class Unnamed(ValueError):
    """A request that does not say which lock it needs: ``pointer`` (RFC 6901) is the place in the request, ``what`` is wrong."""

    def __init__(self, pointer: str, what: str) -> None:
        super().__init__(f"{pointer}: {what}")
        self.pointer = pointer
        self.what = what


class _Subject(NamedTuple):
    input: object
    record: Mapping[str, str]


_ROOTS: Mapping[str, Root[_Subject]] = {
    "input": Root(lambda subject: subject.input, 1, 16),
    "record": Root(lambda subject: subject.record, 1, 1, frozenset({"kind", "id"})),
}


class LockNames:
    """The declared templates, such as ``region/{input.region}`` or ``record/{record.id}``. Raises `DeclarationError`."""

    def __init__(self, templates: Sequence[str], request: Any, *, has_record: bool, where: str) -> None:
        if isinstance(templates, str):
            raise DeclarationError(f"locks must be a list of texts, not the text {templates!r}", where)
        if len(templates) > MAX_LOCKS:
            raise DeclarationError(f"{len(templates)} locks; at most {MAX_LOCKS}", where)
        self._templates = [_compiled(text, request, has_record, where) for text in templates]

    def __bool__(self) -> bool:
        return bool(self._templates)

    def of(self, input: object, record: RecordRef | None) -> tuple[str, ...]:
        """The names that a request stands for, in the global order, each once. Raises `Unnamed`."""
        subject = _Subject(input, {"kind": record.kind, "id": record.id} if record else {})
        return tuple(sorted({_rendered(template, subject) for template in self._templates}))


def _compiled(text: str, request: Any, has_record: bool, where: str) -> Template[_Subject]:
    what = f"lock {text!r}"
    if type(text) is not str or not text or "\x00" in text or len(text) > MAX_NAME_LENGTH:
        raise DeclarationError(f"{what} is not a text of 1..{MAX_NAME_LENGTH} characters", where)
    template = Template(text, _ROOTS, what, where)
    for path in template.paths:
        root, *steps = path.text.split(".")
        if root == "record" and not has_record:
            raise DeclarationError(f"{what}: add record=..., so that every request has one", where)
        if root == "input" and (wrong := _wrong(request, steps)):
            raise DeclarationError(f"{what}: {{{path.text}}}: {wrong}", where)
    return template


def _wrong(kind: Any, steps: Sequence[str], so_far: str = "the request") -> str | None:
    """Why no plain value can stand at the end of ``steps`` below a ``kind``, as far as its type tells."""
    if get_origin(kind) is Annotated:
        return _wrong(get_args(kind)[0], steps, so_far)
    if get_origin(kind) in (Union, UnionType):
        arms = [arm for arm in get_args(kind) if arm is not type(None)]
        return next((wrong for arm in arms if (wrong := _wrong(arm, steps, so_far))), None)
    plain = get_origin(kind) or kind
    if not isinstance(plain, type) or plain is object:
        return None
    if issubclass(plain, msgspec.Struct):
        fields: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(kind)}
        if not steps:
            return f"{so_far} is a structure, not a plain value"
        if steps[0] not in fields:
            return f"{so_far} has no {steps[0]!r}, only {', '.join(sorted(fields))}"
        return _wrong(fields[steps[0]], steps[1:], steps[0])
    if steps:
        return None if issubclass(plain, Mapping) else f"{so_far} is a {plain.__name__} and has no parts"
    return f"{so_far} is a {plain.__name__}, not a plain value" if issubclass(plain, _COLLECTIONS) else None


def _rendered(template: Template[_Subject], subject: _Subject) -> str:
    for path in template.paths:
        try:
            path.written(subject)
        except NoValue as error:
            raise Unnamed("/" + path.text.replace(".", "/"), str(error)) from None
    name = template.plain(subject)
    if len(name) > MAX_NAME_LENGTH:
        pointer = "/" + template.paths[0].text.replace(".", "/")
        raise Unnamed(pointer, f"the lock's name has {len(name)} characters; at most {MAX_NAME_LENGTH}")
    return name
