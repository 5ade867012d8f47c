"""What the bodies of Anthropic's messages and OpenAI's responses share: they become a chat completion's body."""

from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, model_validator

from ..completions.body import ChatBody
from ..completions.fields import BodyModel
from ..completions.messages import Message
from ..completions.validation import validate_body


class OutputFormat(BodyModel):
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


class OutputConfig(BodyModel):
    format: OutputFormat | None = None
    effort: str | None = None


class ForeignTool(BodyModel):
    """A tool that only a service runs."""

    type: str
    name: str | None = None


def by_type(*types: str | None) -> Discriminator:
    """Tells tools of these types, with the tag "own", from the others, with "foreign"."""

    def tag(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "own" if kind in types or not isinstance(kind, str) else "foreign"

    return Discriminator(tag)


def unwrapped(tool: Any) -> Any:
    """A tool whose function's fields are its own: chat completions have them one level deeper."""
    inner = tool.get("function") if isinstance(tool, dict) else None
    return {"type": "function", **inner} if isinstance(inner, dict) else tool


MayBeNone = BeforeValidator(lambda value: [] if value is None else value)


def function_tool(tool: Any, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool with a name and perhaps a description, as chat templates take it."""
    about = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**about, "parameters": parameters or {}}}


def chat_body(body: BaseModel, messages: list[Message], tools: Any, **fields: Any) -> ChatBody:
    """A chat completion's body that asks for the same, with the fields that only a local server, or a chat, knows.

    Raises: SnapKVError: it can't be answered.
    """
    more = {name: value for name, value in (body.model_extra or {}).items() if name != "n"}
    given = {name: value for name, value in fields.items() if value is not None}
    return validate_body(ChatBody, {**more, "messages": messages, "tools": tools or None, **given})
