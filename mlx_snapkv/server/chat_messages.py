"""Conversations as other APIs tell them, as messages for a chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..completions.body import Body, ChatBody

BREAK = "\n\n"  # between texts that came apart
SYSTEM = ("system", "developer")


def as_parts(value: Any) -> Any:
    """A content as the list of its parts, of which a text is one; nothing has none."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [] if value is None else value


class ChatMessages:
    """Gathers messages: what one role says in a row is one message, since many templates want the roles to alternate.

    What the system says after the beginning, as Claude Code and Codex have it do, becomes the user's: many templates
    have no other place for it, and moved to the front it would change what has been read already.
    """

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        if role in SYSTEM:
            later = self.all and self.all[-1]["role"] != "system"
            role = "user" if later else "system"
        self._add(role, "content", text)

    def think(self, text: str) -> None:
        """The assistant's thoughts, by the name that templates have for them."""
        self._add("assistant", "reasoning_content", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """The assistant's call of a tool; `arguments` are JSON."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._of("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """What a tool has answered."""
        self.all.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add(self, role: str, field: str, text: str) -> None:
        message = self._of(role)
        message[field] = BREAK.join(filter(None, (message.get(field), text)))

    def _of(self, role: str) -> dict[str, Any]:
        """The message that this role is about to add to."""
        if not self.all or self.all[-1]["role"] != role:
            self.all.append({"role": role, "content": ""})
        return self.all[-1]


def without_volatile_headers(body: Body, names: Collection[str]) -> Body:
    """The same, its system prompt without the lines `name: …` that it begins with, for those names in any case.

    They change with every request, and nothing behind them would be known from an earlier one.
    """
    if not isinstance(body, ChatBody) or body.messages[0].role not in SYSTEM:
        return body
    first, *rest = body.messages
    known = {name.lower() for name in names}
    content = first.content
    if isinstance(content, str):
        content = _without_headers(content, known)
    elif content:
        text = _without_headers(content[0]["text"], known)
        content = [{**content[0], "text": text}, *content[1:]]
    return body.model_copy(
        update={"messages": [first.model_copy(update={"content": content}), *rest]}
    )


def _without_headers(text: str, names: Collection[str]) -> str:
    while True:
        line, _, rest = text.lstrip().partition("\n")
        name, colon, _ = line.partition(":")
        if not colon or name.strip().lower() not in names:
            return text
        text = rest.lstrip("\n")
