"""Parses the tool calls in a model's answer, and repairs what small models get wrong."""

import ast
import contextlib
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from .contents import replace_surrogates
from .messages import parse_arguments

DECODER = json.JSONDecoder(strict=False)  # accepts line breaks in strings, which models write
# Levels of nesting in a call's arguments. Clients send a call back with later requests, whose JSON must stay parsable.
MAX_DEPTH = 100
ARGUMENT_FIELDS = ("arguments", "parameters", "args", "input")
NAME_FIELDS = ("name", "function")
METADATA_FIELDS = {"id", "type", "index"}


def parse_tool_calls(
    text: str, parser: Callable, tools: Any, is_complete: bool = True
) -> list[dict[str, Any]]:
    """Return the calls in a text, in OpenAI's form, or an empty list if the text has anything other than calls.

    Args:
        text: the answer's text between the markers of a call.
        parser: the tool parser of the model's tokenizer. If it fails, the text is parsed as JSON.
        tools: the request's tools, which some parsers need; None without tools.
        is_complete: whether the model has ended the text. If it has not, mistakes in the JSON are not repaired, since
            an argument may be cut.
    """
    values: list[Any] | None
    try:
        parsed = parser(text, tools)
        values = parsed if isinstance(parsed, list) else [parsed]
    except Exception:  # a parser may raise anything on what a model wrote
        values = _json_values(text)
        if values is None and is_complete:
            values = _repaired_json_values(text)
    calls = []
    for value in values or []:
        call = _tool_call(value)
        if call is None:  # something other than a call, so none of the text is taken for calls
            return []
        calls.append(call)
    return calls


def ends_within_argument(text: str) -> bool:
    """Return whether the text of a call ends within an argument.

    An end marker that follows such a text is part of the argument and does not end the call.
    """
    text = text.strip()
    if not text.startswith(("{", "[")):
        return text.startswith("<function=") and "</function>" not in text
    in_string, closers = _open_at_end(text)
    return in_string and bool(closers)


def _open_at_end(text: str) -> tuple[bool, str]:
    """Return whether JSON text ends within a string, and the brackets that would close it."""
    in_string = False
    is_escaped = False  # whether a backslash comes before the letter
    closers: list[str] = []
    for letter in text:
        if is_escaped:
            is_escaped = False
        elif in_string:
            is_escaped = letter == "\\"
            in_string = letter != '"'
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
        elif letter in "}]" and closers:
            closers.pop()
    return in_string, "".join(reversed(closers))


def _json_values(text: str) -> list[Any] | None:
    """Return the JSON values in a text, the elements of lists one by one; None if other text is between them.

    Commas, backticks and closing brackets after the last value are ignored.
    """
    values: list[Any] = []
    rest = text.strip()
    while rest.strip("}]`, \n\t"):
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        values += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(", \n\t")
    return values


def _repaired_json_values(text: str) -> list[Any] | None:
    """Return the JSON values in a text after repairs, or None if they do not suffice.

    A code fence is removed, missing brackets at the end are added, and a Python literal is converted.
    """
    text = re.sub(r"\A\s*```\w*\s*|\s*```\s*\Z", "", text).strip()
    in_string, closers = _open_at_end(text)
    if text.endswith(("}", "]")) and not in_string:
        text += closers
    values = _json_values(text)
    if values is None:
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return _json_values(json.dumps(ast.literal_eval(text)))
    return values


def _is_too_deep(value: Any, n_levels: int = MAX_DEPTH) -> bool:
    """Return whether a JSON value has `n_levels` levels of nesting or more."""
    if n_levels == 0:
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(_is_too_deep(part, n_levels - 1) for part in value)


def _tool_call(value: Any) -> dict[str, Any] | None:
    """Return a parsed value as a call in OpenAI's form; None if it lacks a name or has no object as arguments."""
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name = function.get("name", function.get("function"))
    if not isinstance(name, str) or not name.strip():
        return None
    argument_fields = [key for key in ARGUMENT_FIELDS if key in function]
    if argument_fields:
        arguments = parse_arguments(function[argument_fields[0]])
    else:  # small models write the arguments beside the name
        arguments = {key: item for key, item in function.items() if key not in NAME_FIELDS}
        if arguments.keys() & METADATA_FIELDS:  # it is unclear whether these are arguments
            return None
    if not isinstance(arguments, dict) or _is_too_deep(arguments):
        return None
    try:
        arguments_json = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # NaN is not valid JSON
        return None
    call_id = value.get("id")
    return {
        "function": {
            "name": replace_surrogates(name.strip()),
            "arguments": replace_surrogates(arguments_json),
        },
        "type": "function",
        "id": call_id if isinstance(call_id, str) and call_id else str(uuid.uuid4()),
    }
