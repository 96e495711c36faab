"""The OpenAPI 3.1 document, made from the endpoints' declarations and the structs that are really encoded and decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from coordinator.api.endpoint import Endpoint, Parameter, Sent, Shown, by_path
from coordinator.api.problems import TABLE, UnsupportedMediaType
from coordinator.core.evidence import Item
from coordinator.errors import (
    BodyTooLarge,
    MalformedRequest,
    MissingScope,
    Overloaded,
    RequestRefused,
    Unauthenticated,
)

TITLE = "Decision coordinator"
DESCRIPTION = """Many read; one decides; the commit is fenced; each effect happens once or is openly uncertain; every step leaves
a receipt that anyone can check.

Errors are RFC 9457 problem documents. Each has a stable `code` and says in `retry` whether a repeat is safe: with the same
Idempotency-Key, only with a new one, or never."""
ANY_OBJECT = {"type": "object", "additionalProperties": True}

Json = dict[str, Any]


def openapi(endpoints: Sequence[Endpoint]) -> bytes:
    """The document as JSON."""
    schemas, components = _schemas(endpoints)
    document = {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": _version(), "description": DESCRIPTION},
        "paths": {
            path: {declared.method.lower(): _operation(declared, schemas) for declared in group}
            for path, group in by_path(endpoints).items()
        },
        "components": {
            "schemas": components | {"Problem": _problem_schema()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key of your tenant."}
            },
        },
    }
    return msgspec.json.encode(document)


def _version() -> str:
    try:
        return version("decision-coordinator")
    except PackageNotFoundError:
        return "0"


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[Mapping[type, Json], Json]:
    """A schema for every struct that is sent or shown, and the components they refer to."""
    kinds = dict.fromkeys(kind for declared in endpoints for kind in _kinds(declared)) | {Item: None}
    listed, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for component in components.values():
        component.pop("title", None)
        if "evidence" in component.get("properties", {}) and "packet_digest" in component["properties"]:
            component["properties"]["evidence"] = {
                "type": "array",
                "items": {"$ref": "#/components/schemas/Item"},
            }
    return dict(zip(kinds, listed, strict=True)), components


def _kinds(declared: Endpoint) -> Iterable[type]:
    shown = [answer.kind for answer in declared.answers.values()]
    sent = [declared.body.kind] if declared.body else []
    return [kind for kind in (*shown, *sent) if kind is not None]


def _operation(declared: Endpoint, schemas: Mapping[type, Json]) -> Json:
    scopes = " or ".join(f"`{scope}`" for scope in sorted(declared.scopes))
    operation: Json = {
        "operationId": f"{declared.tag}-{declared.handler.__name__}",
        "summary": declared.summary,
        "description": declared.description + (f" Scope: {scopes}." if scopes else ""),
        "tags": [declared.tag],
        "parameters": [_parameter(parameter) for parameter in declared.parameters],
        "responses": _responses(declared, schemas),
        "security": [{"key": []}] if scopes else [],
    }
    if declared.body is not None:
        operation["requestBody"] = _request_body(declared.body, schemas)
    return operation


def _parameter(parameter: Parameter) -> Json:
    described: Json = {
        "name": parameter.name,
        "in": parameter.where,
        "description": parameter.description,
        "required": parameter.required,
        "schema": parameter.schema,
    }
    return described if parameter.example is None else described | {"example": parameter.example}


def _request_body(body: Sent, schemas: Mapping[type, Json]) -> Json:
    schema = schemas[body.kind] if body.kind is not None else ANY_OBJECT
    return {"required": True, "content": {"application/json": {"schema": schema, "example": body.example}}}


def _responses(declared: Endpoint, schemas: Mapping[type, Json]) -> Json:
    responses = {str(status): _response(shown, schemas) for status, shown in sorted(declared.answers.items())}
    refusals: dict[int, list[str]] = {}
    for refusal in _refusals(declared):
        refusals.setdefault(TABLE[refusal.code][0], []).append(refusal.code)
    for status, codes in sorted(refusals.items()):
        responses[str(status)] = {
            "description": ", ".join(f"`{code}`" for code in sorted(codes)),
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    return responses


def _refusals(declared: Endpoint) -> set[type[RequestRefused]]:
    """What the handler declares, and what every endpoint of its kind may answer."""
    refusals = {*declared.problems, MalformedRequest}
    if declared.scopes:
        refusals |= {Unauthenticated, MissingScope, Overloaded}
    if declared.body is not None:
        refusals |= {BodyTooLarge, UnsupportedMediaType}
    return refusals


def _response(shown: Shown, schemas: Mapping[type, Json]) -> Json:
    schema: Json = schemas[shown.kind] if shown.kind is not None else {}
    if shown.page:
        schema = {
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": schema},
                "next_cursor": {"type": ["string", "null"]},
            },
            "required": ["items", "next_cursor"],
        }
    response: Json = {"description": shown.description, "content": {shown.media_type: {"schema": schema}}}
    if shown.headers:
        response["headers"] = {
            name: {"description": description, "schema": {"type": "string"}}
            for name, description in shown.headers.items()
        }
    return response


def _problem_schema() -> Json:
    error = {
        "type": "object",
        "properties": {"pointer": {"type": "string"}, "detail": {"type": "string"}},
        "required": ["pointer", "detail"],
    }
    return {
        "type": "object",
        "description": "A problem of RFC 9457. Further members say what a program needs to act.",
        "properties": {
            "type": {"type": "string", "format": "uri"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "code": {"type": "string", "enum": sorted(TABLE)},
            "retry": {"type": "string", "enum": ["same-key", "new-key", "never"]},
            "errors": {"type": "array", "items": error},
            "current_version": {"type": "integer"},
            "retry_after_ms": {"type": "integer"},
            "decision": {"type": "string", "format": "uuid"},
            "trace_id": {"type": "string"},
        },
        "required": ["type", "title", "status", "detail", "code", "retry"],
        "additionalProperties": True,
    }
