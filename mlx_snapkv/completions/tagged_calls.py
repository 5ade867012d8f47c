"""Parse tool calls written with tags, such as `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

Values are not escaped, so they may contain tags themselves.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .argument_types import convert_argument, parameters_of, properties_of, types_of

CDATA_START, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class Tags:
    """A format's tags, as regular expressions.

    Attributes:
        call: start of a call, with the group `name`.
        call_end: end of a call.
        argument: start of an argument, with the group `key`, and with `type` if the format has types. If a tag has no
            key, the value after it is a JSON object with all arguments.
        argument_end: end of an argument.
        ends_at_marker: whether the model's end marker is also the end of the last call. If so, the text between the
            markers does not end with a `call_end`.
        has_cdata: whether a value may be a CDATA section.
    """

    call: str
    call_end: str
    argument: str
    argument_end: str
    ends_at_marker: bool = False
    has_cdata: bool = False

    @cached_property
    def tag_outside_values(self) -> re.Pattern[str]:
        """Return the regular expression for a tag that is not part of a value.

        The matching group is named after the kind of tag: `argument`, `call` or `call_end`.
        """
        return re.compile(
            f"(?P<argument>{self.argument})|(?P<call>{self.call})|(?P<call_end>{self.call_end})"
        )

    @cached_property
    def argument_tag(self) -> re.Pattern[str]:
        """Return the regular expression for the start or end of an argument.

        The matching group is named after the kind of tag: `argument` or `argument_end`.
        """
        return re.compile(f"(?P<argument>{self.argument})|(?P<argument_end>{self.argument_end})")

    @cached_property
    def final_call_end(self) -> re.Pattern[str]:
        """Return the regular expression for a call's end that is followed by another call or the end of the text."""
        return re.compile(rf"{self.call_end}\s*(?=\Z|{self.call})")

    @cached_property
    def after_argument(self) -> re.Pattern[str]:
        """Return the regular expression for what may follow an argument: another argument, or the end of the call."""
        end_of_text = r"|\Z" if self.ends_at_marker else ""
        return re.compile(rf"\s*(?:{self.argument}{end_of_text}|{self.final_call_end.pattern})")


def _quoted(group: str) -> str:
    """Return the regular expression for a name with or without quotes, such as `"city"`.

    The name without quotes is captured as `group`.
    """
    first_letter = r"""[^\s<>"']"""
    more_letters = r"""[^<>"'\n]*?"""
    return rf"""\s*["']?(?P<{group}>{first_letter}{more_letters})["']?"""


def _glm_tags(prefix: str) -> Tags:
    """Return GLM's tags. Tag names start with `prefix`.

    A call is `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`. The text between the
    model's markers starts with the first call's name, without a tag.
    """
    call_start, call_end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    key_start, key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
    value_start, value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"
    name = r"""(?P<name>[^\s<>{}\[\]"']+)"""
    key = r"(?P<key>[^<>]+?)"
    blanks_or_newlines = (
        r"(?:\\n|\s)*"  # a line break may also be written as a backslash and an "n"
    )
    return Tags(
        call=rf"(?:\A|{call_start})\s*{name}\s*(?={key_start}|{call_start}|{call_end}|\Z)",
        call_end=call_end,
        argument=rf"{key_start}\s*{key}\s*{key_end}{blanks_or_newlines}{value_start}",
        argument_end=value_end,
        ends_at_marker=True,
    )


def _invoke_tags(prefix: str) -> Tags:
    """Return the tags of an `<invoke name="NAME">` format. Tag names start with `prefix`.

    A call is `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`.
    """
    name, key = _quoted("name"), _quoted("key")
    earlier_attributes = r"\b[^<>]*?\b"
    later_attributes = r"(?:\s[^<>]*)?"
    return Tags(
        call=rf"<{prefix}invoke{earlier_attributes}name={name}\s*>",
        call_end=f"</{prefix}invoke>",
        argument=rf"<{prefix}parameter{earlier_attributes}name={key}{later_attributes}>",
        argument_end=f"</{prefix}parameter>",
    )


# Tags, keyed by the name of mlx-lm's parser.
FORMATS = {
    "glm47": _glm_tags(""),
    # <|open|>call tool="NAME"<|sep|> <|open|>argument key="KEY" type="TYPE"<|sep|> VALUE <|close|>argument<|sep|> ...
    # <|close|>call<|sep|>
    "kimi_k3": Tags(
        call=r'<\|open\|>call\b[^<>|]*?\btool="(?P<name>[^"<>|]+)"[^<>|]*<\|sep\|>',
        call_end=r"<\|close\|>call<\|sep\|>",
        argument=(
            r'<\|open\|>(?:argument(?=[^<>|]*?\bkey="(?P<key>[^"<>|]+)")'
            r'(?:(?=[^<>|]*?\btype="(?P<type>\w+)"))?|json\b)[^<>|]*<\|sep\|>'
        ),
        argument_end=r"<\|close\|>(?:argument|json)<\|sep\|>",
    ),
    "longcat": _glm_tags("longcat_"),
    "minicpm5": Tags(
        call=rf"(?:\A(?:\s*<function\s+name\s*=)?|<function\s+name\s*=){_quoted('name')}\s*>",
        call_end="</function>",
        argument=rf"<param\s+name\s*={_quoted('key')}\s*>",
        argument_end="</param>",
        ends_at_marker=True,
        has_cdata=True,
    ),
    "minimax_m2": _invoke_tags(""),
    "muse_spark": _invoke_tags("atem:"),
    "qwen3_coder": Tags(
        call=rf"<function={_quoted('name')}\s*>",
        call_end="</function>",
        argument=rf"<parameter={_quoted('key')}\s*>\n?",
        argument_end=r"\n?</parameter>",
    ),
}


class UnclosedArgument(ValueError):
    """The text ends inside an argument."""


def parse_tagged_calls(
    text: str, tags: Tags, tools: Any, is_complete: bool
) -> list[dict[str, Any]]:
    """Return the calls in `text` as dicts with `name` and `arguments`.

    Args:
        text: the answer's text between a call's markers.
        tags: the tags of the model's format.
        tools: the request's tools, or None. Their schemas determine the argument types.
        is_complete: whether the model has finished the text. If so, closing tags are optional.

    Raises:
        UnclosedArgument: an argument has no end.
        ValueError: a call has no end, or its arguments are not an object.
    """
    call_pattern = re.compile(tags.call)
    calls = []
    position = 0
    while call := call_pattern.search(text, position):
        name = call["name"]
        parameters = parameters_of(name, tools)
        arguments, position = _read_arguments(text, call.end(), tags, parameters, is_complete)
        calls.append({"name": name, "arguments": arguments})
    return calls


def _read_arguments(
    text: str, start: int, tags: Tags, parameters: dict[str, Any], is_complete: bool
) -> tuple[dict[str, Any], int]:
    """Return the call arguments that start at `start`, and the position after the call.

    `parameters` is the schema of the tool's parameters. For errors, see `parse_tagged_calls`.
    """
    arguments: dict[str, Any] = {}
    position = start
    tag = tags.tag_outside_values.search(text, position)
    while tag is not None and tag["argument"]:
        expected_keys = properties_of(parameters).keys() - arguments.keys()
        value_start = tag.end()
        value_end, position = _find_closing_tag(text, value_start, tags, expected_keys, is_complete)
        value = _without_cdata(text[value_start:value_end], tags)
        arguments |= _parse_argument(tag, value, parameters)
        tag = tags.tag_outside_values.search(text, position)
    if tag is not None and tag["call_end"]:
        position = tag.end()
    elif not is_complete:
        raise ValueError("a call has no end")
    return arguments, position


def ends_within_tagged_argument(text: str, tags: Tags) -> bool:
    """Return whether `text` ends inside a call's argument."""
    try:
        parse_tagged_calls(text, tags, None, is_complete=False)
    except UnclosedArgument:
        return True
    except ValueError:
        return False
    return False


def _parse_argument(tag: re.Match[str], value: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return an argument as a dict with one item, or all arguments as a dict if the tag has no key.

    `tag` is the match of the argument's start tag.
    """
    groups = tag.groupdict()
    key = groups["key"]
    if key is None:
        return dict(json.loads(value, strict=False))
    type_in_tag = groups.get("type")
    if type_in_tag:
        types = {type_in_tag}
    else:
        schema = properties_of(parameters).get(key)
        types = types_of(schema, parameters)
    return {key: convert_argument(value, types)}


def _find_closing_tag(
    text: str, value_start: int, tags: Tags, expected_keys: Collection[str], is_complete: bool
) -> tuple[int, int]:
    """Return the start and the end of a value's closing tag.

    A value may contain tags as text. The closing tag is the first that meets two conditions: it does not close an
    argument inside the value, and it is followed by the next argument or the end of the call. If there is no such tag
    but the text is complete, the value's end is guessed.

    Raises: UnclosedArgument: the value has no end.
    """
    n_open = 0  # number of open arguments inside the value
    search_start = _skip_cdata(text, value_start, tags)
    for tag in tags.argument_tag.finditer(text, search_start):
        starts_argument = bool(tag["argument"])
        if starts_argument:
            n_open += 1
        elif n_open == 0 and tags.after_argument.match(text, tag.end()):
            return tag.span()
        else:
            n_open = max(n_open - 1, 0)
    if not is_complete:
        raise UnclosedArgument("an argument has no end")
    return _guess_closing_tag(text, value_start, tags, expected_keys)


def _guess_closing_tag(
    text: str, value_start: int, tags: Tags, expected_keys: Collection[str]
) -> tuple[int, int]:
    """Guess where a value ends if its closing tag is missing or followed by unexpected text.

    The value's limit is the start of the next argument that the tool expects, or of the tag that ends the call. The
    last closing tag before the limit is used. If there is no such tag, the value ends at the limit, and a final line
    break is dropped. Return the start and the end of the closing tag.

    Raises: UnclosedArgument: the value has neither a closing tag nor a limit.
    """
    next_tag_start = _next_tag_start(text, value_start, tags, expected_keys)
    closing_tags = _closing_tags(text, value_start, next_tag_start, tags)
    if closing_tags:
        return closing_tags[-1].span()
    if next_tag_start == len(text):
        raise UnclosedArgument("an argument has no end")
    has_final_newline = text.endswith("\n", value_start, next_tag_start)
    value_end = next_tag_start - 1 if has_final_newline else next_tag_start
    return value_end, next_tag_start


def _next_tag_start(text: str, value_start: int, tags: Tags, expected_keys: Collection[str]) -> int:
    """Return the start of the next expected argument, or of the tag that ends the call if that comes first.

    Return the text's length if there is neither.

    An argument counts only directly after a line break, or anywhere after a closing tag.
    """
    call_end = tags.final_call_end.search(text, value_start)
    limit = call_end.start() if call_end else len(text)
    for tag in tags.tag_outside_values.finditer(text, value_start, limit):
        is_expected = tag["argument"] and tag["key"] in expected_keys
        if not is_expected:
            continue
        follows_line_break = text.endswith("\n", value_start, tag.start())
        if follows_line_break or _closing_tags(text, value_start, tag.start(), tags):
            return tag.start()
    return limit


def _closing_tags(text: str, start: int, end: int, tags: Tags) -> list[re.Match[str]]:
    """Return the closing tags of arguments between two positions."""
    return [tag for tag in tags.argument_tag.finditer(text, start, end) if tag["argument_end"]]


def _skip_cdata(text: str, value_start: int, tags: Tags) -> int:
    """Return the end of a value's CDATA section, or the value's start if it has none."""
    if not tags.has_cdata or not text.startswith(CDATA_START, value_start):
        return value_start
    section_end = text.find(CDATA_END, value_start)
    return len(text) if section_end < 0 else section_end


def _without_cdata(value: str, tags: Tags) -> str:
    """Return the text in a value's CDATA section, or the value itself if it has none."""
    section = value.strip()
    is_cdata = section.startswith(CDATA_START) and section.endswith(CDATA_END)
    if not (tags.has_cdata and is_cdata):
        return value
    return section.removeprefix(CDATA_START).removesuffix(CDATA_END)
