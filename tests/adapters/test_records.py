"""`adapters.records.RecordSource`: which record of our own database a reading is about."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.records import RecordSource
from adapters.template import NoValue
from coordinator.core.evidence import Evidence, LocalSource
from coordinator.errors import DeclarationError
from tests.adapters.asking import Capacity, Site, ask


def test_it_is_a_local_source_and_evidence_takes_it() -> None:
    declared: LocalSource[Capacity] = RecordSource("site-plan", "plan", "{input.site}", returns=Capacity)
    assert (declared.name, declared.record_kind, declared.returns) == ("site-plan", "plan", Capacity)
    assert Evidence("plan", declared, deadline_ms=100).source is declared
    assert not hasattr(declared, "read")


def test_the_id_is_rendered_without_encoding() -> None:
    declared = RecordSource("site-plan", "plan", "{input.site}:{record.id}", returns=Capacity)
    assert declared.record_id(ask(Site("sg/1 é"))) == "sg/1 é:p-1"


@pytest.mark.parametrize("site", ["", "a\x00b", "\udfff", "x" * 256])
def test_a_request_that_names_no_record_is_no_absence(site: str) -> None:
    with pytest.raises(NoValue):
        RecordSource("site-plan", "plan", "{input.site}", returns=Capacity).record_id(ask(Site(site)))


@pytest.mark.parametrize(
    ("kind", "id", "returns"),
    [
        ("", "{input.site}", Capacity),
        ("plan", "", Capacity),
        ("plan", "{site}", Capacity),
        ("plan", "{input.site}", dict),
    ],
)
def test_a_wrong_declaration_names_the_line(kind: str, id: str, returns: type[Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_records\.py"):
        RecordSource("site-plan", kind, id, returns=returns)
