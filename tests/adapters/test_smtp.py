"""`adapters.smtp.SmtpSink`: what a mail says, when it was surely not sent, and when nobody can know (I5, I7)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from adapters.smtp import SmtpSink
from coordinator.core.effect import Accepted, Ambiguous, NotSent, Rejected, SendResult, Sink, Unguarded
from coordinator.errors import DeclarationError
from tests.adapters.asking import operation
from tests.adapters.mail import mail_server, scripted
from tests.adapters.servers import unused_port

MAIL = {"to": "a@b.example", "subject": "Your quote", "text": "Dear A,\n.\n.. 1200 SGD\nFrom us\n"}


def sink(port: int, **options: Any) -> SmtpSink:
    given = {"sender": "Quotes <us@h.example>", "tls": "none", "timeout_ms": 2_000, **options}
    return SmtpSink("send-mail", "127.0.0.1", port=port, **given)


def mail(key: str = "d-1.send-mail.0", **payload: object) -> Any:
    return operation(key, msgspec.json.encode({**MAIL, **payload}))


async def sent_to_script(**replies: str) -> tuple[SendResult, list[str], int]:
    async with scripted(**replies) as script:
        result = await sink(script.port, timeout_ms=500).perform(mail())
        return result, script.heard, script.connections


def test_it_is_a_sink_without_any_guarantee() -> None:
    declared: Sink = SmtpSink("send-mail", "mail.example", sender="us@h.example")
    assert (declared.provider, declared.guarantee, declared.timeout_ms) == (
        "mail.example",
        Unguarded(),
        30_000,
    )


async def test_a_mail_says_what_the_payload_says_under_an_id_made_of_the_key() -> None:
    async with mail_server() as server:
        result = await sink(server.port).perform(mail())
    assert result == Accepted("250 2.0.0 queued as Q1")
    (seen,) = server.mails
    assert (seen["To"], seen["From"], seen["Subject"]) == (
        MAIL["to"],
        "Quotes <us@h.example>",
        MAIL["subject"],
    )
    assert seen["Message-ID"] == "<d-1.send-mail.0@h.example>"
    assert seen["Auto-Submitted"] == "auto-generated"
    assert seen.get_content().splitlines() == MAIL["text"].splitlines()
    assert server.envelopes[0].mail_from == "us@h.example"


async def test_every_attempt_has_the_same_id() -> None:
    async with mail_server() as server:
        for _ in range(2):
            await sink(server.port).perform(mail("a key/with ünusual \N{BULLET} things"))
    assert len({str(each["Message-ID"]) for each in server.mails}) == 1


async def test_names_subject_and_text_may_be_anything_and_recipients_several() -> None:
    async with mail_server() as server:
        declared = sink(
            server.port, subject="Angebot {payload.number} für {tenant}", headers={"X-Team": "Süd"}
        )
        to = ["Jürgen, Maß <j@b.example>", "c@d.example"]
        result = await declared.perform(mail(to=to, number=7, text="Grüße \N{EURO SIGN} " + "x" * 2000))
    assert isinstance(result, Accepted)
    (seen,) = server.mails
    assert server.envelopes[0].rcpt_tos == ["j@b.example", "c@d.example"]
    assert (seen["Subject"], seen["X-Team"]) == ("Angebot 7 für acme", "Süd")
    assert [each.display_name for each in seen["To"].addresses] == ["Jürgen, Maß", ""]
    assert seen.get_content().startswith("Grüße \N{EURO SIGN} ")


@pytest.mark.parametrize(
    "payload",
    [
        {"subject": "hello\r\nBcc: evil@x.example"},
        {"subject": "hello\nBcc: evil@x.example"},
        {"subject": "hello\N{LINE SEPARATOR}Bcc: evil@x.example"},
        {"to": "a@b.example\r\nBcc: evil@x.example"},
        {"to": "a@b.example>\r\nRCPT TO:<evil@x.example"},
        {"to": "a@b.example, evil@x.example"},
        {"to": "Name <a@b.example> <evil@x.example"},
        {"to": "no address"},
        {"to": "ü@b.example"},
        {"to": []},
        {"to": [7]},
        {"to": ["a@b.example"] * 51},
        {"to": {"a": 1}},
        {"to": None},
        {"subject": ""},
        {"text": None},
    ],
)
async def test_what_is_no_mail_or_would_add_a_recipient_is_never_sent(payload: dict[str, object]) -> None:
    async with scripted() as script:
        result = await sink(script.port).perform(operation(payload=msgspec.json.encode({**MAIL, **payload})))
    assert isinstance(result, Rejected), result
    assert (result.code, script.connections) == ("malformed-mail", 0)
    assert result.message.isprintable()


async def test_nobody_listening_is_not_sent() -> None:
    assert isinstance(await sink(await unused_port()).perform(mail()), NotSent)


@pytest.mark.parametrize(
    ("replies", "kind"),
    [
        ({"hello": ""}, NotSent),
        ({"hello": "..."}, NotSent),
        ({"hello": "421 too busy"}, NotSent),
        ({"hello": "554 go away"}, Rejected),
        ({"hello": "what?"}, NotSent),
        ({"EHLO": "", "HELO": ""}, NotSent),
        ({"MAIL": "451 later"}, NotSent),
        ({"MAIL": "550 not you"}, Rejected),
        ({"MAIL": ""}, NotSent),
        ({"MAIL": "..."}, NotSent),
        ({"RCPT": "450 greylisted"}, NotSent),
        ({"RCPT": "550 no such mailbox"}, Rejected),
        ({"RCPT": ""}, NotSent),
        ({"DATA": "451 later"}, NotSent),
        ({"DATA": "554 no valid recipients"}, Rejected),
    ],
)
async def test_before_the_message_leaves_nothing_was_sent(
    replies: dict[str, str], kind: type[object]
) -> None:
    result, heard, connections = await sent_to_script(**replies)
    assert isinstance(result, kind), result
    assert "." not in heard
    assert connections == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("250 2.0.0 queued", Accepted),
        ("550 5.7.1 looks like spam", Rejected),
        ("451 4.3.0 greylisted", NotSent),
        ("421 4.3.2 shutting down", Ambiguous),
        ("354 what?", Ambiguous),
        ("nonsense", Ambiguous),
        ("", Ambiguous),
        ("...", Ambiguous),
    ],
)
async def test_after_the_message_only_a_clear_reply_counts(reply: str, kind: type[object]) -> None:
    result, heard, connections = await sent_to_script(end=reply)
    assert isinstance(result, kind), result
    assert (heard.count("."), connections) == (1, 1)


async def test_one_refused_recipient_of_several_and_nobody_gets_it() -> None:
    async with mail_server() as server:
        result = await sink(server.port).perform(mail(to=["a@b.example", "refused@b.example"]))
    assert isinstance(result, Rejected)
    assert "no such mailbox" in result.message
    assert server.mails == []


async def test_without_starttls_on_offer_nothing_is_sent_in_plain_text() -> None:
    async with scripted() as script:
        result = await sink(script.port, tls="starttls", username="u", password="s3cret").perform(mail())
    assert isinstance(result, NotSent), result
    assert not {"AUTH", "MAIL", "DATA"} & set(script.heard)
    assert "s3cret" not in str(result)


async def test_cancelling_hangs_up_and_is_passed_on() -> None:
    async with scripted(end="...") as script:
        sending = asyncio.create_task(sink(script.port).perform(mail()))
        await asyncio.wait_for(script.message_over.wait(), 5)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert script.heard.count(".") == 1


async def test_it_cannot_be_asked() -> None:
    assert isinstance(await sink(1).lookup(mail()), Ambiguous)


@pytest.mark.parametrize(
    "options",
    [
        {"sender": "nobody"},
        {"sender": "a@b.example\r\nBcc: c@d.example"},
        {"tls": "maybe"},
        {"username": "u", "password": "s3cret"},
        {"timeout_ms": 0},
        {"to": "{input.customer}"},
        {"subject": "{payload.subject"},
        {"headers": {"X-A": "b\nc: d"}},
        {"headers": {"Subject": "twice"}},
        {"headers": {"X A": "b"}},
    ],
)
def test_a_wrong_declaration_names_the_line(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"test_smtp\.py") as caught:
        sink(25, **options)
    assert "s3cret" not in str(caught.value)
