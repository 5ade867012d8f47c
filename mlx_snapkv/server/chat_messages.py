"""What the bodies of Anthropic's messages and OpenAI's responses share: they become a chat template's messages."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

BREAK = "\n\n"  # between texts that came apart
SYSTEM = ("system", "developer")


def function_tool(tool: BaseModel, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool with a name and perhaps a description, as chat templates take it."""
    about = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**about, "parameters": parameters or {}}}


class ChatMessages:
    """Gathers messages; successive ones of a role become one, since many templates want roles to alternate.

    A system message after the beginning, as Claude Code and Codex send, becomes the user's: many templates have no
    other place for it, and moving it to the front would change a prefix that is already known.
    """

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def say(self, role: str, *texts: str) -> None:
        """Add texts that are one; nothing without any."""
        if role in SYSTEM:
            later = self.all and self.all[-1]["role"] != "system"
            role = "user" if later else "system"
        if texts:
            self._add(role, "content", "".join(texts))

    def think(self, *texts: str) -> None:
        """Add the assistant's reasoning, by the name that templates have for it."""
        if texts:
            self._add("assistant", "reasoning_content", "".join(texts))

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """The assistant's call of a tool; `arguments` are JSON."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._of("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """A tool's result."""
        self.all.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add(self, role: str, field: str, text: str) -> None:
        message = self._of(role)
        message[field] = BREAK.join(filter(None, (message.get(field), text)))

    def _of(self, role: str) -> dict[str, Any]:
        """The message that this role adds to."""
        if not self.all or self.all[-1]["role"] != role:
            self.all.append({"role": role, "content": ""})
        return self.all[-1]
