"""JSON comes in with one meaning and goes out with one spelling (RFC 8785)."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.core.canonical import MAX_DEPTH, InvalidJson, JsonValue, canonical, check, digest, parse

BEYOND = 2**53
INTEGERS = st.integers(-BEYOND + 1, BEYOND - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
# The separators, quotes and digits that decide between the fast and the exact path are drawn far more often than by chance.
TEXTS = st.text() | st.text(alphabet='":,[]{}\\-0123456789.eE\x01\x1f\x7fé€😀ￓ', max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


def refusal(text: bytes) -> InvalidJson:
    with pytest.raises(InvalidJson) as refused:
        parse(text)
    return refused.value


def nested(depth: int, text: bytes = b"") -> bytes:
    return b"[" * depth + text + b"]" * depth


def is_readable(value: Any) -> bool:
    """Whether `parse` lets it in: no NUL and no integer beyond 2^53-1 in disguise."""
    try:
        check(value)
    except InvalidJson:
        return False
    return True


@given(VALUES)
@example({"a": 1.0, "b": 1e21, "c": 1e-7, "d": -0.0, "e": 5e-324})
@example({"ￓ": 1, "😀": 2, "a": 3})  # UTF-16 order is not the order of code points
@example([1.5])
@example(1.5)
@example({'":1': {"x": [0.1]}})
@example("\x00\x01\x08\x09\x0a\x0c\x0d\x1f\x7f\u2028")
@example([1e16, 1e20, 123456789012345680000.0])
def test_every_value_is_spelled_as_rfc8785_spells_it(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)


@given(VALUES.filter(is_readable))
@example([1e21, 1e300, 0.1, 1e-30])
def test_what_was_written_is_read_back_as_the_same_value(value: Any) -> None:
    assert parse(canonical(value)) == value


@settings(max_examples=50)
@given(VALUES.filter(is_readable))
def test_a_value_that_was_read_is_written_the_same_way_again(value: Any) -> None:
    assert canonical(parse(canonical(value))) == canonical(value)


@settings(max_examples=50)
@given(VALUES.filter(is_readable))
def test_two_spellings_of_one_value_are_one_byte_string(value: Any) -> None:
    spelled = json.dumps(value, indent=3, ensure_ascii=True).encode()
    assert canonical(parse(spelled)) == canonical(value)


class Inner(msgspec.Struct, frozen=True, tag="inner", tag_field="kind"):
    zebra: float
    apple: int | None = None


class Outer(msgspec.Struct, frozen=True):
    z: Inner
    class_: str = msgspec.field(name="class")
    counts: dict[str, int]


def test_structs_are_spelled_as_the_json_objects_they_stand_for() -> None:
    assert canonical(Outer(Inner(2.0), "é", {"b": 9, "a": 10})) == (
        '{"class":"é","counts":{"a":10,"b":9},"z":{"apple":null,"kind":"inner","zebra":2}}'.encode()
    )


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, BEYOND, -BEYOND, 2**64, 2**70],
)
def test_a_number_that_json_cannot_hold_is_never_written_not_even_as_null(value: float) -> None:
    for holder in (value, [value], {"a": {"b": [None, value]}}, Inner(value)):
        with pytest.raises(ValueError, match=r".+"):
            canonical(holder)


def test_a_lone_surrogate_is_never_written() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        canonical({"a": "\ud800"})


def test_a_digest_names_its_algorithm() -> None:
    assert digest(b"{}") == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"9007199254740991", BEYOND - 1),
        (b"-9007199254740991", -BEYOND + 1),
        (b"1e-30", 1e-30),
        (b"1e-400", 0),
        (b"1.0", 1),
        (b"1e2", 100),
        (b"-0", 0),
        (b"-0.0", 0),
        (b"1e21", 1e21),
        (b'"\\ud83d\\ude00"', "😀"),
        (b' {"a" : [ true , null ] }\n', {"a": [True, None]}),
    ],
)
def test_json_with_one_meaning_is_read(text: bytes, value: JsonValue) -> None:
    assert parse(text) == value


@pytest.mark.parametrize("text", [b"1.0", b"1e2", b"-0.0", b"-0", b"0.0"])
def test_a_whole_number_is_an_integer_however_it_is_spelled(text: bytes) -> None:
    assert type(parse(text)) is int
    assert b"." not in canonical(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":2}',
        b'{"x":[{"b":{},"c":1,"b":{}}]}',
    ],
)
def test_a_key_that_stands_twice_in_one_object_is_refused(text: bytes) -> None:
    assert "stands twice" in refusal(text).message


def test_the_refusal_of_a_huge_duplicate_key_is_short() -> None:
    key = b'"' + b"k" * 100_000 + b'":1'
    assert len(refusal(b"{" + key + b"," + key + b"}").message) < 200


def test_a_duplicate_among_very_many_keys_is_found_without_comparing_each_with_each() -> None:
    members = b",".join(b'"%d":1' % number for number in range(100_000))
    assert "'99999'" in refusal(b"{" + members + b',"99999":1}').message


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b'{"a":[NaN]}',
        b"1e400",
        b"-1e400",
        b"9007199254740992",
        b"-9007199254740992",
        b"1" * 400,
        b"9007199254740992.0",
        b"9007199254740993.0",
        b"1e16",
        b"-1.5e20",
    ],
)
def test_a_number_out_of_range_is_refused_however_it_is_spelled(text: bytes) -> None:
    refusal(text)
    refusal(b'{"a":[' + text + b"]}")


@pytest.mark.parametrize(
    "text",
    [
        b'"\\u0000"',
        b'{"\\u0000":1}',
        b'{"a":{"b\\u0000":1}}',
        b'["x\\u0000y"]',
        b'"\x00"',
        b'{"\\ud800":1}',
        b'"\\ud800"',
        b'"\\udc00"',
        b'"\\ude00\\ud83d"',
        b'"\\ud83dx\\ude00"',
        b'["\\ud83d","\\ude00"]',
        b'{"\\ud83d":"\\ude00"}',
        b'"a\nb"',
        b'"\x1f"',
    ],
)
def test_a_string_that_cannot_be_stored_everywhere_is_refused(text: bytes) -> None:
    refusal(text)


def test_nesting_is_accepted_to_exactly_thirty_two_levels() -> None:
    assert MAX_DEPTH == 32
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        parse(opened * 32 + b"1" + closed * 32)
        refusal(opened * 33 + b"1" + closed * 33)
    parse(nested(32))
    refusal(nested(33))


@pytest.mark.parametrize("depth", [33, 1_000, 100_000])
def test_nesting_beyond_any_stack_is_refused_like_any_other(depth: int) -> None:
    assert "nested deeper than 32" in refusal(nested(depth)).message


def test_many_brackets_side_by_side_are_not_nesting() -> None:
    assert parse(b"[" + b"[]," * 100 + b"{}]") == [*([[]] * 100), {}]
    assert parse(b'"' + b"[" * 100 + b'"') == "[" * 100


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"  ",
        b"\xff",
        b'"\xed\xa0\x80"',  # a surrogate in UTF-8
        b'"\xc0\x80"',  # an overlong NUL
        b"\xef\xbb\xbf{}",  # a byte order mark
        b"\xff\xfe{\x00}\x00",  # UTF-16
        b"{} {}",
        b"{}x",
        b"[1,]",
        b"{'a':1}",
        b"01",
        b"+1",
        b".5",
        b"1_000",
        b"tru",
        b"// 1\n1",
    ],
)
def test_what_is_not_json_in_utf8_is_refused(text: bytes) -> None:
    refusal(text)


@given(st.binary(max_size=40) | st.text(alphabet='[]{}":,0123456789eE.-\\u', max_size=30).map(str.encode))
def test_any_bytes_are_either_read_or_refused(text: bytes) -> None:
    try:
        value = parse(text)
    except InvalidJson:
        return
    check(value)
    assert parse(canonical(value)) == value


@pytest.mark.parametrize(
    ("value", "pointer"),
    [
        (math.nan, ""),
        ({"a": [1, {"b": math.nan}]}, "/a/1/b"),
        ([math.inf, None], "/0"),
        ({"a/b~c": -math.inf}, "/a~1b~0c"),
        ([BEYOND], "/0"),
        ({"n": -BEYOND}, "/n"),
        ([2**70], "/0"),
        ([1e16], "/0"),
        ([9007199254740992.0], "/0"),
        ({"a": -123456789012345680000.0}, "/a"),
        ({"a": "x\x00"}, "/a"),
        ({"a": {"\x00": 1}}, "/a"),
        ({"a": "\udfff"}, "/a"),
        ({"\ud800": 1}, ""),
    ],
)
def test_a_check_names_the_place_of_what_reading_would_not_let_in(value: Any, pointer: str) -> None:
    with pytest.raises(InvalidJson) as refused:
        check(value)
    assert refused.value.pointer == pointer


@given(VALUES)
def test_a_check_refuses_just_what_cannot_be_written_and_read_back(value: Any) -> None:
    try:
        parse(canonical(value))
    except InvalidJson:
        assert not is_readable(value)
    else:
        assert is_readable(value)


def test_a_check_accepts_null_and_digits_inside_strings() -> None:
    check({"a": None, "b": [None], "c": "null", "d": "12345678901234567890", "e": "NaN", "f": True})
    check({"at": BEYOND - 1, "digest": "sha256:3e16", "large": 1e21, "small": 1e-30})


def test_a_check_counts_nesting_as_reading_does() -> None:
    deep: JsonValue = 1
    for _ in range(32):
        deep = [deep]
    check(deep)
    with pytest.raises(InvalidJson, match="nested deeper"):
        check([deep])
