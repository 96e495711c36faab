"""The JSON Schema of a struct, as providers of structured output want it: one object at the root, no key that they do not know.

Every member is required and no other is allowed, whatever its default: a model fills in all of them. (The subset that is called
"strict" in OpenAI's documentation of structured outputs.)
"""

from __future__ import annotations

from typing import Any

import msgspec

UNKNOWN = frozenset({"default", "title"})


def strict_schema(kind: type) -> dict[str, Any]:
    """Of a msgspec.Struct. Raises `TypeError` if a schema can't say what it holds."""
    schema = msgspec.json.schema(kind)
    definitions: dict[str, Any] = schema.get("$defs", {})
    root = schema["$ref"].rpartition("/")[2]
    whole = definitions[root] | ({"$defs": definitions} if _is_used(definitions) else {})
    strict: dict[str, Any] = _strict(whole)
    return strict


def _is_used(definitions: dict[str, Any]) -> bool:
    return b'"$ref"' in msgspec.json.encode(definitions)


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if key not in UNKNOWN}
    for key in ("properties", "$defs"):  # here keys are names of the declarer's own
        if key in made:
            made[key] = {name: _strict(value) for name, value in schema[key].items()}
    made |= {
        key: _strict(value)
        for key, value in made.items()
        if key in ("items", "prefixItems", "anyOf")
        or (key == "additionalProperties" and isinstance(value, dict))
    }
    if "properties" in made:
        made |= {"required": list(made["properties"]), "additionalProperties": False}
    return made
