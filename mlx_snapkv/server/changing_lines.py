"""A warning about system prompts with a line that changes with every request, such as a clock.

The prefix cache serves only what is before the line; everything after it is read again.
"""

import re
from collections import deque
from operator import ne

from ..completions.body import Body, ChatBody
from .log import LoggedOnce

REMEMBERED = 8  # system prompts to remember; several clients may take turns
MAX_CHANGED_LINES = 3  # prompts that differ in more lines are different prompts
MIN_REREAD = 400  # characters after a changed line, below which it is not worth a warning
MAX_LINE_LENGTH = 60  # characters of a line in the warning


class ChangingLines:
    """Compares the system prompts of requests, and warns once of each line that changes."""

    def __init__(self) -> None:
        self._prompts: deque[str] = deque(maxlen=REMEMBERED)
        self._logged_once = LoggedOnce()

    def compare(self, body: Body) -> None:
        """Log a warning if a chat's system prompt differs from an earlier one in a few lines."""
        if not isinstance(body, ChatBody) or body.messages[0].role != "system":
            return
        text = "\n".join(message.text for message in body.messages if message.role == "system")
        if text in self._prompts:
            return
        for earlier in self._prompts:
            self._warn(earlier.splitlines(), text.splitlines())
        self._prompts.append(text)

    def _warn(self, before: list[str], now: list[str]) -> None:
        """Log a warning about the first changed line of two system prompts, if they are otherwise the same."""
        changed = [i for i, differ in enumerate(map(ne, before, now)) if differ]
        if len(before) != len(now) or not 0 < len(changed) <= MAX_CHANGED_LINES:
            return
        first = changed[0]
        old, new = before[first], now[first]
        if sum(map(len, now[first + 1 :])) < MIN_REREAD:
            return
        advice = "have the client put it into its last message"
        name = re.match(r"\s*([\w-]+)\s*:", new)
        if first == 0 and name:
            advice += f", or drop it with --volatile-header {name[1]}"
        self._logged_once.warn(
            f"line {first + 1} of the system prompt changes between requests, from "
            f"{old[:MAX_LINE_LENGTH]!r} to {new[:MAX_LINE_LENGTH]!r}, and all behind it is read again: {advice}",
            kind=new,
        )
