"""The command line: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.demo.launch import Process, package_environment
from tests.support.demo import COMMAND, as_json, coordinator, coordinator_here, demo_process
from tests.support.postgres import data_folder

INPUT = '{"customer": "c-7", "site": "sg-1", "hours": 16, "currency": "SGD"}'
PROPOSAL = "coordinator.demo.proposal:coordinator"
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, Any]]:
    with data_folder() as folder, demo_process(folder / "demo") as process:
        yield process.ready


def settings(demo: dict[str, Any], scope: str) -> dict[str, str]:
    return {"COORDINATOR_URL": demo["url"], "COORDINATOR_KEY": demo["keys"][scope]}


def ask(demo: dict[str, Any], *arguments: str, scope: str = "decide") -> Run:
    return coordinator_here(*arguments, env=settings(demo, scope))


def decided(demo: dict[str, Any], record: str, *options: str) -> Any:
    done = ask(
        demo,
        *("decide", "proposal-quote", "--input", INPUT, "--record", f"proposal/{record}", "--json"),
        *options,
    )
    assert done.returncode == 0, done
    return as_json(done)


# Client commands ----------------------------------------------------------------------------------------------------------------


def test_decide_shows_the_decision_and_its_idempotency_key(demo: dict[str, Any]) -> None:
    done = ask(demo, "decide", "proposal-quote", "--input", INPUT, "--record", "proposal/shown")
    assert done.returncode == 0, done
    assert "committed" in done.stdout
    assert "gather" in done.stdout
    assert re.search(r"idempotency key cli-\S+", done.stderr)


def test_the_same_key_id_prints_the_same_bytes(demo: dict[str, Any]) -> None:
    command = ("decide", "proposal-quote", "--input", INPUT, "--record", "proposal/same", "--json")
    first, again = (ask(demo, *command, "--key-id", "cli-same") for _ in range(2))
    assert first.stdout == again.stdout
    assert (first.returncode, again.returncode) == (0, 0)


def test_input_may_come_from_a_file(demo: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "input.json").write_text(INPUT)
    done = ask(
        demo,
        *(
            "decide",
            "proposal-quote",
            "--input",
            f"@{tmp_path}/input.json",
            "--record",
            "proposal/file",
            "--json",
        ),
    )
    assert as_json(done)["input"] == msgspec.json.decode(INPUT)


def test_a_stale_version_is_exit_code_1_and_says_what_to_do_next(demo: dict[str, Any]) -> None:
    command = ("decide", "proposal-quote", "--input", INPUT, "--record", "proposal/stale")
    done = ask(demo, *command, "--expected-version", "7")
    assert done.returncode == 1
    assert "stale-version" in done.stderr
    assert "decide anew" in done.stderr
    told = ask(demo, *command, "--expected-version", "7", "--json")
    assert (told.returncode, as_json(told)["code"]) == (1, "stale-version")


@pytest.mark.parametrize(
    "arguments",
    [
        ("decide", "proposal-quote", "--input", "{"),
        ("decide", "proposal-quote", "--input", "[]"),
        ("decide", "proposal-quote", "--input", "@no-such-file"),
        ("decide", "proposal-quote", "--input", "{}", "--record", "p-1"),
        ("decide", "proposal-quote", "--input", "{}", "--expected-version", "1"),
        ("show", "not-a-uuid"),
        ("operations", "--state", "lost"),
        ("operations", "--url", "ftp://127.0.0.1"),
        ("serve", "no_such_module:coordinator"),
        ("serve", "coordinator.demo.proposal"),
        ("keys", "create"),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = coordinator_here(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr


def test_a_refused_input_is_told_by_field(demo: dict[str, Any]) -> None:
    wrong = INPUT.replace("16", '"many"')
    done = ask(demo, "decide", "proposal-quote", "--input", wrong, "--record", "proposal/refused")
    assert done.returncode == 1
    assert "/input/hours" in done.stderr


def test_without_a_key_the_message_says_how_to_get_one(demo: dict[str, Any]) -> None:
    done = coordinator_here("decisions", "--url", demo["url"])
    assert done.returncode == 1
    assert "coordinator keys create" in done.stderr


def test_where_nothing_answers_the_message_says_how_to_start_a_service() -> None:
    done = coordinator_here("decisions", "--url", "http://127.0.0.1:9", "--key", "k")
    assert done.returncode == 1
    assert "coordinator serve" in done.stderr


def test_show_draws_stages_evidence_fence_and_operations(demo: dict[str, Any]) -> None:
    decision = decided(demo, "drawn")
    done = ask(demo, "show", decision["id"])
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    for stage in ("admit", "gather", "decide", "fence", "commit"):
        assert any(re.match(rf"{stage} .*[━╸].* \d+ ms", line) for line in lines), stage
    for name in ("capacity", "customer", "cost", "rate", "start", "delivery", "tone"):
        assert any(re.match(rf"  {name} .* \d+ ms  (found|failed|timed_out)", line) for line in lines), name
    assert "✓ capacity.available_hours" in done.stdout
    assert f"key {decision['id']}.send-quote.0" in done.stdout
    assert as_json(ask(demo, "show", decision["id"], "--json"))["id"] == decision["id"]


def test_decide_follow_tells_events_as_they_happen_and_then_draws_the_decision(demo: dict[str, Any]) -> None:
    done = ask(
        demo, "decide", "proposal-quote", "--input", INPUT, "--record", "proposal/followed", "--follow"
    )
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    events = [line.split()[0] for line in lines[: lines.index("")]]
    assert events[0] == "queued"
    assert events.count("evidence") == 7
    assert [event for event in events if event in ("outcome", "fence", "rest")] == [
        "outcome",
        "fence",
        "rest",
    ]
    assert events[-1] == "operation"
    assert "committed" in lines[lines.index("") + 1]


def test_show_follow_tells_programs_one_event_a_line(demo: dict[str, Any]) -> None:
    decision = decided(demo, "followed-json")
    done = ask(demo, "show", decision["id"], "--follow", "--json")
    assert done.returncode == 0, done
    events = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    assert [event["id"] for event in events] == sorted({event["id"] for event in events})
    assert events[-1]["event"] == "decision"
    assert events[-1]["data"]["id"] == decision["id"]


def test_following_what_is_not_there_is_exit_code_1(demo: dict[str, Any]) -> None:
    done = ask(demo, "show", "00000000-0000-7000-8000-000000000000", "--follow")
    assert done.returncode == 1
    assert "not-found" in done.stderr


def test_an_unknown_decision_is_exit_code_1(demo: dict[str, Any]) -> None:
    done = ask(demo, "show", "01a22969-a728-7669-8b99-5ac5ff272df1")
    assert done.returncode == 1
    assert "not-found" in done.stderr


def test_lists_are_tables_for_people_and_pages_for_programs(demo: dict[str, Any]) -> None:
    decision = decided(demo, "listed")
    operation = decision["operations"][0]["id"]
    assert decision["id"] in ask(demo, "decisions", "--record", "proposal/listed").stdout
    assert operation in ask(demo, "operations").stdout
    assert "decision.committed" in ask(demo, "receipts", "--limit", "200", scope="audit").stdout
    page = as_json(ask(demo, "decisions", "--record", "proposal/listed", "--json"))
    assert [item["id"] for item in page["items"]] == [decision["id"]]


def test_receipts_need_the_scope_audit(demo: dict[str, Any]) -> None:
    done = ask(demo, "receipts")
    assert done.returncode == 1
    assert "audit" in done.stderr


# Reviews ------------------------------------------------------------------------------------------------------------------------


def in_review(demo: dict[str, Any], record: str) -> Any:
    discounted = INPUT.replace("}", ', "discount_percent": 60}')
    made = ask(
        demo,
        *("decide", "proposal-quote", "--input", discounted, "--record", f"proposal/{record}", "--json"),
    )
    assert as_json(made)["status"] == "in_review"
    return as_json(made)


def test_reviews_lists_what_waits_for_a_person_and_shows_what_would_be_sent(demo: dict[str, Any]) -> None:
    made = in_review(demo, "review")
    for command in (("reviews",), ("reviews", "list"), ("reviews", "--limit", "200")):
        listed = ask(demo, *command, scope="review")
        assert (listed.returncode, listed.stderr) == (0, "")
        assert made["id"] in listed.stdout
    shown = ask(demo, "reviews", "show", made["id"], scope="review").stdout
    assert "75 % discount" in shown
    assert "would commit  price 1263.96 SGD" in shown
    assert '  price: {"amount_minor":126396,"currency":"SGD"}' in shown
    assert f"coordinator reviews approve {made['id']} --etag 1" in shown
    assert as_json(ask(demo, "reviews", "--json", scope="review"))["items"]
    assert (
        as_json(ask(demo, "reviews", "show", made["id"], "--json", scope="review"))["review"]["etag"] == "1"
    )


def test_what_is_approved_commits_and_a_stale_etag_says_what_to_do(demo: dict[str, Any]) -> None:
    made = in_review(demo, "approve")
    stale = ask(demo, "reviews", "approve", made["id"], "--etag", "9", scope="review")
    assert (stale.returncode, "coordinator reviews show ID" in stale.stderr) == (1, True)
    own = ask(demo, "reviews", "approve", made["id"])
    assert (own.returncode, "missing-scope" in own.stderr) == (1, True)
    done = ask(demo, "reviews", "approve", made["id"], "--etag", "1", "--note", "agreed", scope="review")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"approved +by key \S+, \d+ s ago: agreed", done.stdout)
    again = ask(demo, "reviews", "approve", made["id"], "--etag", "1", "--json", scope="review")
    assert as_json(again)["status"] == "committed"


def test_what_is_rejected_is_declined_on_whatever_is_there(demo: dict[str, Any]) -> None:
    made = in_review(demo, "reject")
    done = ask(demo, "reviews", "reject", made["id"], "--note", "too dear", "--json", scope="review")
    assert as_json(done)["outcome"]["reason"] == "rejected in review: too dear"
    late = ask(demo, "reviews", "approve", made["id"], scope="review")
    assert (late.returncode, "stale-review" in late.stderr) == (1, True)


def test_a_reviewed_decision_is_replayed_with_its_receipt(demo: dict[str, Any]) -> None:
    made = in_review(demo, "replay-review")
    for _ in range(2):  # while it is in review, then approved
        done = ask(demo, "replay", made["id"], "--module", PROPOSAL, scope="audit")
        assert (done.returncode, "outcome_digest" in done.stdout) == (0, True), done
        ask(demo, "reviews", "approve", made["id"], scope="review")


# Replay -------------------------------------------------------------------------------------------------------------------------


def test_a_replay_with_the_same_policy_agrees_down_to_the_receipt(demo: dict[str, Any]) -> None:
    decided(demo, "replayed")
    decision = decided(demo, "replayed")
    done = ask(demo, "replay", decision["id"], "--module", PROPOSAL, "--json", scope="audit")
    assert done.returncode == 0, done
    result = as_json(done)
    assert result["agrees"] is True
    assert result["compared"] == ["packet_digest", "outcome", "3 runs", "outcome_digest"]


def test_a_replay_without_the_scope_audit_says_that_the_receipt_was_not_compared(
    demo: dict[str, Any],
) -> None:
    done = ask(demo, "replay", decided(demo, "unaudited")["id"], "--module", PROPOSAL)
    assert done.returncode == 0
    assert "agrees" in done.stdout
    assert "scope audit" in done.stdout


OTHER_POLICY = """
import itertools
from coordinator import Coordinator, Decline, decision_type
from coordinator.demo import proposal as demo

count = itertools.count()

def policy(request, packet, record):
    {body}

coordinator = Coordinator([decision_type(
    "proposal-quote", request=demo.QuoteRequest, policy=policy, policy_version="2",
    evidence=list(demo.proposal_quote.evidence.values()), effects=[demo.send_quote], record=demo.proposal_quote.record)])
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return Decline('no')", "outcome"),
        ("return Decline(str(next(count)))", "not deterministic"),
        ("raise ValueError", "policy-raised"),
    ],
)
def test_a_replay_with_another_policy_is_exit_code_1_and_says_what_differs(
    demo: dict[str, Any], tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "other.py").write_text(OTHER_POLICY.format(body=body))
    decision = decided(demo, "other-policy")
    command = ("replay", decision["id"], "--module", "other:coordinator")
    done = coordinator(*command, env=settings(demo, "audit"), cwd=tmp_path)
    assert done.returncode == 1, done
    assert "differs" in done.stdout
    assert said in done.stdout
    assert "replayed with 2" in done.stdout


# Databases and keys -------------------------------------------------------------------------------------------------------------


def test_migrate_creates_the_schema_and_then_has_nothing_to_do(empty_database_url: str) -> None:
    env = {"DATABASE_URL": empty_database_url}
    assert "Created" in coordinator_here("migrate", env=env).stdout
    assert as_json(coordinator_here("migrate", "--json", env=env)) == {"created": False, "applied": []}


def test_a_key_is_shown_when_it_is_made_and_never_again(database_url: str) -> None:
    env = {"DATABASE_URL": database_url}
    made = coordinator_here(
        *("keys", "create", "--tenant", "t", "--scope", "audit", "--scope", "decide", "--name", "desk"),
        env=env,
    )
    assert made.returncode == 0, made
    key = made.stdout.strip()
    assert key.startswith("ck_")
    listed = coordinator_here("keys", "list", "--tenant", "t", env=env)
    assert "desk" in listed.stdout
    assert "decide, audit" in listed.stdout
    assert key not in listed.stdout
    assert key.partition(".")[2] not in listed.stdout + listed.stderr


def test_a_key_may_only_ask_for_classes_that_are_configured(database_url: str) -> None:
    env = {"DATABASE_URL": database_url}
    create = ("keys", "create", "--scope", "decide", "--class", "bulk", "--class", "gold")
    refused = coordinator_here(*create, env=env)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "'gold'" in refused.stderr
    assert "bulk, interactive, urgent" in refused.stderr
    assert "COORDINATOR_CLASSES" in refused.stderr
    limits = {"weight": 1, "reserved": 0, "queue_depth": 9, "start_objective_ms": 9}
    classes = {"COORDINATOR_CLASSES": msgspec.json.encode({"gold": limits, "bulk": limits}).decode()}
    assert coordinator_here(*create, env=env | classes).returncode == 0


def test_a_key_can_be_revoked_once(database_url: str) -> None:
    env = {"DATABASE_URL": database_url}
    made = as_json(coordinator_here("keys", "create", "--scope", "decide", "--json", env=env))
    first, again = (coordinator_here("keys", "revoke", made["id"], env=env) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 1)
    (kept,) = as_json(coordinator_here("keys", "list", "--json", env=env))["items"]
    assert kept["revoked_at"] is not None


def test_an_unknown_tenant_and_an_unreachable_database_are_faults(database_url: str, tmp_path: Path) -> None:
    unknown = coordinator_here("keys", "list", "--tenant", "nobody", env={"DATABASE_URL": database_url})
    assert unknown.returncode == 1
    assert "keys create --tenant nobody" in unknown.stderr
    away = coordinator_here("keys", "list", "--database-url", "postgresql://u:secret@127.0.0.1:9/x")
    assert away.returncode == 1
    assert "DATABASE_URL" in away.stderr
    assert "secret" not in away.stderr
    nowhere = coordinator_here("keys", "list", "--data", str(tmp_path / "nothing"))
    assert nowhere.returncode == 1
    assert "coordinator serve" in nowhere.stderr


# Serving ------------------------------------------------------------------------------------------------------------------------


def test_serve_refuses_an_outdated_schema_and_names_the_command(empty_database_url: str) -> None:
    done = coordinator("serve", PROPOSAL, "--port", "0", env={"DATABASE_URL": empty_database_url})
    assert done.returncode == 1
    assert "coordinator migrate" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_makes_a_database_of_its_own_and_prints_the_first_key_once() -> None:
    with data_folder() as folder:
        said = folder / "said"
        for starts in (1, 2):
            with serving(folder / "data", said) as server:
                assert server.ready["data"] == str(folder / "data")
                (key,) = re.findall(r"ck_\S+", said.read_text())
                done = coordinator_here("decisions", "--url", server.ready["url"], "--key", key)
                assert (done.returncode, done.stdout.strip()) == (0, "No decisions."), starts
                made = coordinator_here(
                    *("keys", "create", "--scope", "audit", "--data", str(folder / "data")),
                )
                assert made.stdout.startswith("ck_"), "the running server's database is found"
                assert server.stop() == 0


def serving(data: Path, said: Path) -> Process:
    return Process(
        [*COMMAND, "serve", PROPOSAL, "--port", "0", "--json", "--data", str(data)],
        env=package_environment(),
        log=said,
        timeout_s=60,
    )


def test_help_is_there_for_every_command() -> None:
    listed = coordinator_here("--help")
    names = re.findall(r"^  ([a-z]+)  ", listed.stdout, re.MULTILINE)
    assert {"serve", "demo", "migrate", "keys", "decide", "show", "replay", "drill"} <= set(names)
    for name in names:
        assert coordinator_here(name, "--help").returncode == 0, name
