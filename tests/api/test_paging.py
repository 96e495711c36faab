"""Query strings and cursors: what cannot be read exactly is an error."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from uuid import UUID

import pytest

from coordinator.api.paging import (
    cursor,
    id_before,
    index_after,
    limit_of,
    page,
    parse_query,
    time_of,
    uuid,
    uuid_of,
)
from coordinator.errors import MalformedRequest

ID = UUID("0192f0c1-2222-7333-8444-555566667777")


def test_a_query_is_decoded() -> None:
    assert parse_query(b"record=a%2Fb+c&x=", frozenset({"record", "x"})) == {"record": "a/b c", "x": ""}


@pytest.mark.parametrize("query", [b"other=1", b"x=1&x=2", b"x=%ff", b"x=%00", b"%ff=1", b"x=1&other"])
def test_a_query_with_anything_unknown_twice_or_undecodable_is_malformed(query: bytes) -> None:
    with pytest.raises(MalformedRequest):
        parse_query(query, frozenset({"x"}))


@pytest.mark.parametrize(("text", "limit"), [("1", 1), ("200", 200), ("0050", 50)])
def test_limits_within_bounds(text: str, limit: int) -> None:
    assert limit_of({"limit": text}) == limit


@pytest.mark.parametrize("text", ["0", "201", "-1", "1.0", "", "ten", "٣", "99999999999999999999"])
def test_limits_out_of_bounds_are_malformed(text: str) -> None:
    with pytest.raises(MalformedRequest):
        limit_of({"limit": text})


def test_the_default_limit_is_fifty() -> None:
    assert limit_of({}) == 50


def test_a_cursor_comes_back_as_its_position() -> None:
    assert id_before({"cursor": cursor("decisions", ID) or ""}, "decisions") == ID
    assert index_after({"cursor": cursor("receipts", 0) or ""}, "receipts") == 0
    assert id_before({}, "decisions") is None


def test_every_altered_cursor_is_malformed() -> None:
    good = cursor("decisions", ID) or ""
    altered = [good[:n] + ("A" if good[n] != "A" else "B") + good[n + 1 :] for n in range(len(good))]
    for text in [*altered, good[:-1], good + "A", good + "=", "", "!", "é", good + " "]:
        with pytest.raises(MalformedRequest):
            id_before({"cursor": text}, "decisions")


def test_a_cursor_of_another_list_is_malformed() -> None:
    with pytest.raises(MalformedRequest):
        id_before({"cursor": cursor("operations", ID) or ""}, "decisions")


@pytest.mark.parametrize("text", [b"nonsense", b"", b"-1", b"9" * 30, b"\xff"])
def test_a_forged_cursor_with_a_right_checksum_is_malformed_too(text: bytes) -> None:
    check = hashlib.sha256(b"decisions\x00" + text).digest()[:6]
    forged = base64.urlsafe_b64encode(check + text).rstrip(b"=").decode()
    with pytest.raises(MalformedRequest):
        id_before({"cursor": forged}, "decisions")
    with pytest.raises(MalformedRequest):
        index_after({"cursor": forged}, "decisions")


def test_an_id_has_one_spelling() -> None:
    assert uuid(str(ID)) == ID
    for text in (str(ID).upper(), ID.hex, f"{{{ID}}}", f"urn:uuid:{ID}", "1", ""):
        assert uuid(text) is None
    with pytest.raises(MalformedRequest):
        uuid_of({"decision": ID.hex}, "decision")


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-29T10:00:00Z",
        "2026-11-29t18:00:00+08:00",
        "2026-11-29T18:00:00 08:00",
        "2026-11-29T10:00:00.000000Z",
    ],
)
def test_times_are_read_in_any_zone(text: str) -> None:
    assert time_of({"since": text}, "since") == datetime(2026, 11, 29, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-29",
        "2026-11-29T10:00:00",
        "2026-13-29T10:00:00Z",
        "now",
        "",
        "0001-01-01T00:00:00+14:00",
        "2026-11-29T24:61:00Z",
    ],
)
def test_other_times_are_malformed(text: str) -> None:
    with pytest.raises(MalformedRequest):
        time_of({"since": text}, "since")


def test_a_page_is_an_envelope_around_bytes() -> None:
    assert page([b'{"a":1}', b"2"], "next") == b'{"items":[{"a":1},2],"next_cursor":"next"}'
    assert page([], None) == b'{"items":[],"next_cursor":null}'
