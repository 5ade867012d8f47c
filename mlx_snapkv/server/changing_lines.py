"""A clock in a system prompt: what is behind it is read again with every request, which the log says once."""

import re
from collections import deque
from operator import ne

from ..completions.body import Body, ChatBody
from .api_error import log

REMEMBERED = 8  # system prompts, of several clients
MOST = 3  # lines that differ in what is otherwise the same prompt
BEHIND = 400  # characters behind a line that are worth a word
SHOWN = 60  # characters of a line


class ChangingLines:
    """Compares system prompts with earlier ones."""

    def __init__(self) -> None:
        self._prompts: deque[str] = deque(maxlen=REMEMBERED)
        self._told: set[str] = set()

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
        if len(was) != len(now) or not 0 < len(changed) <= MOST:
            return
        first = changed[0]
        old, new = was[first], now[first]
        kind = re.sub(r"\d+", "0", new)[:SHOWN]
        if sum(map(len, now[first + 1 :])) < BEHIND or kind in self._told or len(self._told) > 100:
            return
        self._told.add(kind)
        advice = "have the client put it into its last message"
        name = re.match(r"\s*([\w-]+)\s*:", new)
        if first == 0 and name:
            advice += f", or drop it with --volatile-header {name[1]}"
        log.warning(
            "line %s of the system prompt changes between requests, from %r to %r, and all behind it is read again: %s",
            *(first + 1, old[:SHOWN], new[:SHOWN], advice),
        )
