"""JSON as this service reads and writes it: strict on the way in, canonical (RFC 8785) on the way out.

Two spellings of one value must give one byte string, or fingerprints and digests mean nothing; and what two parsers could read
differently (duplicate keys, NaN, integers past 2^53, lone surrogates) must not come in at all. `parse` accepts exactly the
JSON that has one meaning; `canonical` writes its only spelling.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import rfc8785

if TYPE_CHECKING:
    JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
else:  # msgspec decodes into it, and has no name for a type that contains itself
    JsonValue = Any

MAX_INTEGER = 2**53 - 1
MAX_DEPTH = 32
_WRITTEN_AS_INTEGER = 1e21
"""RFC 8785 writes whole floats below this without an exponent."""

_sorted_json = msgspec.json.Encoder(order="sorted")
# RFC 8785 differs from msgspec's sorted output in three things only: how floats are written, how keys beyond ASCII are ordered,
# and that numbers without a meaning in JSON are refused. All are rare here, and all are visible in the bytes; a false alarm
# costs time, not correctness.
_needs_rfc8785 = re.compile(rb'["\[,]:?-?\d+(?:[.eE]|(?<=\d{16}))')
# How MessagePack spells a float64 that is not finite; no UTF-8 text contains these bytes.
_not_finite = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_suspect = re.compile(rb"\\u0000|null|\d{16}|\de(?:1[6-9]|20)(?!\w)")


class InvalidJson(ValueError):
    """The text is not JSON with exactly one meaning; ``pointer`` says where, if that is known."""

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.pointer = pointer


def parse(text: bytes) -> JsonValue:
    """Read strict JSON.

    Refuses, with `InvalidJson`: bytes that are not UTF-8, duplicate keys, NaN and infinities (spelled or overflowed), integers
    beyond ±(2^53-1) however they are spelled, NUL and lone surrogates in any string or key, and nesting deeper than 32. Whole
    floats come back as integers, so that ``1`` and ``1.0`` are one value, as they are in RFC 8785.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"not UTF-8 at byte {error.start}") from None
    try:
        value: JsonValue = _strict.decode(decoded)
    except RecursionError:
        raise InvalidJson(f"nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"not JSON: {error.msg} at character {error.pos}") from None
    if b"\\u" in text or text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        check(value)
    return value


def canonical(value: object, *, checked: bool = False) -> bytes:
    """The only spelling of a JSON value (RFC 8785). Raises ``ValueError`` for what has none (NaN, integers past 2^53).
    ``checked``: the value has passed `check`, or came from `parse`."""
    encoded = _sorted_json.encode(value)
    visible = not encoded.isascii() or _needs_rfc8785.search(b"," + encoded)
    if visible or (not checked and _hides_a_number(value, encoded)):
        return rfc8785.dumps(msgspec.to_builtins(value, str_keys=True))
    return encoded


def _hides_a_number(value: object, encoded: bytes) -> bool:
    """Whether a null may be NaN or an infinity."""
    return b"null" in encoded and _not_finite.search(msgspec.msgpack.encode(value)) is not None


def digest(data: bytes) -> str:
    """``sha256:<hex>`` of some canonical bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check(value: JsonValue) -> None:
    """Raise `InvalidJson` for what `parse` would not let in: a NUL, a lone surrogate, a number out of range, deep nesting."""
    try:
        encoded = msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError):
        encoded = b"null"
    # Almost every value passes here. NaN and infinities are encoded as null.
    if _suspect.search(encoded) or encoded.count(b"[") + encoded.count(b"{") > MAX_DEPTH:
        _check_each(value)


def _check_each(value: JsonValue) -> None:
    for pointer, depth, item in _walk(value, "", 1):
        if isinstance(item, str):
            _text(item, pointer)
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidJson("a number is not finite", pointer)
        elif isinstance(item, int | float) and _is_integer_beyond(item):
            raise InvalidJson("an integer is beyond ±(2^53-1)", pointer)
        elif depth > MAX_DEPTH and isinstance(item, list | dict):
            raise InvalidJson(f"nested deeper than {MAX_DEPTH}", pointer[:200])


def _walk(value: JsonValue, pointer: str, depth: int) -> Iterator[tuple[str, int, JsonValue]]:
    stack: list[tuple[str, int, JsonValue]] = [(pointer, depth, value)]
    while stack:
        pointer, depth, item = stack.pop()
        yield pointer, depth, item
        if isinstance(item, dict):
            for key, member in item.items():
                _text(key, pointer)
                stack.append((f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", depth + 1, member))
        elif isinstance(item, list):
            stack.extend((f"{pointer}/{index}", depth + 1, member) for index, member in enumerate(item))


def _text(text: str, pointer: str) -> None:
    if "\x00" in text:
        raise InvalidJson("a string contains NUL (U+0000)", pointer.replace("\x00", "\\u0000"))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidJson(
            "a string contains a lone surrogate", pointer.encode("utf-8", "replace").decode()
        ) from None


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    members = dict(pairs)
    if len(members) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise InvalidJson(f"the key {twice[:100]!a} stands twice in one object")
    return members


def _is_integer_beyond(number: float) -> bool:
    """Whether its canonical spelling is an integer that JSON readers do not agree on; ``1e16`` is, ``1e21`` is not."""
    if isinstance(number, int):
        return abs(number) > MAX_INTEGER
    return number.is_integer() and MAX_INTEGER < abs(number) < _WRITTEN_AS_INTEGER


def _integer(digits: str) -> int:
    if len(digits) > 17 or abs(number := int(digits)) > MAX_INTEGER:
        raise InvalidJson(f"the integer {digits[:24]} is beyond ±(2^53-1)")
    return number


def _float(digits: str) -> float | int:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise InvalidJson(f"the number {digits[:24]} is out of range")
    if _is_integer_beyond(number):
        raise InvalidJson(f"the integer {digits[:24]} is beyond ±(2^53-1)")
    if number.is_integer() and abs(number) <= MAX_INTEGER:
        return int(number)
    return number


def _no_constant(name: str) -> float:
    raise InvalidJson(f"{name} is not a JSON number")


_strict = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_no_constant
)
