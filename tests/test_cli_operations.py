"""What the command line shows of effects and does to them: `operations ...`, `pools`, and the operations in `show`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest
from rich.console import Console

from coordinator.cli.effects import BY_STATE, effects, truth
from tests.api.ordering import Ordering, serving_orders
from tests.support.demo import as_json, coordinator_here
from tests.support.postgres import Databases

ABSENT = "01900000-0000-7000-8000-000000000000"
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def ordering(postgres: Databases) -> Iterator[Ordering]:
    url = postgres.create()
    with serving_orders(url) as made:
        yield made
    postgres.drop(url)


def ask(ordering: Ordering, *arguments: str, stranger: bool = False) -> Run:
    key = (ordering.stranger if stranger else ordering.client).key
    return coordinator_here(
        *arguments, env={"COORDINATOR_URL": ordering.address, "COORDINATOR_KEY": key or ""}
    )


def words(done: Run) -> str:
    """On one line, however wide the table was."""
    return " ".join(done.stdout.split())


# Lists --------------------------------------------------------------------------------------------------------------------------


def test_operations_without_a_command_are_listed(ordering: Ordering) -> None:
    ordering.faults()
    mail = ordering.once(ordering.order("mail"), mail="succeeded")["mail"]
    for command in (("operations",), ("operations", "list"), ("operations", "--state", "succeeded")):
        done = ask(ordering, *command)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert mail["id"] in done.stdout
    page = as_json(ask(ordering, "operations", "--state", "succeeded", "--limit", "1", "--json"))
    assert [item["id"] for item in page["items"]] == [mail["id"]]
    assert words(ask(ordering, "operations", "list", stranger=True)) == "No operations."


def test_the_help_of_operations_names_its_commands() -> None:
    said = coordinator_here("operations", "--help").stdout
    for name in ("list", "resolve", "retry", "compensate", "reconcile"):
        assert re.search(rf"^  {name} ", said, re.MULTILINE), name
        assert coordinator_here("operations", name, "--help").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("operations", "lost"),
        ("operations", "resolve", ABSENT),
        ("operations", "resolve", ABSENT, "--verdict", "maybe"),
        ("operations", "resolve", "x", "--verdict", "happened"),
        ("operations", "retry"),
        ("operations", "compensate", "x"),
        ("operations", "reconcile", "--wait", "-1"),
        ("pools", "bank"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = coordinator_here(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done


def test_pools_are_a_table_for_people_and_a_page_for_programs(ordering: Ordering) -> None:
    done = ask(ordering, "pools")
    assert done.returncode == 0
    assert re.search(r"^bank +░+ +0 / 64 +0 +– +– +– +closed *$", done.stdout, re.MULTILINE)
    page = as_json(ask(ordering, "pools", "--json"))
    assert [item["provider"] for item in page["items"]] == ["bank", "bank-refunds", "carrier", "mail"]
    assert page["next_cursor"] is None


def test_queues_are_a_picture_for_people_and_a_page_for_programs(ordering: Ordering) -> None:
    done = ask(ordering, "queues")
    assert done.returncode == 0
    assert re.search(r"^interactive +0 +░{20} +– +0 ", done.stdout, re.MULTILINE)
    page = as_json(ask(ordering, "queues", "--json"))
    assert [item["class"] for item in page["items"]] == ["urgent", "interactive", "bulk"]


# What a person does -------------------------------------------------------------------------------------------------------------


def test_a_person_resolves_what_nobody_knew(ordering: Ordering) -> None:
    id = ordering.uncertain_charge()["id"]
    done = ask(
        ordering,
        *("operations", "resolve", id, "--verdict", "happened", "--reference", "pay-81", "--note", "seen"),
    )
    assert done.returncode == 0, done
    assert "✓ charge succeeded · happened · 1 attempt · pay-81" in done.stdout
    assert id in done.stdout
    assert ordering.last_receipt(id)["note"] == "seen"


def test_the_answer_to_what_a_person_did_is_the_operation(ordering: Ordering) -> None:
    id = ordering.uncertain_charge()["id"]
    done = ask(ordering, "operations", "resolve", id, "--verdict", "did-not-happen", "--json")
    assert as_json(done)["state"] == "failed"
    assert as_json(done) == ordering.client.get(f"/v1/operations/{id}").json


def test_a_person_sends_a_failed_operation_again(ordering: Ordering) -> None:
    ordering.faults(mail={"status": 422, "times": 1})
    decision = ordering.order("mail")
    id = ordering.once(decision, mail="failed")["mail"]["id"]
    assert ask(ordering, "operations", "retry", id, "--note", "address mended").returncode == 0
    ordering.once(decision, mail="succeeded")


def test_a_person_has_an_operation_undone(ordering: Ordering) -> None:
    ordering.faults()
    decision = ordering.order("charge")
    id = ordering.once(decision, charge="succeeded")["charge"]["id"]
    assert ask(ordering, "operations", "compensate", id, "--note", "withdrawn").returncode == 0
    ordering.once(decision, charge="compensated", refund="succeeded")


def test_what_is_refused_is_exit_code_1_and_says_why(ordering: Ordering) -> None:
    ordering.faults()
    id = ordering.once(ordering.order("mail"), mail="succeeded")["mail"]["id"]
    for command in (("resolve", id, "--verdict", "happened"), ("retry", id), ("compensate", id)):
        done = ask(ordering, "operations", *command)
        assert (done.returncode, done.stdout) == (1, "")
        assert "state-conflict" in done.stderr
        told = ask(ordering, "operations", *command, "--json")
        assert (told.returncode, as_json(told)["code"]) == (1, "state-conflict")
        other = ask(ordering, "operations", *command, stranger=True)
        assert other.returncode == 1
        assert "not-found" in other.stderr


# Reconcile ----------------------------------------------------------------------------------------------------------------------
# Each of these leaves nothing uncertain behind: the next one speaks of everything that is.


@pytest.fixture
def nothing_uncertain(ordering: Ordering) -> None:
    ordering.faults()
    for item in ordering.client.get("/v1/operations?state=uncertain&limit=200").json["items"]:
        ordering.post(item["id"], "resolve", {"verdict": "did-not-happen"})


@pytest.mark.usefixtures("nothing_uncertain")
def test_where_nothing_is_uncertain_there_is_nothing_to_ask(ordering: Ordering) -> None:
    done = ask(ordering, "operations", "reconcile")
    assert (done.returncode, words(done)) == (0, "Nothing is uncertain.")
    told = ask(ordering, "operations", "reconcile", "--json")
    assert as_json(told) == {"asked": 0, "uncertain": 0, "items": []}


@pytest.mark.usefixtures("nothing_uncertain")
def test_what_the_provider_knows_is_resolved(ordering: Ordering) -> None:
    ordering.faults(ship={"lose_answer": True, "times": 1})
    ship = ordering.once(ordering.order("ship"), ship="uncertain")["ship"]
    done = ask(ordering, "operations", "reconcile", "--json")
    assert done.returncode == 0, done
    (item,) = as_json(done)["items"]
    assert (item["operation"], item["outcome"], item["state"]) == (ship["id"], "resolved", "succeeded")
    assert item["reference"]
    assert as_json(done)["asked"] == 1
    assert ordering.happened(ship["key"]) == 1


@pytest.mark.usefixtures("nothing_uncertain")
def test_what_stays_uncertain_is_told_with_its_reason_and_exit_code_1(ordering: Ordering) -> None:
    ordering.faults(
        charge={"lose_answer": True, "times": 1},
        ship={"status": 500, "times": 1},
        mail={"status": 422, "times": 1},
    )
    decision = ordering.order("charge", "ship", "mail")
    operations = ordering.once(decision, charge="uncertain", ship="uncertain", mail="failed")
    done = ask(ordering, "operations", "reconcile", "--wait", "2")
    assert done.returncode == 1, done
    assert "2 uncertain; providers are asked about 1." in words(done)
    assert re.search(rf"{operations['charge']['id']} +charge +still uncertain +uncertain", done.stdout)
    assert re.search(rf"{operations['ship']['id']} +ship +still uncertain +uncertain", done.stdout)
    assert "asked too early to be proof" in words(done)
    assert operations["mail"]["id"] not in done.stdout
    assert "operations resolve ID" in done.stderr


@pytest.mark.usefixtures("nothing_uncertain")
def test_what_no_provider_can_be_asked_about_is_not_waited_for(ordering: Ordering) -> None:
    charge = ordering.uncertain_charge()
    told = ask(ordering, "operations", "reconcile", "--wait", "3600", "--json")
    assert (told.returncode, as_json(told)["asked"], as_json(told)["uncertain"]) == (1, 0, 1)
    assert as_json(told)["items"][0]["reason"] == charge["reason"]


# Show ---------------------------------------------------------------------------------------------------------------------------


def shown(ordering: Ordering, decision: str) -> list[str]:
    done = ask(ordering, "show", decision)
    assert done.returncode == 0, done
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return lines[next(n for n, line in enumerate(lines) if line.startswith("operations")) :]


def test_show_tells_what_happened_what_did_not_and_what_nobody_knows(ordering: Ordering) -> None:
    ordering.faults(charge={"lose_answer": True, "times": 1}, mail={"status": 422, "times": 1})
    decision = ordering.order("charge", "mail", "ship")
    operations = ordering.once(decision, charge="uncertain", mail="failed", ship="succeeded")
    lines = shown(ordering, decision)
    assert lines[0] == "operations  1 unknown · 1 did not happen · 1 happened"
    assert lines[1].startswith("  ? charge uncertain · nobody knows whether it happened · 1 attempt · ")
    assert operations["charge"]["reason"][:40] in lines[1]
    assert lines[3].startswith("  ✗ mail failed · did not happen · 1 attempt · ")
    assert lines[5] == f"  ✓ ship succeeded · happened · 1 attempt · {operations['ship']['reference']}"
    assert lines[6] == f"    key {operations['ship']['key']}"


def test_show_tells_what_was_undone_and_by_what(ordering: Ordering) -> None:
    ordering.faults(mail={"status": 422, "times": 1})
    decision = ordering.order("charge", "mail", "ship", in_order=True, on_failure="compensate")
    ordering.once(decision, charge="compensated", mail="failed", ship="cancelled", refund="succeeded")
    lines = shown(ordering, decision)
    assert lines[0] == "operations  1 undone · 2 did not happen"
    assert lines[1].startswith("  ↩ charge compensated · happened, and was undone by refund · 1 attempt · ")
    assert lines[3].startswith("    ↳ ✓ refund succeeded · happened · 1 attempt · ")
    assert lines[5].startswith("  ✗ mail failed · did not happen")
    assert lines[7].startswith("  ✗ ship cancelled · did not and will not happen · effect ")


def test_show_tells_that_what_could_not_be_undone_stands(ordering: Ordering) -> None:
    ordering.faults(refund={"status": 422, "times": 1})
    decision = ordering.order("charge")
    id = ordering.once(decision, charge="succeeded")["charge"]["id"]
    assert ordering.post(id, "compensate", {}).status == 200
    ordering.once(decision, charge="succeeded", refund="failed")
    lines = shown(ordering, decision)
    assert lines[1].startswith("  ✓ charge succeeded · happened, and refund could not undo it · 1 attempt · ")
    assert lines[3].startswith("    ↳ ✗ refund failed · did not happen")


def test_show_tells_what_waits_for_what_and_that_cancelling_was_asked_for(ordering: Ordering) -> None:
    ordering.faults(charge={"lose_answer": True, "times": 1})
    decision = ordering.order("charge", "mail", in_order=True)
    ordering.once(decision, charge="uncertain")
    assert "  … mail ready · not sent yet, waits for charge" in shown(ordering, decision)
    ordering.client.call("POST", f"/v1/decisions/{decision}/cancel")
    lines = shown(ordering, decision)
    assert (
        "nobody knows whether it happened; cancelling was asked for: it will be undone if it happened"
        in (lines[1])
    )
    assert any(line.startswith("  ✗ mail cancelled · did not and will not happen") for line in lines)


def test_one_effect_is_not_counted(ordering: Ordering) -> None:
    ordering.faults()
    decision = ordering.order("mail")
    ordering.once(decision, mail="succeeded")
    assert shown(ordering, decision)[0] == "operations"


def test_without_details_an_effect_is_told_by_its_state_alone() -> None:
    console = Console(width=160, record=True)
    with console.capture() as said:
        console.print(effects([{"id": ABSENT, "effect": "mail", "state": "uncertain", "receipt": None}], {}))
    assert "? mail uncertain · nobody knows whether it happened" in said.get()


@pytest.mark.parametrize("state", ["ready", "dispatching"])
def test_what_an_earlier_attempt_may_have_done_is_unknown_while_it_is_repeated(state: str) -> None:
    assert truth(state, in_doubt=True) == BY_STATE["uncertain"]
    assert truth(state) != BY_STATE["uncertain"]


def test_a_state_of_a_newer_service_is_told_as_it_is() -> None:
    assert truth("suspended").words == "suspended"
