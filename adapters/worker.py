"""Evidence from remote workers: programs that run for minutes, on other machines, in any language.

There is nothing to call here: the engine stores a task, a worker that has the ``capability`` claims it over HTTP, and what the
worker answers is the reading. A worker is told the decision's input (or the part of it that ``sends`` names), the evidence that
this one was declared to come ``after``, and the record; nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from adapters.declare import declared_at
from adapters.template import REQUEST, NoValue, Template
from coordinator.core.canonical import InvalidJson, JsonValue, check
from coordinator.core.dependencies import NAME
from coordinator.core.evidence import Ask, ReadRequest, is_struct
from coordinator.errors import DeclarationError

T = TypeVar("T")

MAX_WORKER_NAME = 63


class WorkerSource(Generic[T]):
    """``capability`` is the source's name unless given. ``worker`` pins the task to the worker of that name, rendered from the
    request (``"{input.worker}"``): at its capacity the reading fails at once with ``worker-at-capacity`` and the counts, unless
    ``may_fall_back`` offers it to any capable worker. ``sends`` names fields of the decision's input: then only those are
    sent, else all of it. Raises `DeclarationError`.
    """

    def __init__(
        self,
        name: str,
        *,
        returns: type[T],
        capability: str | None = None,
        worker: str | None = None,
        may_fall_back: bool = False,
        sends: Sequence[str] | None = None,
    ) -> None:
        where, what = declared_at(), f"source {name!r}"
        if not is_struct(returns):
            raise DeclarationError(f"{what} returns {returns!r}; it must be a msgspec.Struct", where)
        if not NAME.match(capability or name):
            raise DeclarationError(f"{what}: a capability is 1..63 of a-z, 0-9 and -", where)
        if may_fall_back and worker is None:
            raise DeclarationError(f"{what}: may_fall_back is for a source that names a worker", where)
        self.name = name
        self.returns = returns
        self.capability = capability or name
        self.may_fall_back = may_fall_back
        self._worker = None if worker is None else Template(worker, REQUEST, what, where)
        self._sends = None if sends is None else frozenset(sends)

    @property
    def asks_for(self) -> tuple[str, ...]:
        named = [path.text for path in self._worker.paths] if self._worker else []
        return (*named, *(f"input.{field}" for field in sorted(self._sends or ())))

    def __repr__(self) -> str:
        return f"WorkerSource({self.name!r}, capability={self.capability!r})"

    def ask(self, request: ReadRequest) -> Ask:
        """Raises `NoValue` (a ``ValueError``) if the request names no worker where it should, or cannot be written as JSON."""
        record: JsonValue = None
        if request.record_kind:
            record = {"kind": request.record_kind, "id": request.record_id}
        pinned = None if self._worker is None else self._worker.plain(request)
        if pinned is not None and len(pinned) > MAX_WORKER_NAME:
            raise NoValue(f"a worker's name has at most {MAX_WORKER_NAME} characters")
        told: JsonValue = {
            "input": self._input(request),
            "evidence": dict(request.evidence),
            "record": record,
        }
        try:
            check(told)
        except InvalidJson as error:
            raise NoValue(f"the request is no JSON: {error.message}") from None
        return Ask(told, pinned, self.may_fall_back)

    def _input(self, request: ReadRequest) -> JsonValue:
        whole: JsonValue = msgspec.to_builtins(request.input, str_keys=True)
        if self._sends is None or not isinstance(whole, dict):
            return whole
        return {name: value for name, value in whole.items() if name in self._sends}
