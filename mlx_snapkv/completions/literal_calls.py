"""Parse tool calls written as the tool's name and a literal in the notation of JSON, Python or Gemma."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DECODER = json.JSONDecoder(strict=False)  # models write line breaks in strings
CLOSERS = {"{": "}", "[": "]", "(": ")"}
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
ESCAPED |= {letter: letter for letter in "\"'\\"}
KEYWORDS = re.compile(r"\(\s*(?:[\w-]+\s*=|\))")  # start of keyword arguments
NUMBER = r"[\w.+-]+"  # also matches constants
PLAIN = r"[^{}\[\](),]+"
BARE = rf"{PLAIN}(?:,(?!\s*[\w.$\"'-]+\s*[:=]){PLAIN})*"  # a comma before a key ends the value
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Notation:
    """How a format writes calls.

    Attributes:
        header: regular expression for the text before the arguments, with the groups `name` and optionally `id`. Empty
            if calls have no header.
        quotes: string delimiters, longest first.
        escapes: whether a backslash in a string escapes the next letter.
        is_json: whether arguments are JSON. If so, unquoted text is an error, and slashes may be escaped.
        end: text after a call, or "".
    """

    header: str = ""
    quotes: tuple[str, ...] = ('"', "'")
    escapes: bool = True
    is_json: bool = True
    end: str = ""

    @cached_property
    def next_call(self) -> re.Pattern[str]:
        """Return the compiled `header`."""
        return re.compile(self.header)


JSON = Notation()
NAME = r"(?<![\w.-])(?P<name>[\w.-]+)"
# Tool-call notations, by the name of mlx-lm's parser.
FORMATS = {
    "function_gemma": Notation(
        rf"call:{NAME}\s*(?={{)", ("<escape>",), escapes=False, is_json=False
    ),
    "gemma4": Notation(rf"call:{NAME}\s*(?={{)", ('<|"|>',), escapes=False, is_json=False),
    "json_tools": JSON,
    "kimi_k2": Notation(
        r"(?<![^\s<>])(?P<id>(?:functions\.)?(?P<name>[^\s:<>]+):\d+)\s*<\|tool_call_argument_begin\|>\s*",
        end="<|tool_call_end|>",
    ),
    "mistral": Notation(rf"{NAME}\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]+)\s*)?\[ARGS\]\s*"),
    "pythonic": Notation(
        rf"(?:\A\s*|[\[,;\n][ \t]*){NAME}(?=\()", ('"""', "'''", '"', "'"), is_json=False
    ),
}


def parse_literal_calls(text: str, notation: Notation, is_complete: bool) -> list[dict[str, Any]]:
    """Return the calls in a text as dicts with `name`, `arguments` and optionally `id`.

    Args:
        text: the answer's text between a call's markers.
        notation: the notation of the model's format.
        is_complete: whether the model has finished the text. If so, mistakes are repaired.

    Raises: ValueError: a call's arguments can't be parsed.
    """
    calls: list[dict[str, Any]] = []
    position = 0
    while notation.header and (header := notation.next_call.search(text, position)):
        arguments, position = _value(text, header.end(), notation, is_complete)
        calls.append({**header.groupdict(), "arguments": arguments})
    return calls


def parse_values(text: str, is_complete: bool) -> list[Any]:
    """Return the JSON objects in a text that may contain other text as well. Lists are flattened.

    Raises: ValueError: an object or list can't be parsed.
    """
    values: list[Any] = []
    position = 0
    while bracket := re.compile(r"[{\[]").search(text, position):
        value, position = _value(text, bracket.start(), JSON, is_complete)
        values += _flat(value)
    return values


def _flat(value: Any) -> list[Any]:
    """Flatten nested lists. Return any other value as a list of one."""
    return [part for item in value for part in _flat(item)] if isinstance(value, list) else [value]


def ends_within_string(text: str, notation: Notation) -> bool:
    """Return whether a text ends inside a string that is inside brackets."""
    reader = Reader(text, 0, notation)
    depth = 0
    while reader.position < len(text):
        letter = text[reader.position]
        if depth and reader.quote():
            try:
                reader.string()
            except ValueError:
                return True
            continue
        depth = max(0, depth + (letter in CLOSERS) - (letter in CLOSERS.values()))
        reader.position += 1
    return False


def _value(text: str, start: int, notation: Notation, is_complete: bool) -> tuple[Any, int]:
    """Return the value at `start`, and the position after it."""
    if notation.is_json:
        try:
            return DECODER.raw_decode(text, start)
        except ValueError:
            if not is_complete:
                raise
    reader = Reader(text, start, notation, is_complete)
    return reader.value(), reader.position


class Reader:
    """Reads a literal as models write it: with unquoted keys, any quotes, and Python or JSON constants.

    A comma may follow the last item, and outer braces may be doubled. Unless the notation is JSON, an unquoted value
    that is neither a constant nor a number is text.

    Attributes:
        position: current position in the text.
    """

    def __init__(self, text: str, position: int, notation: Notation, is_complete: bool = False):
        """Start at `position`. If `is_complete`, closing brackets may be missing at the end of the text."""
        self.position = position
        self._text = text
        self._notation = notation
        self._is_complete = is_complete

    def value(self, in_list: bool = False) -> Any:
        """Read the value at the current position.

        Raises: ValueError: there is no value.
        """
        self._skip_blanks()
        opener = self._text[self.position : self.position + 1]
        if self.quote():
            return self.string()
        if self._skip(r"\{(?=\{)"):
            value = self._object("}")
            self._skip(r"\s*\}")
            return value
        if opener == "{" or KEYWORDS.match(self._text, self.position):
            return self._object(CLOSERS[opener])
        if opener in ("[", "("):
            return self._list(CLOSERS[opener])
        return self._bare(in_list)

    def quote(self) -> str:
        """Return the quote at the current position, or ""."""
        at = self._text.startswith
        return next((quote for quote in self._notation.quotes if at(quote, self.position)), "")

    def string(self) -> str:
        """Read the string at the current position.

        Raises: ValueError: the string has no end.
        """
        quote = self.quote()
        end = re.escape(quote)
        letter = rf"\\.|(?!{end})[^\\]" if self._notation.escapes else rf"(?!{end})."
        whole = self._match(rf"(?s:{end}(?:{letter})*{end})")
        body = whole[len(quote) : -len(quote)]
        return ESCAPE.sub(self._unescaped, body) if self._notation.escapes else body

    def _unescaped(self, escape: re.Match[str]) -> str:
        """Return the character that an escape sequence encodes. Unknown sequences are kept as they are."""
        code = escape[1] or escape[2]
        if code:
            return chr(int(code, 16))
        if escape[3] == "/" and self._notation.is_json:
            return "/"
        return ESCAPED.get(escape[3], escape[0])

    def _object(self, closer: str) -> dict[str, Any]:
        """Read the object or the keyword arguments at the current position."""
        items: dict[str, Any] = {}
        for _ in self._items(closer):
            key = self.string() if self.quote() else self._match(r"[^\s:=,\"'{}\[\]()]+")
            self._match(r"\s*[:=]")
            items[key] = self.value()
        return items

    def _list(self, closer: str) -> list[Any]:
        """Read the list at the current position."""
        return [self.value(in_list=True) for _ in self._items(closer)]

    def _items(self, closer: str) -> Iterator[None]:
        """Step through the items within brackets, then past the closing bracket."""
        self.position += 1
        while not self._at(closer):
            yield
            if not self._skip(r"\s*,"):
                if not self._at(closer):
                    raise ValueError(f"{closer} is missing")
                return

    def _bare(self, in_list: bool) -> Any:
        """Read an unquoted value: a constant, a number, or text if the notation allows it."""
        pattern = NUMBER if self._notation.is_json else PLAIN if in_list else BARE
        text = self._match(pattern).strip()
        if text in CONSTANTS:
            return CONSTANTS[text]
        try:
            return json.loads(text)
        except ValueError:
            if self._notation.is_json:
                raise
        return text

    def _at(self, closer: str) -> bool:
        """Return whether the brackets end here, and read the closing bracket.

        In a complete text, the last closing brackets may be missing.
        """
        self._skip_blanks()
        if self._text.startswith(closer, self.position):
            self.position += 1
            return True
        rest = self._text[self.position :]
        is_end = not rest or rest.startswith(self._notation.end or "\0")
        # Text that does not end with a bracket may be cut off.
        follows_bracket = self._text[: self.position].rstrip().endswith(("}", "]", ")"))
        return self._is_complete and is_end and follows_bracket

    def _match(self, pattern: str) -> str:
        """Read the text that matches a pattern at the current position.

        Raises: ValueError: the pattern does not match.
        """
        found = re.compile(pattern).match(self._text, self.position)
        if found is None:
            raise ValueError(f"{pattern} is missing")
        self.position = found.end()
        return found[0]

    def _skip(self, pattern: str) -> bool:
        """Read a pattern if it matches at the current position, and return whether it did."""
        found = re.compile(pattern).match(self._text, self.position)
        self.position = found.end() if found else self.position
        return found is not None

    def _skip_blanks(self) -> None:
        self._skip(r"\s*")
