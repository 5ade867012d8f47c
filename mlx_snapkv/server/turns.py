"""A conversation told in pieces, as messages for a chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .volatile import without_headers

BREAK = "\n\n"  # between texts that came apart
SYSTEM = ("system", "developer")


class Turns:
    """Gathers messages: what one side says in a row is one, as templates that want the sides to alternate need it.

    What the system says after the beginning, as Claude Code and Codex have it do, is the user's to say: many
    templates have no other place for it, and moved to the front it would change what has been read already.

    Args:
        volatile: names of header lines that a system prompt is to begin without.
    """

    def __init__(self, volatile: Collection[str] = ()):
        self._volatile = volatile
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        if role not in SYSTEM:
            self._add(role, "content", text)
        elif self.messages and self.messages[-1]["role"] != "system":
            self._add("user", "content", text)
        elif text := without_headers(text, self._volatile):
            self._add("system", "content", text)

    def think(self, text: str) -> None:
        """What the assistant thought, by the name that templates have for it."""
        self._add("assistant", "reasoning_content", text)

    def call(self, number: str, name: str, arguments: str) -> None:
        """The assistant's call of a tool; `arguments` are JSON."""
        function = {"name": name, "arguments": arguments}
        call = {"id": number, "type": "function", "function": function}
        self._of("assistant").setdefault("tool_calls", []).append(call)

    def result(self, number: str, text: str) -> None:
        """What a tool has answered."""
        self.messages.append({"role": "tool", "tool_call_id": number, "content": text})

    def _add(self, role: str, field: str, text: str) -> None:
        message = self._of(role)
        said = message.get(field)
        message[field] = said + BREAK + text if said and text else said or text

    def _of(self, role: str) -> dict[str, Any]:
        """The message that this role is about to add to."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]
