"""Fit: whether what was found is of the type that its source declares. Asked when a worker reports, and again when the packet is made."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.core.canonical import InvalidJson, JsonValue, check
from coordinator.core.pointer import located, shortened


class Misfit(ValueError):
    """``pointer`` (RFC 6901) and ``what`` say where in the value and what is wrong there."""

    def __init__(self, message: str, pointer: str, what: str) -> None:
        super().__init__(message)
        self.pointer = pointer
        self.what = what


def fitted(value: object, kind: Any) -> JsonValue:
    """The value as JSON, of which a ``kind`` can be made. Raises `Misfit`."""
    try:
        plain: JsonValue = msgspec.to_builtins(value, str_keys=True)
        check(plain)
        msgspec.convert(plain, kind)
    except InvalidJson as error:
        raise Misfit(str(error), error.pointer, shortened(error.message)) from None
    except Exception as error:  # noqa: BLE001 - a type's own checks may raise anything, and the next report is none of theirs
        raise Misfit(str(error), *located(str(error))) from None
    return plain
