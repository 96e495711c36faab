"""The review packet as a picture: what would be committed, how old what it rests on is, who asked, until when; or the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from rich.text import Text

from coordinator.cli.say import age, short

Json = Mapping[str, Any]
LABEL = 14
GIVEN = {"approve": "approved", "reject": "rejected"}


def review(decision: Json, plain: Any) -> Text:
    """``plain`` renders JSON for people."""
    packet = decision["review"]
    lines = [Text("review", "bold")]
    waits = decision["status"] == "in_review"
    if verdict := packet["verdict"]:
        lines.append(_line(GIVEN.get(verdict["verdict"], verdict["verdict"]), _verdict(verdict)))
    since = f"in review since {packet['since']} ({age(packet['since'])})"
    lines.append(_line("asked by", f"key {packet['requested_by']}, {since}"))
    if waits:
        lines.append(_line("expires", packet["expires_at"]))
        lines += _ages(decision)
    lines += [_check("moved", check, plain) for check in packet["moved"]]
    lines += [_check("unconfirmed", check, plain) for check in packet["unconfirmed"]]
    if packet["proposal"]:
        lines += _proposal(packet["proposal"], "would commit" if waits else "proposed", plain)
    elif waits:
        lines.append(_line("would commit", "nothing is proposed: it can only be rejected"))
    return Text("\n").join(lines)


def _line(label: str, said: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:<{LABEL}}", "dim"), (said, style))


def _verdict(verdict: Json) -> str:
    note = f": {verdict['note']}" if verdict["note"] else ""
    return f"by key {verdict['by']}, {age(verdict['at'])}{note}"


def _ages(decision: Json) -> Iterator[Text]:
    """How old each evidence is, and what becomes of it at an approval."""
    for item in decision["evidence"]:
        old = _duration(decision["review"]["evidence_age_ms"].get(item["name"], 0))
        rule = item["freshness"]
        match rule["kind"]:
            case "decisive":
                then = "is read again"
            case "max-age":
                then = f"is read again if older than {_duration(rule['max_age_ms'])}"
            case _:
                then = "stays as it is"
        yield _line("evidence", f"{item['name']}, {old} old, {then}")


def _duration(ms: int) -> str:
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= length:
            return f"{ms / length:.0f} {unit}"
    return f"{ms} ms"


def _check(label: str, check: Json, plain: Any) -> Text:
    field = f".{check['field']}" if check["field"] else ""
    said = f"✗ {check['evidence']}{field} {plain(check['then'])} → {plain(check['now'])}"
    return _line(label, said, "red")


def _proposal(proposal: Json, label: str, plain: Any) -> Iterator[Text]:
    yield _line(label, plain(proposal["terms"]))
    for change in proposal["changes"]:
        yield _line(
            "changes", f"{change['kind']}/{change['id']} → v{change['version']}  {plain(change['data'])}"
        )
    for effect in proposal["effects"]:
        yield _line("sends", f"{effect['effect']}  key {effect['key']}")
        yield from _payload(effect["payload"])
        if undo := effect["compensation"]:
            yield _line("undone by", f"{undo['effect']}  key {undo['key']}")
            yield from _payload(undo["payload"])


def _payload(payload: Any) -> Iterator[Text]:
    """As it would be sent: JSON, a member a line."""
    if not isinstance(payload, dict):
        yield _line("", short(payload, 1_000))
        return
    for name, value in payload.items():
        yield _line("", f"  {name}: {short(msgspec.json.encode(value).decode(), 1_000)}")
