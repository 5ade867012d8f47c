"""A clock in a system prompt: what is behind it is read again with every request, which the log says once."""

import re
from collections import deque
from operator import ne

from ..completions.body import Body, ChatBody
from .logged_once import LoggedOnce

REMEMBERED = 8  # system prompts, of several clients
MAX_CHANGED_LINES = 3  # lines that differ in what is otherwise the same prompt
BEHIND = 400  # characters behind a line that are worth a word
MAX_LINE_LENGTH = 60  # characters of a line


class ChangingLines:
    """Compares system prompts with earlier ones."""

    def __init__(self) -> None:
        self._prompts: deque[str] = deque(maxlen=REMEMBERED)
        self._logged_once = LoggedOnce()

    def compare(self, body: Body) -> None:
        """Say which lines of a chat's system prompt are others than in an earlier request's."""
        if not isinstance(body, ChatBody) or body.messages[0].role != "system":
            return
        text = "\n".join(message.text for message in body.messages if message.role == "system")
        if text in self._prompts:
            return
        for earlier in self._prompts:
            self._tell(earlier.splitlines(), text.splitlines())
        self._prompts.append(text)

    def _tell(self, was: list[str], now: list[str]) -> None:
        changed = [i for i, differ in enumerate(map(ne, was, now)) if differ]
        if len(was) != len(now) or not 0 < len(changed) <= MAX_CHANGED_LINES:
            return
        first = changed[0]
        old, new = was[first], now[first]
        if sum(map(len, now[first + 1 :])) < BEHIND:
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
