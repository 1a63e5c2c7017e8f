"""JSON schemas that describe requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.config import JsonDict

NULL: JsonDict = {"type": "null"}
NULLS: JsonDict = {"additionalProperties": NULL}
"""For objects whose unknown keys may be null."""
STRING: JsonDict = {"type": "string"}
BOOLEAN: JsonDict = {"type": "boolean"}
NUMBER: JsonDict = {"type": "number"}
COUNT: JsonDict = {"type": "integer", "minimum": 0}


def nullable(schema: JsonDict) -> None:
    """Lets a field of one type be null, for `Field(json_schema_extra=nullable)`."""
    schema["type"] = [schema["type"], "null"]


def list_of(items: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """JSON schema of an array."""
    return {"type": "array", "items": items, **more}


def object_of(optional: Mapping[str, Any] | None = None, /, **required: Any) -> dict[str, Any]:
    """JSON schema of an object with these properties and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of a value that may be null."""
    return {"anyOf": [schema, NULL]}
