"""Calls of tools in what a model wrote, in OpenAI's form."""

import ast
import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from .messages import arguments_of, mended

JSON = json.JSONDecoder(strict=False)  # models put line breaks into texts
DEEPEST = 100  # brackets within each other in a call's arguments, which clients send again with every later request
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
NOT_ARGUMENTS = ("name", "function")
CALL_FIELDS = (
    "id",
    "type",
    "index",
)  # of a call, or of its arguments where these stand beside the name


def calls_in(
    text: str, parser: Callable, tools: Any, is_ended: bool = True
) -> list[dict[str, Any]]:
    """The calls that a text consists of; none if it is not only calls.

    What small models get wrong is mended if a marker has ended it: a call that was cut is none.
    """
    try:
        value = parser(text, tools)
    except Exception:  # parsers of what a model wrote
        value = _json_values(text)
        if value == [None] and is_ended:
            value = _json_values(_mended_json(text))
    calls = value if isinstance(value, list) else [value]
    made = [call for each in calls if (call := _call(each)) is not None]
    return made if len(made) == len(calls) else []


def is_unfinished(text: str) -> bool:
    """Whether a call goes on behind a marker that ends calls, since the marker is within an argument."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return text.startswith("<function=") and "</function>" not in text
    quoted, opened = _open_at_end(text)
    return quoted and bool(opened)


def _open_at_end(text: str) -> tuple[bool, str]:
    """Whether JSON ends within a text, and the brackets that would close it."""
    quoted, escaped, closers = False, False, list[str]()
    for letter in text:
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = letter == "\\", letter != '"'
        elif letter == '"':
            quoted = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
        elif letter in "}]" and closers:
            closers.pop()
    return quoted, "".join(reversed(closers))


def _mended_json(text: str) -> str:
    """A text in a code fence without it, with the brackets that it lacks, and Python's values as JSON's."""
    text = re.sub(r"\A\s*```\w*\s*|\s*```\s*\Z", "", text).strip()
    quoted, closers = _open_at_end(text)
    if text.endswith(("}", "]")) and not quoted:  # else what was to come is lost
        text += closers
    if _json_values(text) != [None]:
        return text
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return json.dumps(ast.literal_eval(text))
    return text


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


def _is_deep(value: Any, left: int = DEEPEST) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(part, left - 1) for part in parts)


def _call(value: Any) -> dict[str, Any] | None:
    """A call from a parser's value, if it has a name and arguments by name."""
    if not isinstance(value, dict):
        return None
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = inner.get("name", inner.get("function"))
    beside = {key: each for key, each in inner.items() if key not in NOT_ARGUMENTS}
    named = [inner[key] for key in ARGUMENT_KEYS if key in inner]
    if not named and beside.keys() & {*CALL_FIELDS}:  # whose these are can't be told
        return None
    arguments = arguments_of(named[0] if named else beside)
    if not (isinstance(name, str) and name.strip() and isinstance(arguments, dict)):
        return None
    if _is_deep(arguments):
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
