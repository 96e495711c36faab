"""Server-sent events: what is written is parsed again, however it is cut; and the parser does what the HTML standard says."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.sse import HEARTBEAT, Frame, FrameTooLarge, Parser, written


def parsed(*pieces: bytes) -> list[Frame]:
    parser = Parser()
    return [frame for piece in pieces for frame in parser.feed(piece)]


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[first:last] for first, last in pairwise(edges)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(JSON, min_size=1, max_size=4), st.lists(st.integers(0, 5_000), max_size=12))
def test_what_is_written_is_parsed_again_wherever_it_is_cut(values: list[object], places: list[int]) -> None:
    whole = HEARTBEAT.join(
        written("part", json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"), n)
        for n, value in enumerate(values)
    )
    frames = parsed(*cut(whole, places))
    assert [frame.id for frame in frames] == [str(n) for n in range(len(values))]
    assert [frame.event for frame in frames] == ["part"] * len(values)
    assert frames == parsed(whole)


LINES = st.lists(
    st.sampled_from(
        [
            "data: a",
            "data:b",
            "data",
            "data:  c",
            "event: x",
            "id: 7",
            "id: \0",
            "id",
            ": note",
            "retry: 10",
            "junk: é",
            "",
            "",
            "\ufeff",
        ]
    )
)


@given(LINES, st.lists(st.sampled_from(["\n", "\r", "\r\n"]), min_size=1), st.lists(st.integers(0, 500)))
def test_cutting_a_stream_changes_nothing_whichever_line_ends_it_has(
    lines: list[str], ends: list[str], places: list[int]
) -> None:
    whole = "".join(line + ends[n % len(ends)] for n, line in enumerate(lines)).encode()
    one_by_one = parsed(*(whole[n : n + 1] for n in range(len(whole))))
    assert one_by_one == parsed(whole) == parsed(*cut(whole, places))


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_no_bytes_at_all_make_it_raise(junk: bytes, places: list[int]) -> None:
    assert parsed(*cut(junk, places)) == parsed(junk)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("data: YHOO\ndata: +2\ndata: 10\n\n", [Frame("message", "YHOO\n+2\n10", "")]),
        (": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n",
         [Frame("message", "first event", "1"), Frame("message", "second event", "")]),
        ("data\n\ndata\ndata\n\ndata:", [Frame("message", "", ""), Frame("message", "\n", "")]),
        ("data:test\n\ndata: test\n\n", [Frame("message", "test", ""), Frame("message", "test", "")]),
        ("\ufeffdata: with a mark\n\n", [Frame("message", "with a mark", "")]),
        ("event: e\n\ndata: x\n\n", [Frame("message", "x", "")]),
        ("id: 1\n\nid: a\0b\ndata: x\n\n", [Frame("message", "x", "1")]),
        ("data: cut off", []),
    ],
)  # fmt: skip
def test_the_examples_of_the_standard(stream: str, expected: list[Frame]) -> None:
    assert parsed(stream.encode()) == expected


def test_how_long_to_wait_before_coming_back_is_read() -> None:
    parser = Parser()
    assert list(parser.feed(b"retry: 1500\nretry: x\n\n")) == []
    assert parser.retry_ms == 1500


@pytest.mark.parametrize("endless", [b"data: aaaaaaaaaa\n", b"aaaaaaaaaaaaaaaa", b":aaaaaaaaaaaaaaa\n"])
def test_an_event_without_an_end_is_not_collected_for_ever(endless: bytes) -> None:
    parser = Parser(max_chars=1_000)
    with pytest.raises(FrameTooLarge):
        [frame for _ in range(1_000) for frame in parser.feed(endless)]


def test_a_frame_is_what_it_says() -> None:
    assert written("rest", msgspec.json.encode({"a": 1}), 12) == b'id: 12\nevent: rest\ndata: {"a":1}\n\n'
