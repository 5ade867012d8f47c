"""What the bodies of Anthropic's messages and OpenAI's responses share: they become a chat completion's body."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, Discriminator

from ..completions.body import ChatBody, Part, PlainText, as_body
from ..completions.messages import Message


class OutputConfig(Part):
    format: PlainText | None = None
    effort: str | None = None


class ForeignTool(Part):
    """A tool that only a service runs."""

    type: str


def own(*types: str | None) -> Discriminator:
    """Tells tools of these types, with the tag "own", from the others, with "foreign"."""

    def tag(tool: Any) -> str:
        found = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "own" if found in types or not isinstance(found, str) else "foreign"

    return Discriminator(tag)


MayBeNone = BeforeValidator(lambda value: [] if value is None else value)


def function_tool(tool: Any, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool with a name and perhaps a description, as chat templates take it."""
    if isinstance(tool, ForeignTool):
        return tool.model_dump()
    about = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**about, "parameters": parameters or {}}}


def chat_body(body: BaseModel, messages: list[Message], tools: Any, **fields: Any) -> ChatBody:
    """A chat completion's body that asks for the same, with the fields that only a local server knows.

    Raises: SnapKVError: it can't be answered.
    """
    more = {name: value for name, value in (body.model_extra or {}).items() if name != "n"}
    return as_body(ChatBody, {**more, "messages": messages, "tools": tools or None, **fields})
