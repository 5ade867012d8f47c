"""Parse the tool calls in an answer, in any of mlx-lm's formats, and repair the mistakes of small models."""

import contextlib
import json
import uuid
from collections.abc import Callable
from typing import Any

from . import literal_calls, tagged_calls
from .contents import replace_surrogates
from .messages import parse_arguments

# Maximum nesting depth of a call's arguments. Clients send calls back in later requests, whose JSON must be parsable.
MAX_DEPTH = 100
ARGUMENT_FIELDS = ("arguments", "parameters", "args", "input")
NAME_FIELDS = ("name", "function")
METADATA_FIELDS = {"id", "type", "index"}


def parse_tool_calls(
    text: str, parser: Callable, tools: Any, is_complete: bool = True
) -> list[dict[str, Any]]:
    """Return the calls in a text in OpenAI's format. The list is empty if the text has no calls or can't be parsed.

    Strings are kept exactly as the model wrote them. The types of other arguments come from the format or from the
    tool's schema.

    Args:
        text: the answer's text between a call's markers.
        parser: the tokenizer's tool parser. It identifies the format, and parses formats that are unknown here.
        tools: the request's tools, whose schemas determine the types of arguments, or None.
        is_complete: whether the model has finished the text. If not, mistakes are not repaired, because an argument may
            be cut off.
    """
    values: list[Any] = []
    # mlx-lm's parsers may raise anything if the model's text is malformed.
    with contextlib.suppress(Exception):
        values = _values(text, parser, tools, is_complete)
    calls = []
    for value in values:
        call = _tool_call(value)
        if call is None:  # if one value is not a call, none is
            return []
        calls.append(call)
    return calls


def _values(text: str, parser: Callable, tools: Any, is_complete: bool) -> list[Any]:
    """Return the calls in a text in the format's own representation.

    Raises: Exception: the text can't be parsed.
    """
    name = format_name(parser)
    values: list[Any] = []
    if tags := tagged_calls.FORMATS.get(name):
        values = tagged_calls.parse_tagged_calls(text, tags, tools, is_complete)
    elif notation := literal_calls.FORMATS.get(name):
        values = literal_calls.parse_literal_calls(text, notation, is_complete)
    else:
        with contextlib.suppress(Exception):
            parsed = parser(text, tools)
            values = parsed if isinstance(parsed, list) else [parsed]
    return values or literal_calls.parse_values(text, is_complete)


def format_name(parser: Callable) -> str:
    """Return the name of the format that one of mlx-lm's parsers reads, such as `qwen3_coder`."""
    return getattr(parser, "__module__", "").rpartition(".")[2]


def ends_within_argument(text: str, parser: Callable) -> bool:
    """Return whether the text of a call ends inside an argument.

    If so, an end marker after the text is part of the argument and does not end the call.
    """
    name = format_name(parser)
    if (tags := tagged_calls.FORMATS.get(name)) and not text.lstrip().startswith(("{", "[")):
        return tagged_calls.ends_within_tagged_argument(text, tags)
    notation = literal_calls.FORMATS.get(name, literal_calls.JSON)
    return literal_calls.ends_within_string(text, notation)


def _is_too_deep(value: Any, n_levels: int = MAX_DEPTH) -> bool:
    """Return whether a JSON value has `n_levels` or more levels of nesting."""
    if n_levels == 0:
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(_is_too_deep(part, n_levels - 1) for part in value)


def _tool_call(value: Any) -> dict[str, Any] | None:
    """Convert a parsed value to a call in OpenAI's format. Return None if its name or arguments are invalid."""
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name = function.get("name", function.get("function"))
    if not isinstance(name, str) or not name.strip():
        return None
    argument_fields = [key for key in ARGUMENT_FIELDS if key in function]
    if argument_fields:
        arguments = parse_arguments(function[argument_fields[0]])
    else:  # small models write the arguments next to the name
        arguments = {key: item for key, item in function.items() if key not in NAME_FIELDS}
        if arguments.keys() & METADATA_FIELDS:  # these fields may or may not be arguments
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
