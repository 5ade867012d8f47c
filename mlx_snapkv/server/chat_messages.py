"""Convert Anthropic Messages and OpenAI Responses bodies to chat completion bodies."""

from typing import Any

from pydantic import BaseModel, BeforeValidator, Discriminator

from ..completions.body import ChatBody
from ..completions.fields import BodyModel
from ..completions.messages import Message
from ..completions.response_format import ResponseFormat
from ..completions.validation import validate_body


class OutputConfig(BodyModel):
    """The answer's format and the reasoning effort."""

    format: ResponseFormat | None = None
    effort: str | None = None


class ForeignTool(BodyModel):
    """A tool that only the API's provider can run, such as web search."""

    type: str
    name: str | None = None


def tag_by_type(*types: str | None) -> Discriminator:
    """Return a pydantic discriminator that tags tools of the given types "own" and tools of other types "foreign".

    Tools whose type is missing or not text are tagged "own".
    """

    def tag(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        is_own = kind in types or not isinstance(kind, str)
        return "own" if is_own else "foreign"

    return Discriminator(tag)


def unnest_function(tool: Any) -> Any:
    """Move the fields that chat completions nest in a tool's `function` to the top level.

    Values without a `function` object are returned unchanged.
    """
    function = tool.get("function") if isinstance(tool, dict) else None
    return {"type": "function", **function} if isinstance(function, dict) else tool


NoneAsEmpty = BeforeValidator(lambda value: [] if value is None else value)


def function_tool(tool: Any, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the chat completion format, with its name, description (if any) and `parameters`."""
    function = tool.model_dump(include={"name", "description"}, exclude_none=True)
    function["parameters"] = parameters or {}
    return {"type": "function", "function": function}


def chat_body(body: BaseModel, messages: list[Message], tools: Any, **fields: Any) -> ChatBody:
    """Return a chat completion body with the given messages, tools and fields.

    Args:
        body: the Messages or Responses body. Unknown fields are passed on, except for `n` and `top_logprobs`, because
            these APIs' answers have no place for several choices or log-probabilities.
        messages: the parsed messages.
        tools: tools in OpenAI's format. May be None or empty.
        **fields: fields of the chat completion. Fields that are None are omitted.

    Raises: SnapKVError: the resulting body is invalid.
    """
    unsupported = "n", "top_logprobs"
    unknown_fields = {
        name: value for name, value in (body.model_extra or {}).items() if name not in unsupported
    }
    known_fields = {name: value for name, value in fields.items() if value is not None}
    return validate_body(
        ChatBody,
        {**unknown_fields, "messages": messages, "tools": tools or None, **known_fields},
    )
