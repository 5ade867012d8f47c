"""Parse tool calls written as a tool name and a JSON, Python or Gemma literal."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DECODER = json.JSONDecoder(strict=False)  # models write line breaks in strings
CLOSERS = {"{": "}", "[": "]", "(": ")"}
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
OPENING_BRACKET = re.compile(r"[{\[]")
ESCAPE_SEQUENCE = re.compile(
    r"""
    \\ (?: u (?P<u_code> [0-9a-fA-F]{4} )   # \u00e9
         | x (?P<x_code> [0-9a-fA-F]{2} )   # \xe9
         | (?P<letter> . ) )                # \n
    """,
    re.VERBOSE | re.DOTALL,
)
# Maps the character after a backslash to the character that the escape sequence encodes.
CHARACTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
CHARACTERS |= {letter: letter for letter in "\"'\\"}
KEYWORD_ARGUMENTS = re.compile(r"\(\s*(?:[\w-]+\s*=|\))")  # `(key=` or `()`
UNQUOTED_KEY = r"[^\s:=,\"'{}\[\]()]+"
NUMBER_OR_CONSTANT = r"[\w.+-]+"
UNQUOTED_ITEM = r"[^{}\[\](),]+"
# An unquoted value may contain commas, but ends at a comma before the next key, as in `, key:`.
COMMA_IN_VALUE = r",(?!\s*[\w.$\"'-]+\s*[:=])"
UNQUOTED_VALUE = rf"{UNQUOTED_ITEM}(?:{COMMA_IN_VALUE}{UNQUOTED_ITEM})*"


@dataclass(frozen=True)
class Notation:
    """The call syntax of one format.

    Attributes:
        header: regular expression for the text before the arguments, with the groups `name` and optionally `id`. Empty
            if calls have no header.
        quotes: string delimiters, longest first.
        escapes: whether a backslash in a string escapes the next character.
        is_json: whether arguments are JSON. If so, unquoted text is an error, and slashes can be escaped.
        end: text that follows each call, or "".
    """

    header: str = ""
    quotes: tuple[str, ...] = ('"', "'")
    escapes: bool = True
    is_json: bool = True
    end: str = ""


JSON = Notation()
NAME = r"(?<![\w.-])(?P<name>[\w.-]+)"
# Tool-call notations, keyed by the name of mlx-lm's parser.
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
    """Return the calls in `text` as dicts with `name`, `arguments` and optionally `id`.

    Args:
        text: the answer's text between a call's markers.
        notation: the model's notation.
        is_complete: whether the model has finished the text. If so, mistakes are repaired.

    Raises: ValueError: a call's arguments can't be parsed.
    """
    if not notation.header:
        return []
    header_pattern = re.compile(notation.header)
    calls: list[dict[str, Any]] = []
    position = 0
    while header := header_pattern.search(text, position):
        arguments, position = _read_literal(text, header.end(), notation, is_complete)
        calls.append({**header.groupdict(), "arguments": arguments})
    return calls


def parse_json_objects(text: str, is_complete: bool) -> list[Any]:
    """Return the JSON objects in `text`, and the items of JSON lists. All other text is ignored.

    Nested lists are flattened.

    Raises: ValueError: an object or list can't be parsed.
    """
    values: list[Any] = []
    position = 0
    while bracket := OPENING_BRACKET.search(text, position):
        value, position = _read_literal(text, bracket.start(), JSON, is_complete)
        values += _flatten(value)
    return values


def _flatten(value: Any) -> list[Any]:
    """Flatten nested lists. Return any other value as a list with one item."""
    if not isinstance(value, list):
        return [value]
    return [part for item in value for part in _flatten(item)]


def ends_within_string(text: str, notation: Notation) -> bool:
    """Return whether `text` ends inside a string within brackets."""
    reader = LiteralReader(text, 0, notation)
    n_open_brackets = 0
    while reader.position < len(text):
        letter = text[reader.position]
        if n_open_brackets > 0 and reader.opening_quote():
            try:
                reader.read_string()
            except ValueError:
                return True
            continue
        if letter in CLOSERS:
            n_open_brackets += 1
        elif letter in CLOSERS.values() and n_open_brackets > 0:
            n_open_brackets -= 1
        reader.position += 1
    return False


def _read_literal(text: str, start: int, notation: Notation, is_complete: bool) -> tuple[Any, int]:
    """Return the value at `start`, and the position after it."""
    if notation.is_json:
        try:
            return DECODER.raw_decode(text, start)
        except ValueError:
            if not is_complete:
                raise
    reader = LiteralReader(text, start, notation, is_complete)
    return reader.read_value(), reader.position


class LiteralReader:
    """Reads a literal leniently, because models don't keep to the syntax.

    Keys can be unquoted, strings can have any of the notation's quotes, and constants can be Python's or JSON's. A
    comma after the last item and doubled outer braces are allowed. Unless the notation is JSON, an unquoted value that
    is neither a constant nor a number is text.

    Attributes:
        position: current position in the text.
    """

    def __init__(self, text: str, position: int, notation: Notation, is_complete: bool = False):
        """Start at `position`. If `is_complete`, closing brackets at the end are optional."""
        self.position = position
        self._text = text
        self._notation = notation
        self._is_complete = is_complete

    def read_value(self, in_list: bool = False) -> Any:
        """Read the value at the current position.

        Raises: ValueError: there is no valid value.
        """
        self._skip_blanks()
        if self.opening_quote():
            return self.read_string()
        has_double_braces = self._skip_match(r"\{(?=\{)")  # {{...}}
        if has_double_braces:
            value = self._read_object("}")
            self._skip_match(r"\s*\}")
            return value
        first_letter = self._text[self.position : self.position + 1]
        if first_letter == "{" or KEYWORD_ARGUMENTS.match(self._text, self.position):
            return self._read_object(CLOSERS[first_letter])
        if first_letter in ("[", "("):
            return self._read_list(CLOSERS[first_letter])
        return self._read_unquoted(in_list)

    def opening_quote(self) -> str:
        """Return the quote at the current position, or ""."""
        for quote in self._notation.quotes:
            if self._text.startswith(quote, self.position):
                return quote
        return ""

    def read_string(self) -> str:
        """Read the string at the current position.

        Raises: ValueError: the string has no end.
        """
        quote = self.opening_quote()
        quote_pattern = re.escape(quote)
        has_escapes = self._notation.escapes
        # An escape sequence counts as one character.
        letter_with_escapes = rf"\\.|(?!{quote_pattern})[^\\]"
        letter = letter_with_escapes if has_escapes else rf"(?!{quote_pattern})."
        quoted_text = self._read_match(rf"(?s:{quote_pattern}(?:{letter})*{quote_pattern})")
        content = quoted_text[len(quote) : -len(quote)]
        return ESCAPE_SEQUENCE.sub(self._unescape, content) if has_escapes else content

    def _unescape(self, escape: re.Match[str]) -> str:
        """Return the character that an escape sequence encodes. Unknown sequences are kept as they are."""
        hex_code = escape["u_code"] or escape["x_code"]
        if hex_code:
            return chr(int(hex_code, 16))
        letter = escape["letter"]
        if letter == "/" and self._notation.is_json:
            return "/"
        whole_sequence = escape[0]
        return CHARACTERS.get(letter, whole_sequence)

    def _read_object(self, closer: str) -> dict[str, Any]:
        """Read the object or keyword arguments at the current position."""
        items: dict[str, Any] = {}
        for _ in self._before_each_item(closer):
            key = self.read_string() if self.opening_quote() else self._read_match(UNQUOTED_KEY)
            self._read_match(r"\s*[:=]")
            items[key] = self.read_value()
        return items

    def _read_list(self, closer: str) -> list[Any]:
        """Read the list at the current position."""
        return [self.read_value(in_list=True) for _ in self._before_each_item(closer)]

    def _before_each_item(self, closer: str) -> Iterator[None]:
        """Read the brackets, and the commas between items. Yield before each item, so that the caller can read it."""
        self.position += 1  # the opening bracket
        while not self._read_closer(closer):
            yield
            has_comma = self._skip_match(r"\s*,")
            if has_comma:
                continue
            if not self._read_closer(closer):
                raise ValueError(f"{closer} is missing")
            return

    def _read_unquoted(self, in_list: bool) -> Any:
        """Read an unquoted value: a constant, a number, or text if the notation allows it."""
        if self._notation.is_json:
            pattern = NUMBER_OR_CONSTANT
        elif in_list:
            pattern = UNQUOTED_ITEM
        else:
            pattern = UNQUOTED_VALUE
        text = self._read_match(pattern).strip()
        if text in CONSTANTS:
            return CONSTANTS[text]
        try:
            return json.loads(text)
        except ValueError:
            if self._notation.is_json:
                raise
        return text

    def _read_closer(self, closer: str) -> bool:
        """Skip the closing bracket if it comes next. Return whether the object or list has ended.

        At the end of a call in a complete text, the closing bracket is optional, but only after another closing
        bracket.
        """
        self._skip_blanks()
        if self._text.startswith(closer, self.position):
            self.position += 1
            return True
        text_before, text_after = self._text[: self.position], self._text[self.position :]
        call_end = self._notation.end
        is_at_end = not text_after or (call_end != "" and text_after.startswith(call_end))
        # Without a bracket before the end, the last value may have been cut off.
        follows_bracket = text_before.rstrip().endswith(("}", "]", ")"))
        return self._is_complete and is_at_end and follows_bracket

    def _read_match(self, pattern: str) -> str:
        """Read the text that matches a pattern at the current position.

        Raises: ValueError: the pattern does not match.
        """
        match = re.compile(pattern).match(self._text, self.position)
        if match is None:
            raise ValueError(f"{pattern} is missing")
        self.position = match.end()
        return match[0]

    def _skip_match(self, pattern: str) -> bool:
        """Skip text that matches a pattern at the current position. Return whether the pattern matched."""
        match = re.compile(pattern).match(self._text, self.position)
        if match is None:
            return False
        self.position = match.end()
        return True

    def _skip_blanks(self) -> None:
        self._skip_match(r"\s*")
