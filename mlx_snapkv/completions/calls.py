"""Calls of tools in what a model wrote, in OpenAI's form."""

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from .messages import arguments_of, mended

JSON = json.JSONDecoder(strict=False)  # models put line breaks into texts


def calls_in(text: str, parser: Callable, tools: Any) -> list[dict[str, Any]]:
    """The calls that a text between two markers consists of; none if it is not only calls."""
    try:
        value = parser(text, tools)
    except Exception:  # parsers of what a model wrote
        value = _json_values(text)
    calls = value if isinstance(value, list) else [value]
    made = [call for each in calls if (call := _call(each)) is not None]
    return made if len(made) == len(calls) else []


def is_unfinished(text: str) -> bool:
    """Whether a call goes on behind a marker that ends calls, since the marker is within an argument."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return text.startswith("<function=") and "</function>" not in text
    quoted, opened, escaped = False, 0, False
    for letter in text:
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = letter == "\\", letter != '"'
        elif letter == '"':
            quoted = True
        else:
            opened += (letter in "{[") - (letter in "}]")
    return quoted and opened > 0


def _json_values(text: str) -> list[Any]:
    """The values that a text has one after the other; brackets too many at the end are none."""
    values, rest = [], text.strip()
    while rest.strip("}]`, \n\t"):
        try:
            value, end = JSON.raw_decode(rest)
        except (ValueError, RecursionError):
            return [None]
        values.append(value)
        rest = rest[end:].lstrip(", \n\t")
    return list(_flat(values))


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from value
        else:
            yield value


def _call(value: Any) -> dict[str, Any] | None:
    """A call from a parser's value, if it has a name and arguments by name."""
    if not isinstance(value, dict):
        return None
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = inner.get("name")
    names = ("arguments", "parameters", "args")
    arguments = arguments_of(next((inner[name] for name in names if name in inner), None))
    if not (isinstance(name, str) and name.strip() and isinstance(arguments, dict)):
        return None
    try:
        written = mended(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):  # NaN, which is no JSON
        return None
    call_id = value.get("id")
    return {
        "function": {"name": mended(name.strip()), "arguments": written},
        "type": "function",
        "id": call_id if isinstance(call_id, str) and call_id else str(uuid.uuid4()),
    }
