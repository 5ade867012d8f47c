"""Which tools an answer may or must call, in the forms of OpenAI's three endpoints and of Anthropic's."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .checks import needed_by, require
from .contents import as_list
from .fields import Name
from .part import Part

SERVICES = {  # what OpenAI's tool_choice may force besides functions
    *("file_search", "web_search", "web_search_preview", "image_generation", "code_interpreter"),
    *("computer", "computer_use", "computer_use_preview", "mcp", "shell", "apply_patch"),
}


class FunctionName(Part):
    name: Name


class ToolChoice(Part):
    """Whether tools may or must be called, or the one to call."""

    type: Literal["auto", "none", "required", "function"]
    allowed: list[str] | None = None  # the tools that may be called
    service: str | None = None  # the kind of a tool that was to be called, and is not known here
    function: Annotated[FunctionName | None, needed_by("function")] = Field(
        None, validate_default=True
    )


def _as_tool_choice(value: Any) -> Any:
    """The tool to call is named one level higher in responses, whose custom tools are functions here."""
    if isinstance(value, str):
        return {"type": value}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "allowed_tools":
        inner = value.get(kind, value)
        require(isinstance(inner, dict), ".allowed_tools should be a valid object", inner)
        names = [_named(tool)["name"] for tool in as_list(inner.get("tools"))]
        allowed = [name for name in names if name is not None]  # a service's may have none
        return {"type": inner.get("mode", "auto"), "allowed": allowed}
    if kind == "any":  # Anthropic's, as `tool`
        return {"type": "required"}
    if kind in ("function", "custom", "tool") and ("name" in value or kind in value):
        return {"type": "function", "function": _named(value)}
    return {"type": "auto", "service": kind} if kind in SERVICES else value


def _named(tool: Any) -> Any:
    """What has the name of a tool in a choice."""
    require(isinstance(tool, dict), " should name tools", tool)
    return {"name": tool.get("name")} | (tool.get("function") or tool.get("custom") or {})


AnyToolChoice = Annotated[ToolChoice | None, BeforeValidator(_as_tool_choice)]
