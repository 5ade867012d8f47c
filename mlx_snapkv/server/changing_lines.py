"""Find or remove system prompt lines that change with every request, such as the current time.

The prefix cache can reuse only the text before such a line. Everything after it has to be read again.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeGuard

from ..completions.body import Body, ChatBody
from .log import LoggedOnce

# Each system prompt is compared with at most this many earlier ones. One is not enough, because several clients can
# take turns, each with its own system prompt.
REMEMBERED = 8
MAX_CHANGED_LINES = 3  # prompts that differ in more lines count as unrelated
MIN_REREAD = 400  # warn only if at least this many characters follow the changed line
MAX_LINE_LENGTH = 60  # maximum length of a line in the warning, in characters


def drop_volatile_lines(body: Body, names: Iterable[str]) -> None:
    """Remove `NAME: …` lines with the given names from the start of a chat's system prompt. Case is ignored."""
    any_name = "|".join(map(re.escape, names))
    if not any_name or not _starts_with_system_prompt(body):
        return
    blanks = r"[^\S\n]*"  # any whitespace except newlines
    volatile_line = rf"\s*(?:{any_name}){blanks}:.*\n*"
    leading_lines = re.compile(rf"\A(?:{volatile_line})+", re.IGNORECASE)
    first_message = body.messages[0]
    text = leading_lines.sub("", first_message.text)
    body.messages[0] = replace(first_message, text=text)


def _starts_with_system_prompt(body: Body) -> TypeGuard[ChatBody]:
    """Return whether a body is a chat that starts with a system message."""
    return isinstance(body, ChatBody) and body.messages[0].role == "system"


class ChangingLines:
    """Compares the system prompts of requests, and warns once about each changing line."""

    def __init__(self) -> None:
        """Start with no remembered prompts."""
        self._prompts: deque[str] = deque(maxlen=REMEMBERED)
        self._logged_once = LoggedOnce()

    def compare(self, body: Body) -> None:
        """Log a warning if a chat's system prompt differs from an earlier one in only a few lines."""
        if not _starts_with_system_prompt(body):
            return
        text = "\n".join(message.text for message in body.messages if message.role == "system")
        if text in self._prompts:
            return
        for earlier_text in self._prompts:
            self._warn_of_change(earlier_text.splitlines(), text.splitlines())
        self._prompts.append(text)

    def _warn_of_change(self, old_lines: list[str], new_lines: list[str]) -> None:
        """Log a warning if two system prompts (lists of lines) differ in only a few lines."""
        index = _first_changed_line(old_lines, new_lines)
        if index is None:
            return
        old_line, new_line = old_lines[index], new_lines[index]
        advice = "have the client put it into its last message"
        header = re.match(r"\s*(?P<name>[\w-]+)\s*:", new_line)  # e.g. "Date: ..."
        if index == 0 and header:  # only leading lines can be removed
            advice += f", or drop it with --volatile-header {header['name']}"
        self._logged_once.warn(
            f"line {index + 1} of the system prompt changes between requests, from "
            f"{old_line[:MAX_LINE_LENGTH]!r} to {new_line[:MAX_LINE_LENGTH]!r}, and all behind it is read again: "
            f"{advice}",
            kind=new_line,
        )


def _first_changed_line(old_lines: list[str], new_lines: list[str]) -> int | None:
    """Return the index of the first line that differs, or None if the difference is not worth a warning.

    A warning is worthwhile if both prompts have the same number of lines, only a few lines differ, and a lot of text
    follows the first change.
    """
    if len(old_lines) != len(new_lines):
        return None
    changed_indices = [
        index for index in range(len(new_lines)) if old_lines[index] != new_lines[index]
    ]
    has_few_changes = 0 < len(changed_indices) <= MAX_CHANGED_LINES
    if not has_few_changes:
        return None
    first = changed_indices[0]
    n_reread_characters = sum(len(line) for line in new_lines[first + 1 :])
    return first if n_reread_characters >= MIN_REREAD else None
