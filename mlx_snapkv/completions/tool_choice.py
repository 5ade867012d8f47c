"""Parse `tool_choice` in any of the formats that OpenAI's three endpoints and Anthropic use."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .contents import as_list
from .fields import BodyModel, Name
from .validation import require, required_for

# OpenAI's built-in tools, which a `tool_choice` may name by type.
SERVICES = {
    *("file_search", "web_search", "web_search_preview", "image_generation", "code_interpreter"),
    *("computer", "computer_use", "computer_use_preview", "mcp", "shell", "apply_patch"),
}


class FunctionName(BodyModel):
    """The function that a `tool_choice` names."""

    name: Name


class ToolChoice(BodyModel):
    """The tools that an answer may or must call.

    Attributes:
        type: "function" if the answer must call `function`.
        allowed: names of the tools that may be called, or None for all.
        service: type of the built-in tool that the client asks for. Built-in tools are not available here.
    """

    type: Literal["auto", "none", "required", "function"]
    allowed: list[str] | None = None
    service: str | None = None
    function: Annotated[FunctionName | None, required_for("function")] = Field(
        None, validate_default=True
    )


def _as_tool_choice(value: Any) -> Any:
    """Convert a choice in any format to the fields of `ToolChoice`. Return unknown formats unchanged.

    Raises: ValueError: `allowed_tools`, one of the allowed tools, or the named function is not an object.
    """
    if isinstance(value, str):
        return {"type": value}
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return value
    if kind == "allowed_tools":
        choice = value.get(kind, value)  # nested in Chat Completions, but not in Responses
        require(isinstance(choice, dict), ".allowed_tools should be a valid object", choice)
        names = [_name_fields(tool)["name"] for tool in as_list(choice.get("tools"))]
        allowed_names = [name for name in names if name is not None]  # built-in tools have no name
        return {"type": choice.get("mode", "auto"), "allowed": allowed_names}
    if kind == "any":  # Anthropic's "required"
        return {"type": "required"}
    # "tool" is Anthropic's "function". "custom" is a kind of tool in the Responses API, and is treated as a function.
    is_function = kind in ("function", "custom", "tool")
    if is_function and ("name" in value or kind in value):
        return {"type": "function", "function": _name_fields(value)}
    if kind in SERVICES:
        return {"type": "auto", "service": kind}
    return value


def _name_fields(tool: Any) -> dict[str, Any]:
    """Return an object with a tool's `name`, which may be nested in `function` or `custom`.

    Raises: ValueError: the tool or the nested value is not an object.
    """
    rule = 'should name a tool as in {"type": "function", "function": {"name": "open"}}'
    require(isinstance(tool, dict), rule, tool)
    nested_fields = tool.get("function") or tool.get("custom") or {}
    require(isinstance(nested_fields, dict), rule, nested_fields)
    return {"name": tool.get("name")} | nested_fields


AnyToolChoice = Annotated[ToolChoice | None, BeforeValidator(_as_tool_choice)]
