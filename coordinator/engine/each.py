"""Each: one piece of evidence that is read for every member of a list, all at once, into one item.

The members are found in the request or in earlier evidence. Every member is a reading of its own, with its own attempts, state,
flight and age, inside the provider's limits; the deadline is that of the whole. As soon as the whole cannot be found any more, what
is still under way is cancelled. The item holds the members' values only if it is found: part of a list is never taken for all of it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import anyio
import msgspec

from coordinator.core.canonical import JsonValue, canonical, digest
from coordinator.core.each import hopeless, state_of
from coordinator.core.evidence import Evidence, Item, ItemError, ReadRequest, clean_text
from coordinator.core.likeness import value_at
from coordinator.core.money import total
from coordinator.engine.items import item_of, no_answer
from coordinator.engine.run import Engine, Reading

ReadOne = Callable[[JsonValue, Item | None], Awaitable[Reading]]
"""Reads one member; the item is what it was before, if this is a re-reading."""
SHOWN = 5


async def read_each(
    engine: Engine,
    declared: Evidence[Any, Any],
    request: ReadRequest,
    read_one: ReadOne,
    then: Reading | None,
) -> Reading:
    began = time.monotonic()
    members = _members(declared, request)
    if isinstance(members, ItemError):
        return no_answer(declared, "failed", began, 0, members)
    before = then.parts if then and len(then.parts) == len(members) else [None] * len(members)
    parts: dict[int, Reading] = {}

    async def one(index: int) -> None:
        known = before[index]
        parts[index] = await read_one(members[index], known.item if known else None)
        if hopeless([part.item.state for part in parts.values()], len(members), declared.need):
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in range(len(members)):
            tasks.start_soon(one, index)
    for index in range(len(members)):
        if index not in parts:
            parts[index] = no_answer(declared, "cancelled", began, 1)
    return _whole(engine, declared, members, [parts[index] for index in range(len(members))], began)


def _members(declared: Evidence[Any, Any], request: ReadRequest) -> list[JsonValue] | ItemError:
    path = (declared.for_each or "").split(".")
    members = value_at(request, path)
    if members is None:
        return ItemError("no-list", f"{declared.for_each} is not there")
    plain = msgspec.to_builtins(members, str_keys=True)
    if not isinstance(plain, list):
        return ItemError("no-list", f"{declared.for_each} is not a list")
    if len(plain) > declared.max_items:
        return ItemError(
            "too-many-items", f"{declared.for_each} has {len(plain)}; at most {declared.max_items}"
        )
    return plain


def _whole(
    engine: Engine,
    declared: Evidence[Any, Any],
    members: Sequence[JsonValue],
    parts: Sequence[Reading],
    began: float,
) -> Reading:
    items = [part.item for part in parts]
    state = state_of([item.state for item in items], declared.need)
    value, error = None, None
    if state == "found":
        value = cast(JsonValue, {"items": [_one(*each) for each in zip(members, items, strict=True)]})
        if len(msgspec.json.encode(value)) > (limit := engine.settings.max_evidence_bytes):
            value, state = None, "failed"
            error = ItemError("value-too-large", f"more than {limit} bytes")
    else:
        error = ItemError("not-enough-found", _summary(members, items))
    how = {item.reading for item in items}
    whole = item_of(
        declared,
        state,
        began,
        sum(item.attempts for item in items),
        value=value,
        revision=_revision(items),
        error=error,
        cost=total([item.cost for item in items if item.cost is not None]),
        reading=how.pop() if len(how) == 1 else "own",
    )
    return Reading(whole, min((part.began for part in parts), default=began), parts=tuple(parts))


def _one(member: JsonValue, item: Item) -> dict[str, JsonValue]:
    error = cast(JsonValue, msgspec.to_builtins(item.error)) if item.error else None
    return {"of": member, "state": item.state, "value": item.value, "error": error}


def _revision(items: Sequence[Item]) -> str | None:
    """Of the whole, where all have one."""
    revisions: list[JsonValue] = [item.revision for item in items if item.revision is not None]
    return digest(canonical(revisions)) if revisions and len(revisions) == len(items) else None


def _summary(members: Sequence[JsonValue], items: Sequence[Item]) -> str:
    missing = [(member, item) for member, item in zip(members, items, strict=True) if item.state != "found"]
    named = [
        f"{msgspec.json.encode(member).decode()[:60]}: {item.state}{f' ({item.error.code})' if item.error else ''}"
        for member, item in missing[:SHOWN]
    ]
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return clean_text(f"{len(items) - len(missing)} of {len(items)} found; {', '.join(named)}{more}")
