"""`WebhookSink.notice`: what a provider tells of its own accord counts only if it is signed, fresh and understood (I7, I14)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from adapters.notice import NoticeFields
from adapters.webhook import WebhookSink
from coordinator.core.effect import Notice, NoticeReader, NoticeRefused, keyed
from coordinator.errors import DeclarationError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + "A" * 32
HAPPENED = {"key": "d-1.pay.0", "happened": True, "reference": "pay_81"}


def sink(secret: str | None = SECRET, **options: Any) -> WebhookSink:
    return WebhookSink(
        "pay", "https://psp.example/pay", guarantee=keyed(hours=24), inbound_secret=secret, **options
    )


def event(
    said: object, *, secret: str = SECRET, id: str = "evt_1", age: timedelta = timedelta()
) -> tuple[dict[str, str], bytes]:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    when = datetime.now(UTC) - age
    return {
        "webhook-id": id,
        "webhook-timestamp": str(int(when.timestamp())),
        "webhook-signature": Webhook(secret).sign(id, when, body.decode("utf-8", "replace")),
    }, body


def refused(headers: dict[str, str], body: bytes, reader: WebhookSink | None = None) -> str:
    with pytest.raises(NoticeRefused) as caught:
        (reader or sink()).notice(headers, body)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_it_reads_notices() -> None:
    reader: NoticeReader = sink()
    assert isinstance(reader, NoticeReader)
    assert reader.notice(*event(HAPPENED)) == Notice(
        event_id="evt_1", key="d-1.pay.0", happened=True, reference="pay_81"
    )


def test_what_did_not_happen_has_a_reason() -> None:
    said = {"key": "k", "happened": False, "reason": "card expired"}
    assert sink().notice(*event(said)) == Notice(
        event_id="evt_1", key="k", happened=False, reason="card expired"
    )


def test_a_reference_or_reason_of_the_wrong_kind_is_none_and_a_dirty_one_is_cleaned() -> None:
    said = {"key": "k", "happened": True, "reference": {"a": 1}, "reason": "a\x1bb"}
    notice = sink().notice(*event(said))
    assert notice.reference == ""
    assert notice.reason.isprintable()


def test_fields_may_stand_elsewhere() -> None:
    fields = NoticeFields(key="data.idempotency_key", happened="data.paid", reference="id", reason="why")
    said = {"id": 7, "data": {"idempotency_key": "k", "paid": True}}
    assert sink(notice_fields=fields).notice(*event(said)) == Notice(
        event_id="evt_1", key="k", happened=True, reference="7"
    )


def test_a_sink_without_an_inbound_secret_takes_no_notices() -> None:
    assert "inbound_secret" in refused(*event(HAPPENED), sink(None))


@pytest.mark.parametrize("age", [timedelta(minutes=6), timedelta(minutes=-6)])
def test_an_event_outside_five_minutes_is_refused(age: timedelta) -> None:
    assert "too" in refused(*event(HAPPENED, age=age))


def test_an_event_within_five_minutes_counts() -> None:
    assert sink().notice(*event(HAPPENED, age=timedelta(minutes=4))).key == "d-1.pay.0"


def test_somebody_elses_signature_is_refused() -> None:
    refused(*event(HAPPENED, secret=OTHER))


@pytest.mark.parametrize("changed", ["webhook-id", "webhook-timestamp", "webhook-signature", "body"])
def test_changing_anything_that_was_signed_is_refused(changed: str) -> None:
    headers, body = event(HAPPENED)
    if changed == "body":
        body = body.replace(b"true", b"false")
    elif changed == "webhook-timestamp":
        headers[changed] = str(int(headers[changed]) + 1)
    elif changed == "webhook-signature":
        headers[changed] = "v1," + headers[changed][3:].swapcase()
    else:
        headers[changed] += "x"
    refused(headers, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("webhook-id", None),
        ("webhook-signature", None),
        ("webhook-timestamp", None),
        ("webhook-timestamp", "nan"),
        ("webhook-timestamp", "1e400"),
        ("webhook-timestamp", "yesterday"),
        ("webhook-signature", "v1"),
        ("webhook-signature", "v1,%%%"),
        ("webhook-signature", "v2,AAAA"),
        ("webhook-signature", ",,,"),
        ("webhook-signature", "v1,\N{BULLET}"),
    ],
)
def test_headers_that_make_no_sense_are_refused(name: str, value: str | None) -> None:
    headers, body = event(HAPPENED)
    if value is None:
        del headers[name]
    else:
        headers[name] = value
    refused(headers, body)


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        {"happened": True},
        {"key": "k"},
        {"key": "", "happened": True},
        {"key": 7, "happened": True},
        {"key": "k" * 256, "happened": True},
        {"key": "k", "happened": 1},
        {"key": "k", "happened": "true"},
        {"key": "k", "happened": None},
        b"",
        b"not json",
        b'{"key":"k","happened":true,"happened":false}',
        b'{"key":"k","happened":true,"reason":"a\\u0000b"}',
    ],
)
def test_a_body_that_does_not_say_what_became_of_a_key_is_refused(said: object) -> None:
    refused(*event(said))


def test_bytes_that_are_no_text_are_refused() -> None:
    headers, _ = event(HAPPENED)
    refused(headers, b"\xff\xfe")


def test_a_wrong_secret_is_a_wrong_declaration_and_is_not_shown() -> None:
    with pytest.raises(DeclarationError, match=r"test_notice\.py") as caught:
        sink("whsec_s3cret\N{BULLET}")
    assert "s3cret" not in str(caught.value)
    assert SECRET not in repr(sink())
