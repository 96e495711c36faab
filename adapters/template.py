"""Templates such as ``https://planner.example/sites/{input.site}``: what of a request goes where in a URL or an id.

    {input.field}            a field of the decision's request, dotted to any depth
    {evidence.name.field}    a value that this evidence was declared to come ``after``
    {record.kind} {record.id} {tenant}
    {each} {each.field}      one of the list, where evidence is read ``for_each``

A placeholder that can't be known is a `DeclarationError` when the module loads. A value that is missing, empty or not a plain
text, number or truth value is a `NoValue` when rendering: nothing is ever read at an address with a hole in it. In a URL every
value is percent-encoded, ``/`` included, and no value may become the path segment ``.`` or ``..``, which URLs resolve away.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.core.effect import Operation
from coordinator.core.evidence import EACH, ReadRequest
from coordinator.core.template import NoValue, Path, Root, Template

__all__ = ["OPERATION", "REQUEST", "NoValue", "Path", "Root", "Template"]

REQUEST: Mapping[str, Root[ReadRequest]] = {
    "input": Root(lambda request: request.input, 1, 16),
    "evidence": Root(lambda request: request.evidence, 2, 16),
    "record": Root(
        lambda request: {"kind": request.record_kind, "id": request.record_id},
        1,
        1,
        frozenset({"kind", "id"}),
    ),
    "tenant": Root(lambda request: request.tenant, 0, 0),
    EACH: Root(lambda request: request.evidence.get(EACH), 0, 16),
}
OPERATION: Mapping[str, Root[Operation]] = {
    "key": Root(lambda operation: operation.key, 0, 0),
    "tenant": Root(lambda operation: operation.tenant, 0, 0),
}
