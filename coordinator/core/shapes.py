"""Shapes: what the type of a value has to look like, checked when it is declared."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from coordinator.core.freshness import Decisive, Freshness
from coordinator.errors import DeclarationError

UNIONS = (UnionType, Union)  # of generic structs, ``A[int] | B`` is the latter


def check_decisive_fields(name: str, returns: Any, freshness: Freshness, where: str) -> None:
    """Raises `DeclarationError` for what is no struct, and for decisive fields that it has not."""
    if not is_struct(returns):
        raise DeclarationError(
            f"evidence {name!r}: its source returns {returns!r}; it must be a msgspec.Struct", where
        )
    if isinstance(freshness, Decisive):
        arms = get_args(returns) if get_origin(returns) in UNIONS else (returns,)
        known = {field.encode_name for arm in arms for field in msgspec.structs.fields(arm)}
        for field in freshness.fields:
            if field not in known:
                raise DeclarationError(
                    f"evidence {name!r}: decisive field {field!r} is not one of {sorted(known)}", where
                )


def is_struct(kind: Any) -> bool:
    """Whether a type is a msgspec.Struct, or a union of them."""
    if get_origin(kind) in UNIONS:
        return all(is_struct(arm) for arm in get_args(kind))
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, msgspec.Struct)
