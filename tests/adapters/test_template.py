"""`adapters.template`: where a request's values go in a URL or an id."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest

from adapters.http import HttpSource
from adapters.template import OPERATION, REQUEST, NoValue, Template
from coordinator.core.evidence import ReadRequest
from coordinator.errors import DeclarationError
from tests.adapters.asking import Capacity, Site, ask, operation


class Inner(msgspec.Struct):
    code: str = "x"


class Outer(msgspec.Struct):
    inner: Inner = msgspec.field(default_factory=Inner)
    nothing: str | None = None
    text: str = "plain"
    flag: bool = True
    number: float = 1.0
    exact: Decimal = Decimal("12.50")
    id: UUID = UUID(int=5)
    at: datetime = datetime(2026, 1, 2, tzinfo=UTC)


def url(text: str, request: ReadRequest) -> str:
    return template(text).url(request)


def template(text: str) -> Template[ReadRequest]:
    return Template(text, REQUEST, "source 'x'", "quotes.py:1")


def test_every_root_is_filled_from_the_request() -> None:
    text = "https://h/{tenant}/{record.kind}/{record.id}/{input.site}?cost={evidence.cost-estimate.estimate.minor}"
    evidence = {"cost-estimate": {"estimate": {"minor": 7}}}
    assert url(text, ask(evidence=evidence)) == "https://h/acme/proposal/p-1/sg-1?cost=7"  # type: ignore[arg-type]  # dict is invariant


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("inner.code", "x"),
        ("flag", "true"),
        ("number", "1.0"),
        ("exact", "12.50"),
        ("id", "00000000-0000-0000-0000-000000000005"),
        ("at", "2026-01-02T00%3A00%3A00Z"),
    ],
)
def test_plain_values_of_every_type_have_one_spelling(path: str, expected: str) -> None:
    assert url(f"https://h/{{input.{path}}}", ask(Outer())) == f"https://h/{expected}"


def test_an_input_that_is_a_mapping_is_read_by_its_keys() -> None:
    assert url("https://h/{input.site}", ask({"site": "a"})) == "https://h/a"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ("a/b", "a%2Fb"),
        ("a?b=c&d#e", "a%3Fb%3Dc%26d%23e"),
        ("a b+c", "a%20b%2Bc"),
        ("é", "%C3%A9"),
        ("a%2Fb", "a%252Fb"),
        ("...", "..."),
    ],
)
def test_a_value_cannot_leave_its_place_in_the_url(value: str, encoded: str) -> None:
    assert url("https://h/s/{input.site}/x", ask(Site(value))) == f"https://h/s/{encoded}/x"


@pytest.mark.parametrize(
    "text", ["https://h/s/{input.site}", "https://h/{input.site}/x", "https://h/{input.site}?q=1"]
)
@pytest.mark.parametrize("value", [".", ".."])
def test_a_value_cannot_climb_the_path(text: str, value: str) -> None:
    with pytest.raises(NoValue, match="path segment"):
        url(text, ask(Site(value)))


def test_two_values_cannot_climb_together() -> None:
    with pytest.raises(NoValue, match="path segment"):
        url("https://h/{input.site}{record.id}/x", ask(Site("."), record=("proposal", ".")))


def test_dots_inside_a_query_are_harmless() -> None:
    assert url("https://h/x?site=/{input.site}", ask(Site(".."))) == "https://h/x?site=/.."


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("input.nothing", "no value"),
        ("input.missing", "leads nowhere"),
        ("input.inner", "not a plain value"),
        ("input.text.more", "leads nowhere"),
        ("input.__class__", "leads nowhere"),
        ("evidence.cost.minor", "leads nowhere"),
    ],
)
def test_a_hole_in_the_address_is_never_read(path: str, complaint: str) -> None:
    with pytest.raises(NoValue, match=complaint):
        url(f"https://h/{{{path}}}", ask(Outer()))


@pytest.mark.parametrize(("value", "complaint"), [("", "empty"), ("a\x00b", "NUL"), ("\ud800", "surrogate")])
def test_a_text_that_cannot_be_sent_is_refused_without_being_shown(value: str, complaint: str) -> None:
    with pytest.raises(NoValue, match=complaint) as caught:
        url("https://h/{input.site}", ask(Site(value)))
    assert str(caught.value).isprintable()


def test_plain_rendering_keeps_values_as_they_are() -> None:
    assert template("{input.site}:{tenant}").plain(ask(Site("a/é"))) == "a/é:acme"


def test_an_operation_has_a_key_and_a_tenant() -> None:
    assert (
        Template("https://h/{tenant}/{key}", OPERATION, "x", "y").url(operation("a/b"))
        == "https://h/acme/a%2Fb"
    )


@pytest.mark.parametrize(
    "text",
    [
        "https://h/{}",
        "https://h/{inputs.site}",
        "https://h/{input}",
        "https://h/{input.}",
        "https://h/{input.a b}",
        "https://h/{evidence.cost}",
        "https://h/{record.version}",
        "https://h/{record.kind.x}",
        "https://h/{tenant.name}",
        "https://h/{key}",
        "https://h/{input.site",
        "https://h/input.site}",
        "https://h/{{input.site}}",
    ],
)
def test_a_wrong_placeholder_is_found_when_declared_and_names_the_line(text: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        HttpSource("capacity", text, returns=Capacity)
    assert "capacity" in str(caught.value)
    assert caught.value.where.startswith("test_template.py:")


def test_the_line_named_is_the_one_to_mend() -> None:
    here = inspect.stack()[0].lineno
    with pytest.raises(DeclarationError) as caught:
        HttpSource("capacity", "https://h/{nothing}", returns=Capacity)
    assert caught.value.where == f"test_template.py:{here + 2}"


@pytest.mark.parametrize(
    "text",
    [
        "https://{input.site}/x",
        "https://h:{input.site}/x",
        "{input.site}",
        "ftp://h/x",
        "https:///x",
        "https://user:secret@h/x",
        "https://h/a b",
        "https://h/x#y",
        "https://h:port/x",
        "https://[::1/x",
    ],
)
def test_a_request_can_never_choose_the_host_it_is_sent_to(text: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        HttpSource("capacity", text, returns=Capacity)
    assert "secret" not in str(caught.value)
