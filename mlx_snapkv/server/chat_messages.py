"""What the bodies of Anthropic's messages and OpenAI's responses share: they become a chat completion's body."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..completions.body import ChatBody, Part, as_body

BREAK = "\n\n"  # between texts that came apart
SYSTEM = ("system", "developer")


class OutputFormat(Part):
    """As `ResponseFormat`, with the schema in its place."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> "OutputFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("needs a schema")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """The same as chat completions have it."""
        has_schema = self.type == "json_schema"
        more = {"json_schema": {"schema": self.schema_}} if has_schema else {}
        return {"type": self.type, **more}


class OutputConfig(Part):
    format: OutputFormat | None = None


def own_tools(*types: str | None) -> BeforeValidator:
    """Of a list of tools, those of these types; clients list others, which only a service runs."""

    def validate(value: Any) -> Any:
        if not isinstance(value, list):
            return value or []
        return [t for t in value if not isinstance(t, dict) or t.get("type") in types]

    return BeforeValidator(validate)


def function_tool(tool: Any, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool with a name and perhaps a description, as chat templates take it."""
    about = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**about, "parameters": parameters or {}}}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """The assistant's call of a tool; `arguments` are JSON."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls}


def tool_result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat_body(pieces: Iterable[dict[str, Any]], tools: Any, **fields: Any) -> ChatBody:
    """A body with the messages of which these are pieces. Raises: SnapKVError: it can't be answered.

    Successive pieces of a role become one message, since many templates want roles to alternate. A system message
    after the beginning, as Claude Code and Codex send, becomes the user's: many templates have no other place for it,
    and moving it to the front would change a prefix that is already known.
    """
    messages: list[dict[str, Any]] = []
    for piece in pieces:
        last, role = messages[-1] if messages else {}, piece["role"]
        if role in SYSTEM:
            role = "system" if last.get("role", "system") == "system" else "user"
        if role == "tool" or role != last.get("role"):
            messages.append(last := {"content": ""})
        for name, value in (piece | {"role": ""}).items():
            before = last.get(name) or value[:0]
            is_apart = before and value and isinstance(value, str)
            last[name] = before + BREAK + value if is_apart else before + value
        last["role"] = role
    return as_body(ChatBody, {"messages": messages, "tools": tools or None, **fields})
