"""Convert the text of a tool argument to a type that its JSON schema allows."""

import ast
import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

# Names that clients send instead of JSON Schema's.
OTHER_NAMES = {
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "list": "array",
    "str": "string",
}
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parameters_of(name: str, tools: Any) -> dict[str, Any]:
    """Return the schema of a tool's parameters, or {} if the request has no such tool.

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
    """Return a schema's properties by name."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the names of the JSON types that a schema allows. The set is empty if the schema names none.

    Args:
        schema: the schema of one argument.
        root: the schema of all parameters, against which `$ref` is resolved.
    """
    return set(_type_names(schema, root, frozenset()))


def _type_names(schema: Any, root: dict[str, Any], seen: frozenset[str]) -> Iterator[str]:
    """Yield the types of a schema and its alternatives. `seen` lists the references already followed."""
    if not isinstance(schema, dict):
        return
    names = schema.get("type")
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str):
            yield OTHER_NAMES.get(name.lower(), name.lower())
    if schema.get("nullable") is True:
        yield "null"
    if names is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        yield from (_type_name(value) for value in values if isinstance(values, list))
        yield from (
            name for key, name in (("properties", "object"), ("items", "array")) if key in schema
        )
    for key in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(key) or []:
            yield from _type_names(alternative, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        yield from _type_names(_resolved(reference, root), root, seen | {reference})


def _resolved(reference: str, root: dict[str, Any]) -> Any:
    """Return the part of `root` that a reference such as `#/$defs/NAME` points to, or None."""
    part: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        part = (
            part.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
        )
    return part


def _type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), "null")


def convert(text: str, types: set[str]) -> Any:
    """Convert text to one of the allowed types, or return it unchanged.

    If strings are allowed too, lists and objects are still converted, but numbers, booleans and null only if the text
    is exactly their JSON.

    Args:
        text: what the model wrote, including surrounding whitespace.
        types: names of the allowed JSON types.
    """
    if not types - {"string"}:
        return text
    value = _literal(text)
    name = _type_name(value)
    if name == "number" and value.is_integer() and not types & {"number", "string"}:
        value, name = int(value), "integer"  # 5.0 is an integer in JSON schema
    is_allowed = name in types or (name == "integer" and "number" in types)
    if not is_allowed or name == "string":
        return text
    is_exact = name in ("array", "object") or json.dumps(value) == text
    return value if is_exact or "string" not in types else text


def _literal(text: str) -> Any:
    """Parse text as JSON or as a Python literal. Return it unchanged if it is neither."""
    stripped = text.strip()
    if stripped.lower() in CONSTANTS:
        return CONSTANTS[stripped.lower()]
    value: Any = text
    try:
        value = json.loads(stripped, strict=False)
    except (ValueError, RecursionError):
        if stripped.startswith(("{", "[", "(")):
            with contextlib.suppress(
                ValueError, SyntaxError, RecursionError, MemoryError, TypeError
            ):
                value = json.loads(json.dumps(ast.literal_eval(stripped), allow_nan=False))
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else text
