"""Bodies: bounded, strict JSON, exactly their type, and errors that point at the place."""

from __future__ import annotations

import inspect
import json
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar.types import Receive, Scope

from coordinator.api.body import read_json, typed
from coordinator.api.problems import UnsupportedMediaType
from coordinator.core.canonical import JsonValue
from coordinator.core.pointer import located
from coordinator.core.request import DecisionRequest
from coordinator.errors import BodyTooLarge, MalformedRequest

T = TypeVar("T")
LIMIT = 1000


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never has to wait."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("it waited")


def read(*chunks: bytes, headers: tuple[tuple[str, str], ...] = ()) -> JsonValue:
    asked = iter(range(len(chunks)))

    async def receive() -> Any:
        position = next(asked)
        return {"type": "http.request", "body": chunks[position], "more_body": position < len(chunks) - 1}

    assert inspect.iscoroutinefunction(receive)
    scope: Any = {"headers": [(name.encode(), value.encode()) for name, value in headers]}
    return at_once(read_json(cast(Scope, scope), cast(Receive, receive), LIMIT))


def content_type(text: str) -> JsonValue:
    return read(b"{}", headers=(("content-type", text),))


@pytest.mark.parametrize(
    "text",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/merge-patch+json",
    ],
)
def test_json_content_types_are_accepted(text: str) -> None:
    assert content_type(text) == {}


def test_a_missing_content_type_is_accepted() -> None:
    assert read(b"{}") == {}


@pytest.mark.parametrize(
    "text",
    ["text/plain", "application/xml", "application/json; charset=latin-1", "application/jsonp", "", "json"],
)
def test_other_content_types_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        content_type(text)


def test_a_compressed_body_is_refused() -> None:
    with pytest.raises(UnsupportedMediaType):
        read(b"{}", headers=(("content-encoding", "gzip"),))


def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_not() -> None:
    body = b'"' + b"a" * (LIMIT - 2) + b'"'
    assert read(body) == "a" * (LIMIT - 2)
    assert read(body[:300], body[300:600], body[600:]) == "a" * (LIMIT - 2)
    with pytest.raises(BodyTooLarge):
        read(body + b" ")


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large() -> None:
    with pytest.raises(BodyTooLarge):
        read(b" " * 600, b" " * 600, b"never asked for", b"{}")


def test_a_body_that_declares_too_much_is_refused_unread() -> None:
    with pytest.raises(BodyTooLarge):
        read(headers=(("content-length", "1001"),))
    with pytest.raises(BodyTooLarge):
        read(headers=(("content-length", "9" * 5000),))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nul",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b"[Infinity]",
        b"[-Infinity]",
        b"1e400",
        b"9007199254740992",
        b"-9007199254740992",
        b"1" * 900,
        b'"\\u0000"',
        b'{"\\u0000":1}',
        b'"\\ud800"',
        b'"\x00"',
        b"[" * 33 + b"]" * 33,
        b"[" * 490 + b"]" * 490,
        b"{} {}",
        b"'a'",
        b"[1,]",
        b"01",
        b"\x00",
    ],
)
def test_json_without_exactly_one_meaning_is_malformed(text: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read(text)


@given(st.binary(max_size=200))
def test_whatever_bytes_come_they_are_json_or_malformed(text: bytes) -> None:
    try:
        value = read(text)
    except MalformedRequest:
        return
    assert json.loads(text.decode()) == value


def pointers(body: JsonValue) -> list[str]:
    with pytest.raises(MalformedRequest) as raised:
        typed(body, DecisionRequest)
    errors = raised.value.extra["errors"]
    assert isinstance(errors, list)
    return [error["pointer"] for error in errors]


GOOD: dict[str, Any] = {"type": "quote", "input": {}}


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ([], ""),
        ("text", ""),
        ({"input": {}}, "/type"),
        (GOOD | {"extra": 1}, "/extra"),
        (GOOD | {"a/b~c": 1}, "/a~1b~0c"),
        (GOOD | {"type": 1}, "/type"),
        (GOOD | {"input": []}, "/input"),
        (GOOD | {"record": {"kind": "a"}}, "/record/id"),
        (GOOD | {"record": {"kind": "a", "id": "b", "x": 1}}, "/record/x"),
        (GOOD | {"record": {"kind": "a", "id": 5}}, "/record/id"),
        (GOOD | {"record": {"kind": "a", "id": "b", "expected_version": "8"}}, "/record/expected_version"),
        (GOOD | {"record": {"kind": "a", "id": "b", "expected_version": -1}}, "/record/expected_version"),
        (GOOD | {"record": {"kind": "", "id": "b"}}, "/record/kind"),
        (GOOD | {"ceiling": {"amount_minor": 1.5, "currency": "SGD"}}, "/ceiling/amount_minor"),
        (GOOD | {"ceiling": {"amount_minor": 1, "currency": "XXQ"}}, "/ceiling"),
        (GOOD | {"time_limit_ms": 0}, "/time_limit_ms"),
        (GOOD | {"class": None}, "/class"),
    ],
)
def test_an_error_points_at_the_member_that_is_wrong(body: JsonValue, pointer: str) -> None:
    assert pointers(body) == [pointer]


def test_a_pointer_ends_where_the_names_are_not_told() -> None:
    assert located("Expected `int`, got `str` - at `$.a[3].b[...].c`") == (
        "/a/3/b",
        "Expected `int`, got `str`",
    )


def test_an_endless_field_name_is_not_told_whole() -> None:
    with pytest.raises(MalformedRequest) as raised:
        typed(GOOD | {"x" * 100_000: 1}, DecisionRequest)
    assert len(raised.value.detail) < 1000
