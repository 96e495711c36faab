"""What follows from a verdict, as a table."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from coordinator.core.review import (
    Asked,
    Done,
    Go,
    NothingProposed,
    NotOpen,
    Stale,
    Standing,
    Wait,
    judge,
)

APPROVAL = Asked(by="reviewer", verdict="approve", etag="1")
REJECTION = Asked(by="reviewer", verdict="reject", etag="1")
OPEN = Standing(
    status="in_review",
    etag="1",
    was_in_review=True,
    has_proposal=True,
    held=False,
    abandoned=False,
    unconfirmed=False,
    over=False,
    latest=None,
)


@pytest.mark.parametrize(
    ("changes", "asked", "kind"),
    [
        ({}, APPROVAL, Go),
        ({}, REJECTION, Go),
        ({"has_proposal": False}, APPROVAL, NothingProposed),
        ({"has_proposal": False}, REJECTION, Go),
        ({"was_in_review": False, "status": "committed"}, APPROVAL, NotOpen),
        ({"was_in_review": False, "status": "running"}, REJECTION, NotOpen),
        ({"etag": "2"}, APPROVAL, Stale),
        ({"etag": "2"}, REJECTION, Stale),
        ({"over": True}, APPROVAL, Stale),
        # somebody carries out an approval
        ({"held": True}, REJECTION, Stale),
        ({"held": True, "etag": "2", "latest": APPROVAL}, APPROVAL, Wait),
        ({"held": True, "etag": "2", "latest": APPROVAL}, REJECTION, Stale),
        # its process died
        ({"abandoned": True, "etag": "2", "latest": APPROVAL}, APPROVAL, Go),
        ({"abandoned": True, "etag": "2", "latest": APPROVAL}, REJECTION, Stale),
        ({"abandoned": True, "etag": "1", "latest": APPROVAL}, REJECTION, Go),
        # it could not be confirmed
        ({"unconfirmed": True, "etag": "2", "latest": APPROVAL}, APPROVAL, Go),
        ({"unconfirmed": True, "etag": "2", "latest": APPROVAL}, REJECTION, Stale),
        ({"unconfirmed": True, "etag": "2", "latest": REJECTION}, APPROVAL, Stale),
        ({"unconfirmed": True, "etag": "2", "held": True, "latest": APPROVAL}, APPROVAL, Wait),
        ({"unconfirmed": True, "etag": "2", "over": True, "latest": APPROVAL}, APPROVAL, Stale),
        # it was carried out, and what was shown had moved
        ({"etag": "2", "latest": APPROVAL}, APPROVAL, Stale),
        # it is over
        ({"status": "committed", "latest": APPROVAL}, APPROVAL, Done),
        ({"status": "failed", "latest": APPROVAL}, APPROVAL, Done),
        ({"status": "declined", "latest": REJECTION}, REJECTION, Done),
        ({"status": "declined", "latest": APPROVAL}, APPROVAL, Stale),
        ({"status": "expired", "latest": APPROVAL}, APPROVAL, Stale),
        ({"status": "committed", "latest": APPROVAL}, REJECTION, Stale),
        ({"status": "committed", "latest": REJECTION}, APPROVAL, Stale),
    ],
)
def test_what_follows_from_a_verdict(changes: dict[str, Any], asked: Asked, kind: type[Any]) -> None:
    assert isinstance(judge(msgspec.structs.replace(OPEN, **changes), asked), kind)


@pytest.mark.parametrize("field", ["by", "verdict", "etag"])
def test_another_key_verdict_or_etag_is_not_the_same_verdict_again(field: str) -> None:
    other = msgspec.structs.replace(APPROVAL, **{field: "reject" if field == "verdict" else "other"})
    for status in ("committed", "declined", "failed"):
        assert isinstance(judge(msgspec.structs.replace(OPEN, status=status, latest=APPROVAL), other), Stale)


def test_nothing_but_an_open_review_is_ever_begun() -> None:
    """Over every way a decision can stand: a verdict goes on only if it is in review, in time, and nobody carries one out."""
    flags = [False, True]
    for status, was, proposal, held, abandoned, unconfirmed, over, latest, asked in itertools.product(
        ["in_review", "committed", "declined", "expired", "running"],
        flags,
        flags,
        flags,
        flags,
        flags,
        flags,
        [None, APPROVAL, REJECTION],
        [APPROVAL, REJECTION],
    ):
        now = Standing(
            status=status,
            etag="1",
            was_in_review=was,
            has_proposal=proposal,
            held=held,
            abandoned=abandoned,
            unconfirmed=unconfirmed,
            over=over,
            latest=latest,
        )
        if isinstance(judge(now, asked), Go):
            assert (status, was, held, over) == ("in_review", True, False, False)
