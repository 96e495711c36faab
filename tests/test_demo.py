"""The demo: one command, one line that tells everything, processes that end together, and a tour that would complain."""

from __future__ import annotations

import signal
import stat
import urllib.request
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator import Money
from coordinator.api.examples import DECISION, RECORD
from coordinator.demo.ledger import Effect
from coordinator.demo.proposal import Proposal, allowed, in_currency
from coordinator.embedded import running_url
from coordinator.store.keys import SCOPES
from tests.support.demo import as_json, coordinator, demo_process, lives
from tests.support.postgres import data_folder
from tests.support.waiting import eventually_now


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, Any]]:
    with data_folder() as folder, demo_process(folder / "demo") as process:
        yield process.ready


def send(
    demo: dict[str, Any], method: str, path: str, body: object = None, scope: str = "decide", **headers: str
) -> tuple[int, Any]:
    request = urllib.request.Request(
        demo["url"] + path,
        data=None if body is None else msgspec.json.encode(body),
        method=method,
        headers={
            "Authorization": f"Bearer {demo['keys'][scope]}",
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, msgspec.json.decode(error.read())


def quote(demo: dict[str, Any], key: str, record: str, **input: object) -> dict[str, Any]:
    body = {
        **DECISION,
        "input": {**DECISION["input"], **input},
        "record": {"kind": "proposal", "id": record},
    }
    status, decision = send(demo, "POST", "/v1/decisions", body, Idempotency_Key=key)
    assert status == 201, decision
    return dict(decision)


def test_the_line_of_a_ready_demo_holds_addresses_one_key_per_scope_and_pids(demo: dict[str, Any]) -> None:
    assert set(demo) == {"url", "providers_url", "database_url", "keys", "pids"}
    assert set(demo["keys"]) == set(SCOPES)
    assert set(demo["pids"]) == {"server", "providers", "postgres"}
    assert all(lives(pid) for pid in demo["pids"].values())


def test_the_documented_example_commits_against_a_fresh_demo(demo: dict[str, Any]) -> None:
    status, decision = send(demo, "POST", "/v1/decisions", DECISION, Idempotency_Key="example")
    assert (status, decision["status"]) == (201, "committed")
    assert decision["record"]["committed_version"] == 1
    assert decision["outcome"]["terms"]["price"]["currency"] == "SGD"


def test_the_documented_record_is_accepted_by_the_demo(demo: dict[str, Any]) -> None:
    status, record = send(demo, "PUT", "/v1/records/proposal/by-hand", RECORD, If_None_Match="*")
    assert (status, record["version"]) == (201, 1)


def test_an_accepted_proposal_cannot_go_back_to_draft(demo: dict[str, Any]) -> None:
    accepted = {"state": "accepted", "price": {"amount_minor": 1, "currency": "SGD"}}
    send(demo, "PUT", "/v1/records/proposal/accepted", accepted, If_None_Match="*")
    status, problem = send(demo, "PUT", "/v1/records/proposal/accepted", RECORD, If_Match='"1"')
    assert (status, problem["code"]) == (422, "transition-refused")
    assert quote(demo, "too-late", "accepted")["status"] == "declined"


def test_more_hours_than_are_free_are_declined(demo: dict[str, Any]) -> None:
    decision = quote(demo, "many-hours", "many-hours", hours=9999)
    assert (decision["status"], decision["operations"]) == ("declined", [])
    assert "9999 h asked for" in decision["outcome"]["reason"]


def test_a_large_discount_goes_to_a_person(demo: dict[str, Any]) -> None:
    decision = quote(demo, "discount", "discount", discount_percent=50)
    assert (decision["status"], decision["operations"]) == ("in_review", [])


def test_the_delivery_date_is_the_tenth_working_day_of_the_customers_country(demo: dict[str, Any]) -> None:
    decision = quote(demo, "xmas", "xmas", start="2026-12-18")
    assert decision["outcome"]["terms"]["delivery"] == "2027-01-05", (
        "Christmas and New Year are no working days"
    )


def test_a_price_is_exact_and_rounds_half_up_to_the_currencys_own_unit() -> None:
    assert in_currency(100_00, "1.4282", 0, "SGD") == Money(142_82, "SGD")
    assert in_currency(100_00, "169.35", 0, "JPY") == Money(16_935, "JPY")
    assert in_currency(1, "1.5", 0, "USD") == Money(2, "USD")
    assert in_currency(354_000, "1.4282", 15, "SGD") == Money(429_745, "SGD")


def test_a_quoted_proposal_needs_a_positive_price() -> None:
    assert allowed(None, Proposal("quoted", None, date(2026, 1, 5)))
    assert allowed(None, Proposal("quoted", Money(0, "SGD")))
    assert allowed(None, Proposal("draft")) is None
    assert allowed(Proposal("accepted", Money(1, "SGD")), Proposal("accepted", Money(1, "SGD"))) is None


def test_a_second_demo_on_the_folder_is_refused_and_sigterm_ends_the_first_with_all_its_processes() -> None:
    with data_folder() as folder, demo_process(folder / "demo") as process:
        refused = coordinator("demo", "--no-tour", "--json", "--data", str(folder / "demo"))
        assert refused.returncode == 1
        assert "in use by another coordinator" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert process.returncode is None
        assert process.stop() == 0
        assert not [name for name, pid in process.ready["pids"].items() if lives(pid)]


def test_a_killed_demo_takes_its_processes_with_it_and_the_next_one_finds_everything() -> None:
    with data_folder() as folder, demo_process(folder / "demo", "--processes", "2") as process:
        first = process.ready
        decision = quote(first, "kept", "kept")
        process.kill()
        eventually_now(
            lambda: not any(map(lives, first["pids"].values())), 20, what="its children have ended"
        )
        process.start()
        assert process.ready["keys"] == first["keys"]
        status, found = send(process.ready, "GET", f"/v1/decisions/{decision['id']}")
        assert (status, found["status"]) == (200, "committed")
        assert stat.S_IMODE((folder / "demo" / "keys.json").stat().st_mode) == 0o600


def test_the_tour_ends_with_0_if_ledger_and_receipts_agree_and_with_1_if_not() -> None:
    with data_folder() as folder:
        taken = coordinator("demo", "--once", "--json", "--data", str(folder / "demo"))
        assert taken.returncode == 0, taken
        assert as_json(taken) == {"agrees": True, "complaints": [], "effects": 7, "matched": 7}
        with (folder / "demo" / "providers" / "ledger.jsonl").open("ab") as ledger:
            forged = Effect(
                at=0.0,
                name="send-quote",
                key="somebody-else",
                count=1,
                reference="",
                payload=msgspec.Raw(b"{}"),
            )
            ledger.write(msgspec.json.encode(forged) + b"\n")
        again = coordinator("demo", "--once", "--json", "--data", str(folder / "demo"))
        assert again.returncode == 1, again
        complaint = "somebody-else: the provider has an effect that we know nothing of"
        assert as_json(again) == {"agrees": False, "complaints": [complaint], "effects": 15, "matched": 14}


def test_once_and_no_tour_exclude_each_other(tmp_path: Path) -> None:
    assert coordinator("demo", "--once", "--no-tour", "--data", str(tmp_path)).returncode == 2


def test_ctrl_c_while_it_starts_leaves_no_process_behind() -> None:
    with data_folder() as folder:
        process = demo_process(folder / "demo")
        try:
            process._spawn()
            eventually_now(lambda: (folder / "demo" / "providers.log").exists(), 30)
            assert process._child is not None
            process._child.send_signal(signal.SIGINT)
            assert process._child.wait(30) == 0
        finally:
            process.kill()
        assert running_url(folder / "demo" / "postgres") is None
