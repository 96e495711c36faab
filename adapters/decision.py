"""Evidence from another decision: its outcome, once it rests.

There is nothing to call here: the engine asks for the decision, and finds the same one again whenever it asks again. A child that was
committed or declined is `Found`, as a `Concluded`; one that ended in any other way is `Failed` with a code such as
``child-unresolved`` or ``child-in-review``.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from adapters.declare import declared_at
from adapters.template import REQUEST, NoValue, Path, Template
from coordinator.core.canonical import InvalidJson, JsonValue, check
from coordinator.core.child import ChildAsk, Concluded
from coordinator.core.dependencies import NAME
from coordinator.core.evidence import ReadRequest, is_struct
from coordinator.errors import DeclarationError

T = TypeVar("T")

Input: TypeAlias = "Mapping[str, object] | Callable[[Any, Mapping[str, JsonValue]], object]"
"""Any: the first parameter is whatever request type the decision declares."""


class DecisionSource(Generic[T]):
    """Asks for a decision of ``type``, whose terms are ``terms`` if it commits.

    ``input`` is what it is asked: a mapping whose texts may be placeholders such as ``"{input.customer}"``, which stand for the value
    as it is, or texts with placeholders in them; or a function of the request and the evidence that this comes ``after``. Without
    it the child is given the parent's own input. ``record`` is the kind and the id of the child's record; the id may have
    placeholders. Without ``key`` each parent has a child of its own, which is cancelled if nobody waits for it any more; parents
    whose ``key`` renders to the same share one. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        *,
        type: str,
        terms: type[T],
        input: Input | None = None,
        record: tuple[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        where, what = declared_at(), f"source {name!r}"
        if not NAME.match(type):
            raise DeclarationError(f"{what}: {type!r} is no name of a decision type", where)
        if not is_struct(terms):
            raise DeclarationError(f"{what}: its terms are {terms!r}; they must be a msgspec.Struct", where)
        concluded: Any = Concluded
        self.name = name
        self.returns: builtins.type[Concluded[T]] = concluded[terms]
        self.decision_type = type
        self._input = input if input is None or callable(input) else _compiled(input, what, where)
        self._record = None if record is None else (record[0], Template(record[1], REQUEST, what, where))
        self._key = None if key is None else Template(key, REQUEST, what, where)

    @property
    def asks_for(self) -> tuple[str, ...]:
        templates = [self._record[1] if self._record else None, self._key]
        if isinstance(self._input, dict):
            templates += [member for member in self._input.values() if isinstance(member, Template)]
        return tuple(path.text for template in templates if template for path in template.paths)

    def __repr__(self) -> str:
        return f"DecisionSource({self.name!r}, type={self.decision_type!r})"

    def ask_child(self, request: ReadRequest) -> ChildAsk:
        """Raises `NoValue`, and other ``ValueError``s for an input that is no JSON object."""
        try:
            asked = msgspec.to_builtins(self._asked(request), str_keys=True)
            check(asked)
        except (TypeError, InvalidJson) as error:
            raise ValueError(f"the input of a {self.decision_type} is no JSON: {error}") from error
        if not isinstance(asked, dict):
            raise ValueError(f"the input of a {self.decision_type} is no JSON object")
        record = None if self._record is None else (self._record[0], self._record[1].plain(request))
        return ChildAsk(asked, record, None if self._key is None else self._key.url(request))

    def _asked(self, request: ReadRequest) -> object:
        if self._input is None:
            return request.input
        if callable(self._input):
            return self._input(request.input, request.evidence)
        return {name: _rendered(member, request) for name, member in self._input.items()}


def _compiled(input: Mapping[str, object], what: str, where: str) -> dict[str, object]:
    return {
        name: Template(member, REQUEST, what, where) if isinstance(member, str) else member
        for name, member in input.items()
    }


def _rendered(member: object, request: ReadRequest) -> object:
    if not isinstance(member, Template):
        return member
    only = member.only
    return only.value(request) if isinstance(only, Path) else member.plain(request)


__all__ = ["DecisionSource", "NoValue"]
