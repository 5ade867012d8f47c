"""Parse the tool calls in an answer, in any of mlx-lm's formats, and repair the mistakes of small models."""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from . import literal_calls, tagged_calls
from .contents import replace_surrogates
from .messages import parse_arguments

# Maximum nesting depth of a call's arguments. Deeper arguments are rejected, because clients send calls back in later
# requests, where the arguments must be parsable.
MAX_DEPTH = 100
ARGUMENT_FIELDS = ("arguments", "parameters", "args", "input")
NAME_FIELDS = ("name", "function")
METADATA_FIELDS = {"id", "type", "index"}


def parse_tool_calls(
    text: str, parser: Callable, tools: Any, is_complete: bool = True
) -> list[dict[str, Any]]:
    """Return the calls in `text` in OpenAI's format, or [] if it has none or can't be parsed.

    Strings are kept exactly as the model wrote them. The types of other arguments come from the format or from the
    tool's schema.

    Args:
        text: the answer's text between a call's markers.
        parser: the tokenizer's tool parser. It identifies the format. It is called only for formats that this package
            has no parser for.
        tools: the request's tools, or None. Their schemas determine the argument types.
        is_complete: whether the model has finished the text. If not, mistakes are not repaired, because an argument may
            be cut off.
    """
    parsed_values: list[Any] = []
    # If a parser fails for any reason, the text is not a call.
    with contextlib.suppress(Exception):
        parsed_values = _parse_values(text, parser, tools, is_complete)
    calls = []
    for value in parsed_values:
        call = _call_or_none(value)
        if call is None:  # reject all values if one is not a call
            return []
        calls.append(call)
    return calls


def _parse_values(text: str, parser: Callable, tools: Any, is_complete: bool) -> list[Any]:
    """Return the calls in `text` as the format's parser represents them.

    Raises: Exception: the text can't be parsed.
    """
    name = format_name(parser)
    tags = tagged_calls.FORMATS.get(name)
    notation = literal_calls.FORMATS.get(name)
    values: list[Any] = []
    if tags is not None:
        values = tagged_calls.parse_tagged_calls(text, tags, tools, is_complete)
    elif notation is not None:
        values = literal_calls.parse_literal_calls(text, notation, is_complete)
    else:
        # mlx-lm's parsers may raise anything if the model's text is malformed.
        with contextlib.suppress(Exception):
            call_or_calls = parser(text, tools)
            values = call_or_calls if isinstance(call_or_calls, list) else [call_or_calls]
    # Small models often write JSON instead of their own format.
    return values or literal_calls.parse_json_objects(text, is_complete)


def format_name(parser: Callable) -> str:
    """Return the name of an mlx-lm parser's format, such as `qwen3_coder`."""
    module = getattr(parser, "__module__", "")  # e.g. mlx_lm.tool_parsers.qwen3_coder
    _, _, name = module.rpartition(".")
    return name


def ends_within_argument(text: str, parser: Callable) -> bool:
    """Return whether a call's text ends inside an argument.

    If so, an end marker after the text is part of the argument and does not end the call.
    """
    name = format_name(parser)
    tags = tagged_calls.FORMATS.get(name)
    is_json = text.lstrip().startswith(("{", "["))
    if tags is not None and not is_json:
        return tagged_calls.ends_within_tagged_argument(text, tags)
    notation = literal_calls.FORMATS.get(name, literal_calls.JSON)
    return literal_calls.ends_within_string(text, notation)


def _is_too_deep(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Return whether lists and objects in a JSON value are nested more than `max_depth` levels deep."""
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list):
        items = value
    else:
        return False
    return max_depth == 0 or any(_is_too_deep(item, max_depth - 1) for item in items)


def _call_or_none(value: Any) -> dict[str, Any] | None:
    """Convert a parsed value to a call in OpenAI's format. Return None if its name or arguments are invalid."""
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name = function.get("name", function.get("function"))
    if not isinstance(name, str) or not name.strip():
        return None
    argument_field = next((field for field in ARGUMENT_FIELDS if field in function), None)
    if argument_field is not None:
        arguments = parse_arguments(function[argument_field])
    else:  # small models write the arguments next to the name
        arguments = {key: item for key, item in function.items() if key not in NAME_FIELDS}
        # An object that has metadata but no field for arguments is not a call.
        has_metadata = bool(arguments.keys() & METADATA_FIELDS)
        if has_metadata:
            return None
    if not isinstance(arguments, dict) or _is_too_deep(arguments):
        return None
    try:
        arguments_json = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN is not valid JSON
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
