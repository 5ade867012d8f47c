"""Convert the bodies of Anthropic's messages and OpenAI's responses to the body of a chat completion."""

from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, model_validator

from ..completions.body import ChatBody
from ..completions.fields import BodyModel
from ..completions.messages import Message
from ..completions.validation import validate_body


class OutputFormat(BodyModel):
    """The format of an answer, like `ResponseFormat`, but with the schema in a separate field."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> "OutputFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("needs a schema")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """Convert to the format of chat completions."""
        if self.type == "json_schema":
            return {"type": self.type, "json_schema": {"schema": self.schema_}}
        return {"type": self.type}


class OutputConfig(BodyModel):
    """The format of an answer, and the reasoning effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class ForeignTool(BodyModel):
    """A tool that only the API's provider can run, such as web search."""

    type: str
    name: str | None = None


def tag_by_type(*types: str | None) -> Discriminator:
    """Return a discriminator for pydantic that tags tools of the given types "own", and others "foreign"."""

    def tag(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        return "own" if kind in types or not isinstance(kind, str) else "foreign"

    return Discriminator(tag)


def unnest_function(tool: Any) -> Any:
    """Move the fields of a tool's `function`, where chat completions nest them, to the top level."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return {"type": "function", **function} if isinstance(function, dict) else tool


NoneAsEmpty = BeforeValidator(lambda value: [] if value is None else value)


def function_tool(tool: Any, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the format of chat completions, with name, description (if any) and `parameters`."""
    about = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**about, "parameters": parameters or {}}}


def chat_body(body: BaseModel, messages: list[Message], tools: Any, **fields: Any) -> ChatBody:
    """Return the body of a chat completion with these messages, tools and fields, and the unknown fields of `body`.

    Args:
        body: body in another API. Fields that this API does not define are passed on, except `n`.
        messages: the messages, parsed.
        tools: tools in OpenAI's format; None or an empty list for no tools.
        **fields: fields of the chat completion; None omits a field.

    Raises: SnapKVError: the request can't be answered.
    """
    extra = {name: value for name, value in (body.model_extra or {}).items() if name != "n"}
    fields = {name: value for name, value in fields.items() if value is not None}
    return validate_body(
        ChatBody, {**extra, "messages": messages, "tools": tools or None, **fields}
    )
