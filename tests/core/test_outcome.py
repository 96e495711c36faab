"""Outcomes are a closed union of values with a JSON form."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from coordinator.core.canonical import canonical, parse
from coordinator.core.outcome import Commit, Decline, Effect, NeedMore, Outcome, Review, as_json
from coordinator.core.record import Change


class Terms(msgspec.Struct, frozen=True):
    price: int


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (
            Commit(Terms(5), [Change("quote", "q-1", Terms(5))], [Effect("send", {"to": {1: "a"}})]),
            {
                "kind": "commit",
                "terms": {"price": 5},
                "changes": [{"kind": "quote", "id": "q-1", "data": {"price": 5}}],
                "effects": [{"sink": "send", "payload": {"to": {"1": "a"}}}],
            },
        ),
        (Decline("too dear"), {"kind": "decline", "reason": "too dear"}),
        (Review("too large"), {"kind": "review", "reason": "too large"}),
        (NeedMore(["tone"]), {"kind": "need-more", "evidence": ["tone"]}),
    ],
)
def test_each_outcome_has_a_json_form_that_names_its_kind(outcome: Outcome, shown: Any) -> None:
    assert parse(canonical(as_json(outcome))) == shown


def test_the_kinds_of_outcomes_differ() -> None:
    kinds = [msgspec.inspect.type_info(arm) for arm in get_args(Outcome)]
    assert len({getattr(kind, "tag", None) for kind in kinds}) == 4


@pytest.mark.parametrize("value", [object(), {"a": {1, object()}}, lambda: None, 1j])
def test_what_has_no_json_form_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError):
        as_json(value)


def test_an_outcome_cannot_be_changed_once_it_is_made() -> None:
    outcome: Any = Decline("no")
    with pytest.raises(AttributeError):
        outcome.reason = "yes"
