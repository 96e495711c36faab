"""What people do to operations over HTTP: resolve, retry, compensate, ask the providers again."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from coordinator.api import examples
from tests.api.ordering import Ordering
from tests.api.serving import Client, Reply, tenant
from tests.support.waiting import eventually_now

ABSENT = "01900000-0000-7000-8000-000000000000"
HAPPENED = {"verdict": "happened"}


def same(reply: Reply) -> tuple[int, bytes]:
    return reply.status, reply.body


# Resolve ------------------------------------------------------------------------------------------------------------------------


def test_an_uncertain_operation_that_happened_succeeds_with_the_reference_that_was_seen(
    ordering: Ordering,
) -> None:
    operation = ordering.uncertain_charge()
    assert operation["in_doubt"] is True
    assert ordering.happened(operation["key"]) == 1
    answer = ordering.post(operation["id"], "resolve", examples.RESOLUTION)
    assert answer.status == 200
    assert (answer.json["state"], answer.json["reference"]) == ("succeeded", "crm-4711")
    assert answer.json["in_doubt"] is False
    assert answer.json == ordering.client.get(f"/v1/operations/{operation['id']}").json
    receipt = ordering.last_receipt(operation["id"])
    assert (receipt["verdict"], receipt["note"]) == ("happened", examples.RESOLUTION["note"])
    assert receipt["resolved_by"]
    assert ordering.kinds(operation["id"])[-1] == "operation.succeeded"


def test_one_that_did_not_happen_fails_and_what_waited_for_it_is_never_sent(ordering: Ordering) -> None:
    ordering.faults(charge={"lose_answer": True, "times": 1})
    decision = ordering.order("charge", "mail", in_order=True)
    operations = ordering.once(decision, charge="uncertain")
    assert operations["mail"]["state"] == "ready"
    answer = ordering.post(
        operations["charge"]["id"], "resolve", {"verdict": "did-not-happen", "note": "the bank says so"}
    )
    assert (answer.json["state"], answer.json["reason"]) == ("failed", "resolved by hand: the bank says so")
    mail = ordering.once(decision, mail="cancelled")["mail"]
    assert mail["reason"] == "effect charge is failed"
    assert ordering.happened(mail["key"]) == 0


def test_what_waited_for_a_resolved_operation_is_sent(ordering: Ordering) -> None:
    ordering.faults(charge={"lose_answer": True, "times": 1})
    decision = ordering.order("charge", "mail", in_order=True)
    charge = ordering.once(decision, charge="uncertain")["charge"]
    assert ordering.post(charge["id"], "resolve", HAPPENED).status == 200
    mail = ordering.once(decision, mail="succeeded")["mail"]
    assert mail["after"] == [charge["ordinal"]]
    assert ordering.happened(mail["key"]) == 1


def test_only_an_uncertain_operation_can_be_resolved(ordering: Ordering) -> None:
    ordering.faults()
    mail = ordering.once(ordering.order("mail"), mail="succeeded")["mail"]
    before = ordering.kinds(mail["id"])
    refused = ordering.post(mail["id"], "resolve", HAPPENED)
    assert (refused.status, refused.code) == (409, "state-conflict")
    assert "succeeded" in refused.json["detail"]
    assert ordering.kinds(mail["id"]) == before


def test_of_two_people_the_second_is_told_that_it_is_resolved(ordering: Ordering) -> None:
    id = ordering.uncertain_charge()["id"]
    assert ordering.post(id, "resolve", {"verdict": "did-not-happen"}).status == 200
    assert ordering.post(id, "resolve", HAPPENED).code == "state-conflict"
    assert ordering.client.get(f"/v1/operations/{id}").json["state"] == "failed"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/verdict"),
        ({"verdict": "maybe"}, "/verdict"),
        ({"verdict": "happened", "extra": 1}, "/extra"),
        ({"verdict": "happened", "note": "x" * 501}, "/note"),
        ({"verdict": "happened", "reference": 7}, "/reference"),
        ([], ""),
        (b"", ""),
    ],
)
def test_a_resolution_that_cannot_be_understood_changes_nothing(
    ordering: Ordering, parked: str, body: object, pointer: str
) -> None:
    refused = ordering.post(parked, "resolve", body)
    assert (refused.status, refused.code) == (400, "malformed-request")
    assert refused.json["errors"][0]["pointer"] == pointer
    assert ordering.client.get(f"/v1/operations/{parked}").json["state"] == "uncertain"


@pytest.fixture(scope="module")
def parked(ordering: Ordering) -> str:
    """An operation that stays uncertain."""
    id: str = ordering.uncertain_charge()["id"]
    return id


# Retry --------------------------------------------------------------------------------------------------------------------------


def test_a_failed_operation_is_sent_again_under_its_key(ordering: Ordering) -> None:
    ordering.faults(mail={"status": 422, "times": 1})
    decision = ordering.order("mail")
    failed = ordering.once(decision, mail="failed")["mail"]
    answer = ordering.post(failed["id"], "retry", examples.NOTE)
    assert answer.status == 200
    assert answer.json["state"] in ("ready", "dispatching", "succeeded")
    again = ordering.once(decision, mail="succeeded")["mail"]
    assert again["key"] == failed["key"]
    assert ordering.happened(again["key"]) == 1
    receipts = ordering.client.get(f"/v1/receipts?operation={again['id']}&kind=operation.ready").json["items"]
    assert receipts[-1]["body"]["note"] == examples.NOTE["note"]


def test_only_a_failed_operation_can_be_retried(ordering: Ordering, parked: str) -> None:
    refused = ordering.post(parked, "retry", {})
    assert (refused.status, refused.code) == (409, "state-conflict")
    assert "uncertain" in refused.json["detail"]


# Compensate ---------------------------------------------------------------------------------------------------------------------


def test_a_compensated_operation_is_undone_by_an_operation_of_its_own(ordering: Ordering) -> None:
    ordering.faults()
    decision = ordering.order("charge", "mail")
    charge = ordering.once(decision, charge="succeeded", mail="succeeded")["charge"]
    assert charge["has_compensation"] is True
    answer = ordering.post(charge["id"], "compensate", {"note": "the customer withdrew"})
    assert answer.status == 200
    assert answer.json["state"] in ("compensating", "compensated")
    operations = ordering.once(decision, charge="compensated", refund="succeeded", mail="succeeded")
    assert operations["refund"]["compensates"] == charge["ordinal"]
    assert ordering.happened(operations["refund"]["key"]) == 1
    assert ordering.kinds(charge["id"])[-2:] == ["operation.compensating", "operation.compensated"]


def test_what_declares_no_compensation_cannot_be_undone(ordering: Ordering) -> None:
    ordering.faults()
    mail = ordering.once(ordering.order("mail"), mail="succeeded")["mail"]
    assert mail["has_compensation"] is False
    refused = ordering.post(mail["id"], "compensate", {})
    assert (refused.status, refused.code) == (409, "state-conflict")
    assert "no compensation" in refused.json["detail"]


def test_only_what_succeeded_can_be_undone_and_only_once(ordering: Ordering, parked: str) -> None:
    assert ordering.post(parked, "compensate", {}).code == "state-conflict"
    ordering.faults()
    decision = ordering.order("charge")
    charge = ordering.once(decision, charge="succeeded")["charge"]
    assert ordering.post(charge["id"], "compensate", {}).status == 200
    ordering.once(decision, charge="compensated")
    assert ordering.post(charge["id"], "compensate", {}).code == "state-conflict"
    assert ordering.happened(ordering.operations(decision)["refund"]["key"]) == 1


def test_a_failure_undoes_its_siblings_where_the_outcome_says_so(ordering: Ordering) -> None:
    ordering.faults(mail={"status": 422, "times": 1})
    decision = ordering.order("charge", "mail", in_order=True, on_failure="compensate")
    operations = ordering.once(decision, charge="compensated", mail="failed", refund="succeeded")
    assert ordering.happened(operations["charge"]["key"]) == 1
    assert ordering.happened(operations["refund"]["key"]) == 1


def test_cancelling_after_the_commit_shows_that_it_was_asked_for(ordering: Ordering) -> None:
    ordering.faults(ship={"lose_answer": True, "times": 1})
    decision = ordering.order("ship")
    ordering.once(decision, ship="uncertain")
    assert ordering.client.call("POST", f"/v1/decisions/{decision}/cancel").status == 200
    ship = ordering.operations(decision)["ship"]
    assert (ship["state"], ship["cancel_requested"]) == ("uncertain", True)


# Reconcile ----------------------------------------------------------------------------------------------------------------------


def test_reconciling_asks_about_what_can_be_asked_and_nothing_else(ordering: Ordering, parked: str) -> None:
    ordering.faults(ship={"lose_answer": True, "times": 1})
    decision = ordering.order("ship")
    ship = ordering.once(decision, ship="uncertain")["ship"]
    assert (ship["lookups"], ordering.happened(ship["key"])) == (0, 1)
    answer = ordering.client.call("POST", "/v1/operations/reconcile", examples.NOTHING)
    assert answer.status == 200
    assert answer.json["asked"] >= 1
    found = ordering.once(decision, ship="succeeded")["ship"]
    assert (found["lookups"], found["in_doubt"]) == (1, False)
    assert ordering.happened(ship["key"]) == 1
    assert ordering.client.get(f"/v1/operations/{parked}").json["state"] == "uncertain"
    eventually_now(lambda: ordering.client.get("/v1/operations?state=dispatching").json["items"] == [])


def test_reconciling_where_nothing_is_uncertain_asks_about_nothing(ordering: Ordering) -> None:
    answer = ordering.stranger.call("POST", "/v1/operations/reconcile", {})
    assert (answer.status, answer.json) == (200, {"asked": 0})


@pytest.mark.parametrize("body", [b"", b"{", {"all": True}, [1]])
def test_reconciling_takes_an_object_without_members(ordering: Ordering, body: object) -> None:
    refused = ordering.client.call("POST", "/v1/operations/reconcile", body)
    assert (refused.status, refused.code) == (400, "malformed-request")


# Who may ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body"), [("resolve", HAPPENED), ("retry", {}), ("compensate", {})], ids=lambda value: str(value)
)
def test_another_tenants_operation_and_an_absent_one_answer_alike(
    ordering: Ordering, parked: str, verb: str, body: object
) -> None:
    replies = [
        ordering.stranger.call("POST", f"/v1/operations/{id}/{verb}", body) for id in (parked, ABSENT, "x")
    ]
    assert {reply.code for reply in replies} == {"not-found"}
    assert same(replies[0]) == same(replies[1])
    assert ordering.client.get(f"/v1/operations/{parked}").json["state"] == "uncertain"


@pytest.mark.parametrize("verb", ["resolve", "retry", "compensate"])
def test_a_key_without_the_scope_operate_changes_nothing(ordering: Ordering, parked: str, verb: str) -> None:
    _, key = asyncio.run(tenant(ordering.url, "first", "decide", "audit", "admin", "review"))
    refused = Client(ordering.address, key).call("POST", f"/v1/operations/{parked}/{verb}", HAPPENED)
    assert (refused.status, refused.code) == (403, "missing-scope")
    assert ordering.client.get(f"/v1/operations/{parked}").json["state"] == "uncertain"


def test_the_examples_are_what_the_endpoints_take(ordering: Ordering, parked: str) -> None:
    for verb, example in (("retry", examples.NOTE), ("compensate", examples.NOTE)):
        assert ordering.post(parked, verb, msgspec.to_builtins(example)).code == "state-conflict"
