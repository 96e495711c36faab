"""The OpenAPI document says what the service does; the page that shows it needs no network."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from coordinator.api import examples
from coordinator.api.body import typed
from coordinator.api.openapi import openapi
from coordinator.api.problems import TABLE
from coordinator.app import ENDPOINTS
from coordinator.core.request import DecisionRequest
from tests.api.serving import Client, quote

DOCUMENT: dict[str, Any] = json.loads(openapi(ENDPOINTS))
OPERATIONS = [
    (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
SIGNED = {"/v1/notices/{tenant}/{effect}"}
"""Called by providers, who have no key: the effect's sink checks their signature."""


def test_the_document_is_served(client: Client) -> None:
    served = client.get("/schema/openapi.json")
    assert served.json == DOCUMENT
    assert served.json["openapi"].startswith("3.1")


def test_every_reference_has_its_target() -> None:
    names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT))
    assert set(names) <= set(DOCUMENT["components"]["schemas"])


def test_no_two_operations_share_an_id() -> None:
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_every_operation_says_what_it_needs(method: str, path: str, operation: dict[str, Any]) -> None:
    assert operation["summary"]
    assert operation["description"]
    declared = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
    assert declared == set(re.findall(r"{(\w+)}", path))
    if method in {"POST", "PUT"} and "requestBody" in operation:
        assert "example" in operation["requestBody"]["content"]["application/json"]
    if path.startswith("/v1/") and path not in SIGNED:
        assert operation["security"] == [{"key": []}]
        assert "401" in operation["responses"]
        assert "Scope: `" in operation["description"]


def test_problems_are_documented_as_problem_documents() -> None:
    problem = DOCUMENT["components"]["schemas"]["Problem"]
    assert set(problem["properties"]["code"]["enum"]) == set(TABLE)
    for _, _, operation in OPERATIONS:
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert list(response["content"]) == ["application/problem+json"]


def test_a_decision_has_every_member_that_is_documented_and_no_other(client: Client) -> None:
    made = client.decide(quote()).json
    documented = DOCUMENT["components"]["schemas"]["DecisionView"]
    assert set(made) == set(documented["properties"]) - {"review"}
    reviewed = client.decide(quote(site="reviewed")).json
    assert set(reviewed) == set(documented["properties"])
    assert set(reviewed["review"]) == set(DOCUMENT["components"]["schemas"]["ReviewView"]["properties"])
    assert set(made["evidence"][0]) == set(DOCUMENT["components"]["schemas"]["Item"]["properties"])


def test_the_example_of_a_decision_fits_its_type() -> None:
    assert typed(msgspec.to_builtins(examples.DECISION), DecisionRequest).type == examples.DECISION["type"]


def test_the_page_loads_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("/schema")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
    assert loaded
    for path in loaded:
        assert path.startswith("/schema/")
        assert client.get(path).status == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_the_page_starts_from_the_document(client: Client) -> None:
    start = client.get("/schema/assets/start.js")
    assert start.headers["content-type"].startswith("text/javascript")
    assert b'"/schema/openapi.json"' in start.body
    assert b"SwaggerUIBundle" in client.get("/schema/assets/swagger-ui-bundle.js").body
