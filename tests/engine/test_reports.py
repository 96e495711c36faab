"""What a worker reports is judged by what this process has declared; what it does not know passes."""

from __future__ import annotations

import pytest

from coordinator.core.canonical import JsonValue
from coordinator.core.task import Completed, NotCompleted, encode_answer
from coordinator.engine.reports import Reports
from coordinator.errors import BodyTooLarge, MalformedRequest
from coordinator.store.claims import Held, Report
from tests.workers.research import coordinator

FINDINGS = {"type": "question", "evidence": "findings", "source": "research", "ceiling_currency": None}
REPORTS = Reports(coordinator.types, 100)


def refusal(answer: Completed | NotCompleted, **of: str | None) -> type | None:
    state = "completed" if isinstance(answer, Completed) else "failed"
    report = Report(task=None, token=1, state=state, encoded=encode_answer(answer))  # type: ignore[arg-type]  # it has no say
    refused = REPORTS.refusal(Held(**FINDINGS | of), report)  # type: ignore[arg-type]  # a dict's values have one type
    return None if refused is None else type(refused)


@pytest.mark.parametrize(
    ("result", "refused"),
    [
        ({"summary": "bees dance"}, None),
        (None, None),
        ({"summary": 7}, MalformedRequest),
        ({"summary": "x" * 100}, BodyTooLarge),
    ],
)
def test_a_result_has_to_be_what_its_source_declares(result: JsonValue, refused: type | None) -> None:
    assert refusal(Completed(result=result)) is refused


@pytest.mark.parametrize("of", [{"type": "newer"}, {"evidence": "newer"}, {"source": "newer"}])
def test_what_another_release_asked_for_passes(of: dict[str, str]) -> None:
    assert refusal(Completed(result={"summary": 7}), **of) is None


def test_a_failure_has_no_result_to_be_wrong() -> None:
    assert refusal(NotCompleted(code="closed-today")) is None
