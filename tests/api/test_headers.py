"""Reading headers: strict for keys and preconditions, lenient for preferences and traces."""

from __future__ import annotations

from typing import Any, cast

import pytest
from litestar.types import Scope

from coordinator.api.headers import Preference, expected_version, idempotency_key, preference, traceparent
from coordinator.errors import (
    IdempotencyKeyInvalid,
    IdempotencyKeyMissing,
    MalformedRequest,
    PreconditionRequired,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def scope(*headers: tuple[str, str]) -> Scope:
    raw: Any = {"headers": [(name.encode(), value.encode("latin-1")) for name, value in headers]}
    return cast(Scope, raw)


def key(text: str) -> str:
    return idempotency_key(scope(("idempotency-key", text)))


def test_a_quoted_and_a_bare_key_are_the_same() -> None:
    assert key('"abc"') == key("abc") == key(" abc ") == "abc"


def test_escapes_in_a_quoted_key_are_undone() -> None:
    assert key(r'"a\"b\\c"') == r'a"b\c'


def test_a_key_may_have_255_characters_and_no_more() -> None:
    assert key("k" * 255) == key('"' + "k" * 255 + '"') == "k" * 255
    with pytest.raises(IdempotencyKeyInvalid):
        key("k" * 256)


@pytest.mark.parametrize(
    "text",
    ["", '""', "a b", "a, b", '"a', '"a"b', '"a";x', '"a b"', r'"a\n"', "caf\xe9", "a\tb", "\x7f", '"'],
)
def test_what_is_not_visible_ascii_is_no_key(text: str) -> None:
    with pytest.raises(IdempotencyKeyInvalid):
        key(text)


def test_a_missing_key_is_told_apart_from_an_invalid_one() -> None:
    with pytest.raises(IdempotencyKeyMissing):
        idempotency_key(scope())


def test_two_keys_are_invalid_even_if_they_are_equal() -> None:
    with pytest.raises(IdempotencyKeyInvalid):
        idempotency_key(scope(("idempotency-key", "a"), ("idempotency-key", "a")))


def preferred(*fields: str) -> Preference:
    return preference(scope(*(("prefer", field) for field in fields)), default_wait_s=10, max_wait_s=60)


@pytest.mark.parametrize(
    ("fields", "wait_s", "applied"),
    [
        ([], 10, None),
        (["wait=5"], 5, b"wait=5"),
        (['wait="5"'], 5, b"wait=5"),
        (["WAIT = 5"], 5, b"wait=5"),
        (["wait=0"], 0, b"wait=0"),
        (["wait=999999999"], 60, b"wait=60"),
        (["respond-async"], 0, b"respond-async"),
        (["Respond-Async"], 0, b"respond-async"),
        (["respond-async; q=1"], 0, b"respond-async"),
        (["respond-async, wait=7"], 7, b"wait=7"),
        (["respond-async", "wait=7"], 7, b"wait=7"),
        (["wait=7, wait=9"], 7, b"wait=7"),
        (["handling=lenient, wait=7"], 7, b"wait=7"),
        (['foo="a, wait=3", wait=7'], 7, b"wait=7"),
        (['foo; p="x,y", wait=7'], 7, b"wait=7"),
    ],
)
def test_preferences_that_are_understood(fields: list[str], wait_s: float, applied: bytes | None) -> None:
    assert preferred(*fields) == Preference(wait_s, applied)


@pytest.mark.parametrize(
    "field",
    [
        "",
        ",",
        "wait",
        "wait=",
        "wait=-1",
        "wait=1.5",
        "wait=ten",
        "wait=1e3",
        "respond-async=1",
        "=5",
        '"wait=5',
        "(((",
    ],
)
def test_a_preference_that_cannot_be_read_is_ignored(field: str) -> None:
    assert preferred(field) == Preference(10)


def test_a_malformed_preference_does_not_hide_the_next_one() -> None:
    assert preferred("@@ nonsense @@, wait=7") == Preference(7, b"wait=7")


def test_an_endless_preference_is_read_in_linear_time() -> None:
    assert preferred('a="' * 10_000) == preferred("a;" * 15_000) == Preference(10)


def version(*headers: tuple[str, str]) -> int:
    return expected_version(scope(*headers))


def test_if_match_names_the_version_and_if_none_match_says_there_is_none() -> None:
    assert version(("if-match", '"8"')) == 8
    assert version(("if-none-match", "*")) == 0


def test_a_write_without_a_precondition_is_refused() -> None:
    with pytest.raises(PreconditionRequired):
        version()


@pytest.mark.parametrize(
    "headers",
    [
        [("if-match", 'W/"8"')],
        [("if-match", "8")],
        [("if-match", '"08"')],
        [("if-match", '"-8"')],
        [("if-match", '"abc"')],
        [("if-match", '"9007199254740992"')],
        [("if-match", '"7", "8"')],
        [("if-match", "*")],
        [("if-match", "")],
        [("if-none-match", '"8"')],
        [("if-match", '"8"'), ("if-none-match", "*")],
        [("if-match", '"8"'), ("if-match", '"8"')],
    ],
)
def test_a_precondition_that_is_not_exact_is_malformed(headers: list[tuple[str, str]]) -> None:
    with pytest.raises(MalformedRequest):
        version(*headers)


def trace(text: str) -> str | None:
    return traceparent(scope(("traceparent", text)))


def test_a_valid_traceparent_is_passed_on() -> None:
    assert trace(f"00-{TRACE}-00f067aa0ba902b7-01") == f"00-{TRACE}-00f067aa0ba902b7-01"


def test_a_later_version_is_read_as_version_00() -> None:
    assert trace(f"cc-{TRACE}-00f067aa0ba902b7-01-what-will-be") == f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        f"ff-{TRACE}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-00f067aa0ba902b7-01",
        f"00-{TRACE}-00f067aa0ba902b7-01-more",
        f"00-{TRACE}-00f067aa0ba902b7",
    ],
)
def test_an_invalid_traceparent_is_ignored(text: str) -> None:
    assert trace(text) is None


def test_two_traceparents_are_none() -> None:
    header = ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")
    assert traceparent(scope(header, header)) is None
