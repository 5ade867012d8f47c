"""Parse tool calls written with tags, such as `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

Values are not escaped, so they may contain tags themselves.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .argument_types import convert, parameters_of, properties_of, types_of

CDATA_START, CDATA_END = "<![CDATA[", "]]>"
QUOTED = r"""\s*["']?(?P<{}>[^\s<>"'][^<>"'\n]*?)["']?"""


@dataclass(frozen=True)
class Tags:
    """The tags of a format, as regular expressions.

    Attributes:
        call: start of a call, with the group `name`.
        call_end: end of a call.
        argument: start of an argument, with the group `key`, and with `type` if the format has types. If `key` is
            missing, the value is an object with all arguments.
        argument_end: end of an argument.
        ends_at_marker: whether the model's end marker ends the call, so that the text between the markers has no
            `call_end`.
        has_cdata: whether a value may be a CDATA section.
    """

    call: str
    call_end: str
    argument: str
    argument_end: str
    ends_at_marker: bool = False
    has_cdata: bool = False

    @cached_property
    def next_call(self) -> re.Pattern[str]:
        """Return the expression for the start of a call."""
        return re.compile(self.call)

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Return the expression for tags outside of values."""
        return re.compile(
            f"(?P<argument>{self.argument})|(?P<call>{self.call})|(?P<call_end>{self.call_end})"
        )

    @cached_property
    def value_tag(self) -> re.Pattern[str]:
        """Return the expression for the start and end of arguments."""
        return re.compile(f"(?P<argument>{self.argument})|(?P<end>{self.argument_end})")

    @cached_property
    def last_tag(self) -> re.Pattern[str]:
        """Return the expression for an end of a call that is followed by another call or by the end of the text."""
        return re.compile(rf"{self.call_end}\s*(?=\Z|{self.call})")

    @cached_property
    def after_value(self) -> re.Pattern[str]:
        """Return the expression for what may follow an argument."""
        end_of_text = r"|\Z" if self.ends_at_marker else ""
        return re.compile(rf"\s*(?:{self.argument}{end_of_text}|{self.last_tag.pattern})")


def _glm(prefix: str) -> Tags:
    """Return GLM's tags, with `prefix` in their names."""
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    return Tags(
        call=rf"(?:\A|<{prefix}tool_call>)\s*(?P<name>[^\s<>{{}}\[\]\"']+)\s*(?=<{key}>|\Z|</?{prefix}tool_call>)",
        call_end=f"</{prefix}tool_call>",
        argument=rf"<{key}>\s*(?P<key>[^<>]+?)\s*</{key}>(?:\\n|\s)*<{value}>",
        argument_end=f"</{value}>",
        ends_at_marker=True,
    )


def _invoke(prefix: str) -> Tags:
    """Return the tags of `<invoke name="NAME">` formats, with `prefix` in their names."""
    return Tags(
        call=rf"<{prefix}invoke\b[^<>]*?\bname={QUOTED.format('name')}\s*>",
        call_end=f"</{prefix}invoke>",
        argument=rf"<{prefix}parameter\b[^<>]*?\bname={QUOTED.format('key')}(?:\s[^<>]*)?>",
        argument_end=f"</{prefix}parameter>",
    )


# Tags by the name of mlx-lm's parser.
FORMATS = {
    "glm47": _glm(""),
    "kimi_k3": Tags(
        call=r'<\|open\|>call\b[^<>|]*?\btool="(?P<name>[^"<>|]+)"[^<>|]*<\|sep\|>',
        call_end=r"<\|close\|>call<\|sep\|>",
        argument=(
            r'<\|open\|>(?:argument(?=[^<>|]*?\bkey="(?P<key>[^"<>|]+)")'
            r'(?:(?=[^<>|]*?\btype="(?P<type>\w+)"))?|json\b)[^<>|]*<\|sep\|>'
        ),
        argument_end=r"<\|close\|>(?:argument|json)<\|sep\|>",
    ),
    "longcat": _glm("longcat_"),
    "minicpm5": Tags(
        call=rf"(?:\A(?:\s*<function\s+name\s*=)?|<function\s+name\s*=){QUOTED.format('name')}\s*>",
        call_end="</function>",
        argument=rf"<param\s+name\s*={QUOTED.format('key')}\s*>",
        argument_end="</param>",
        ends_at_marker=True,
        has_cdata=True,
    ),
    "minimax_m2": _invoke(""),
    "muse_spark": _invoke("atem:"),
    "qwen3_coder": Tags(
        call=rf"<function={QUOTED.format('name')}\s*>",
        call_end="</function>",
        argument=rf"<parameter={QUOTED.format('key')}\s*>\n?",
        argument_end=r"\n?</parameter>",
    ),
}


class UnclosedArgument(ValueError):
    """The text ends inside an argument."""


def parse_tagged_calls(
    text: str, tags: Tags, tools: Any, is_complete: bool
) -> list[dict[str, Any]]:
    """Return the calls in a text as dicts with `name` and `arguments`.

    Args:
        text: the answer's text between a call's markers.
        tags: the tags of the model's format.
        tools: the request's tools, whose schemas determine the types of arguments, or None.
        is_complete: whether the model has finished the text. If so, closing tags may be missing.

    Raises:
        UnclosedArgument: an argument has no end.
        ValueError: a call has no end, or its arguments are not an object.
    """
    calls = []
    position = 0
    while call := tags.next_call.search(text, position):
        parameters = parameters_of(call["name"], tools)
        arguments: dict[str, Any] = {}
        position = call.end()
        tag = tags.tag.search(text, position)
        while tag is not None and tag["argument"]:
            expected = properties_of(parameters).keys() - arguments.keys()
            end, position = _value_end(text, tag.end(), tags, expected, is_complete)
            arguments |= _argument(tag, _without_cdata(text[tag.end() : end], tags), parameters)
            tag = tags.tag.search(text, position)
        if tag is not None and tag["call_end"]:
            position = tag.end()
        elif not is_complete:
            raise ValueError("a call has no end")
        calls.append({"name": call["name"], "arguments": arguments})
    return calls


def ends_within_tagged_argument(text: str, tags: Tags) -> bool:
    """Return whether a text with calls ends inside an argument."""
    try:
        parse_tagged_calls(text, tags, None, is_complete=False)
    except UnclosedArgument:
        return True
    except ValueError:
        return False
    return False


def _argument(tag: re.Match[str], value: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return an argument as a dict with one item, or all arguments if the value is an object of them."""
    groups = tag.groupdict()
    key = groups["key"]
    if key is None:
        return dict(json.loads(value, strict=False))
    declared = {groups["type"]} if groups.get("type") else None
    schema = properties_of(parameters).get(key)
    return {key: convert(value, declared or types_of(schema, parameters))}


def _value_end(
    text: str, start: int, tags: Tags, expected: Collection[str], is_complete: bool
) -> tuple[int, int]:
    """Return the end of the value that starts at `start`, and the end of its closing tag.

    The closing tag is one that is followed by another tag of the call, and does not close an argument inside the value.

    Raises: UnclosedArgument: the value has no end.
    """
    depth = 0
    for tag in tags.value_tag.finditer(text, _after_cdata(text, start, tags)):
        if tag["argument"]:
            depth += 1
        elif depth == 0 and tags.after_value.match(text, tag.end()):
            return tag.span()
        else:
            depth = max(depth - 1, 0)
    if not is_complete:
        raise UnclosedArgument("an argument has no end")
    return _mended_value_end(text, start, tags, expected)


def _mended_value_end(
    text: str, start: int, tags: Tags, expected: Collection[str]
) -> tuple[int, int]:
    """Return what `_value_end` does, for a value whose closing tag is missing or followed by other text.

    The value ends before the end of the call, or before the next argument that the tool expects.
    """
    last = tags.last_tag.search(text, start)
    limit = last.start() if last else len(text)
    for tag in tags.tag.finditer(text, start, limit):
        if tag["argument"] and tag["key"] in expected and _closes(text, start, tag.start(), tags):
            limit = tag.start()
            break
    ends = [tag for tag in tags.value_tag.finditer(text, start, limit) if tag["end"]]
    if ends:
        return ends[-1].span()
    if limit == len(text):
        raise UnclosedArgument("an argument has no end")
    return limit - text.endswith("\n", start, limit), limit


def _closes(text: str, start: int, end: int, tags: Tags) -> bool:
    """Return whether a value may end between `start` and `end`, at a closing tag or a final line break."""
    found = (tag["end"] for tag in tags.value_tag.finditer(text, start, end))
    return text[start:end].endswith("\n") or any(found)


def _after_cdata(text: str, start: int, tags: Tags) -> int:
    """Return the position of the end of a value's CDATA section, or `start` if the value has none."""
    if not tags.has_cdata or not text.startswith(CDATA_START, start):
        return start
    end = text.find(CDATA_END, start)
    return len(text) if end < 0 else end


def _without_cdata(value: str, tags: Tags) -> str:
    """Return the text in a value's CDATA section, or the value itself if it has none."""
    inner = value.strip()
    if not (tags.has_cdata and inner.startswith(CDATA_START) and inner.endswith(CDATA_END)):
        return value
    return inner[len(CDATA_START) : -len(CDATA_END)]
