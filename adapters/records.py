"""Evidence from a record of this tenant in the coordinator's own database.

There is nothing to call here: the engine reads the record, and checks it again under lock inside the committing transaction, so
that it cannot move between the check and the commit. The source only says which record.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from adapters.declare import declared_at
from adapters.template import REQUEST, NoValue, Template
from coordinator.core.evidence import ReadRequest, is_struct
from coordinator.errors import DeclarationError

T = TypeVar("T")

MAX_ID = 255


class RecordSource(Generic[T]):
    """The record ``kind`` whose id is rendered from ``id``, such as ``{input.site}``; ``returns`` is the type of its data.

    Raises `DeclarationError`.
    """

    def __init__(self, name: str, kind: str, id: str, *, returns: type[T]) -> None:
        where, what = declared_at(), f"source {name!r}"
        if not 1 <= len(kind) <= MAX_ID:
            raise DeclarationError(f"{what}: a record kind has 1..{MAX_ID} characters", where)
        if not is_struct(returns):
            raise DeclarationError(f"{what} returns {returns!r}; it must be a msgspec.Struct", where)
        if not id:
            raise DeclarationError(f"{what}: the record's id is empty", where)
        self.name = name
        self.returns = returns
        self.record_kind = kind
        self._id = Template(id, REQUEST, what, where)

    @property
    def asks_for(self) -> tuple[str, ...]:
        return tuple(path.text for path in self._id.paths)

    def __repr__(self) -> str:
        return f"RecordSource({self.name!r}, kind={self.record_kind!r})"

    def record_id(self, request: ReadRequest) -> str:
        """Raises `NoValue` (a ``ValueError``) if the request names no record: a failed reading, not an absent one."""
        record_id = self._id.plain(request)
        if len(record_id) > MAX_ID:
            raise NoValue(f"the id of a {self.record_kind} has more than {MAX_ID} characters")
        return record_id
