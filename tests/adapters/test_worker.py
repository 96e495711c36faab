"""`adapters.worker.WorkerSource`: what a worker is told, and which one may have the task."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from adapters.template import NoValue
from adapters.worker import WorkerSource
from coordinator import Evidence, decision_type
from coordinator.core.evidence import LocalSource, RemoteSource
from coordinator.errors import DeclarationError
from tests.adapters.asking import Capacity, Site, ask
from tests.core.declaring import Request, promise_nothing


def test_it_is_a_remote_source_and_evidence_takes_it() -> None:
    declared: RemoteSource[Capacity] = WorkerSource("research", returns=Capacity)
    evidence = Evidence("findings", declared, deadline_ms=100)
    assert (evidence.by_worker, evidence.local, evidence.provider) == (declared, None, None)
    assert not isinstance(declared, LocalSource)
    assert declared.capability == "research"


def test_a_worker_is_told_the_input_the_evidence_before_and_the_record() -> None:
    told = WorkerSource("research", returns=Capacity).ask(ask(Site("sg-1")))
    assert told.request == {
        "input": msgspec.to_builtins(Site("sg-1")),
        "evidence": dict(ask(Site("sg-1")).evidence),
        "record": {"kind": "proposal", "id": "p-1"},
    }
    assert (told.pinned, told.may_fall_back) == (None, False)


def test_of_the_input_only_the_named_fields_are_sent() -> None:
    told = WorkerSource("research", returns=Capacity, sends=["site"]).ask(ask(Site("sg-1")))
    assert isinstance(told.request, dict)
    assert told.request["input"] == {"site": "sg-1"}


def test_a_pin_is_rendered_from_the_request() -> None:
    source = WorkerSource("research", returns=Capacity, worker="w-{input.site}", may_fall_back=True)
    told = source.ask(ask(Site("sg-1")))
    assert (told.pinned, told.may_fall_back) == ("w-sg-1", True)
    for site in ("", "x" * 64):
        with pytest.raises(NoValue):
            source.ask(ask(Site(site)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Research"},
        {"capability": "a b"},
        {"capability": "*"},
        {"returns": dict},
        {"may_fall_back": True},
        {"worker": "{nowhere}"},
    ],
)
def test_a_wrong_declaration_names_the_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_worker\.py"):
        WorkerSource(**{"name": "research", "returns": Capacity} | wrong)


@pytest.mark.parametrize("more", [{"sends": ["town"]}, {"worker": "{input.town}"}])
def test_what_it_asks_of_the_request_has_to_be_there(more: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match="town"):
        decision_type(
            "quote",
            request=Request,
            policy=promise_nothing,
            policy_version="1",
            evidence=[
                Evidence("findings", WorkerSource("research", returns=Capacity, **more), deadline_ms=100)
            ],
        )
