"""Convert a tool argument's text to a type that its JSON schema allows."""

import ast
import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

from .contents import as_list

# JSON Schema type names, keyed by the names that some clients send instead.
SCHEMA_TYPE_OF_ALIAS = {
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "list": "array",
    "str": "string",
}
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parameters_of(name: str, tools: Any) -> dict[str, Any]:
    """Return the schema of a tool's parameters, or {} if the request has no such tool or the tool has no schema.

    Args:
        name: the tool's name.
        tools: the request's tools in OpenAI's format, or None.
    """
    for tool in tools or []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def properties_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a schema's properties by name, or {} if it has none."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the names of the JSON types that a schema allows, or an empty set if none are known.

    Args:
        schema: the schema of one argument.
        root: the schema of all parameters, used to resolve `$ref`.
    """
    return set(_all_types(schema, root, followed_references=frozenset()))


def _all_types(
    schema: Any, root: dict[str, Any], followed_references: frozenset[str]
) -> Iterator[str]:
    """Yield the types of a schema and its alternatives.

    `followed_references` are not followed again, so that the recursion ends.
    """
    if not isinstance(schema, dict):
        return
    yield from _types_without_alternatives(schema)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for alternative in as_list(schema.get(keyword)):  # not every client sends a list
            yield from _all_types(alternative, root, followed_references)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed_references:
        referenced_schema = _resolve(reference, root)
        yield from _all_types(referenced_schema, root, followed_references | {reference})


def _types_without_alternatives(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the types that a schema allows, ignoring alternatives such as `anyOf`.

    If the schema has no `type`, the types are inferred from its other keywords.
    """
    type_field = schema.get("type")
    names = type_field if isinstance(type_field, list) else [type_field]
    for name in names:
        if isinstance(name, str):
            yield SCHEMA_TYPE_OF_ALIAS.get(name.lower(), name.lower())
    if schema.get("nullable") is True:
        yield "null"
    if type_field is None:
        constants = [schema["const"]] if "const" in schema else []
        allowed_values = schema.get("enum", constants)
        if isinstance(allowed_values, list):
            yield from map(_json_type, allowed_values)
        if "properties" in schema:
            yield "object"
        if "items" in schema:
            yield "array"


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """Return the part of `root` that a reference such as `#/$defs/NAME` points to, or None."""
    part: Any = root
    for escaped_key in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(part, dict):
            return None
        key = escaped_key.replace("~1", "/").replace("~0", "~")
        part = part.get(key)
    return part


def _json_type(value: Any) -> str:
    """Return the name of a value's JSON type."""
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), "null")


def convert_argument(text: str, types: set[str]) -> Any:
    """Convert an argument's text to one of the allowed types, or return it unchanged.

    If strings are allowed too, the text may be meant as a string. Lists and objects are still converted, but numbers,
    booleans and null only if the text is exactly the value's JSON.

    Args:
        text: the argument as the model wrote it, including surrounding whitespace.
        types: names of the allowed JSON types.
    """
    allows_only_strings = types <= {"string"}  # also true if the types are unknown
    if allows_only_strings:
        return text
    value = _parse_literal(text)
    value_type = _json_type(value)
    if value_type == "string":
        return text
    excludes_floats = types.isdisjoint({"number", "string"})
    if value_type == "number" and value.is_integer() and excludes_floats:
        value, value_type = int(value), "integer"  # JSON Schema counts 5.0 as an integer
    is_allowed = value_type in types or (value_type == "integer" and "number" in types)
    if not is_allowed:
        return text
    if "string" not in types or value_type in ("array", "object"):
        return value
    is_exact_json = json.dumps(value) == text
    return value if is_exact_json else text


def _parse_literal(text: str) -> Any:
    """Parse JSON, a Python list, tuple or dict, or a constant such as `None`.

    Other text, NaN and infinity are returned unchanged.
    """
    literal = text.strip()
    constant_name = literal.lower()
    if constant_name in CONSTANTS:
        return CONSTANTS[constant_name]
    value: Any = text
    try:
        value = json.loads(literal, strict=False)
    except (ValueError, RecursionError):
        has_brackets = literal.startswith(("{", "[", "("))
        if has_brackets:
            with contextlib.suppress(
                ValueError, SyntaxError, RecursionError, MemoryError, TypeError
            ):
                python_value = ast.literal_eval(literal)
                # JSON turns tuples into lists, and rejects sets.
                value = json.loads(json.dumps(python_value, allow_nan=False))
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else text
