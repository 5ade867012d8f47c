"""The tools of `/v1/responses`: functions, Codex's custom tools, and namespaces of both."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, JsonValue, Tag

from ...completions.fields import BodyModel, Name
from ...completions.messages import full_name
from ..chat_messages import ForeignTool, NoneAsEmpty, function_tool, tag_by_type, unnest_function

# JSON schema of a custom tool's arguments.
CUSTOM_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class Function(BodyModel):
    """A function, or one of Codex's custom tools. A custom tool's argument is plain text.

    `parameters` can't contain NaN or infinity, because the response repeats them as JSON.
    """

    type: Literal["function", "custom"]
    name: Name
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


InNamespace = Annotated[
    Annotated[Function, Tag("own")] | Annotated[ForeignTool, Tag("foreign")],
    tag_by_type("function", "custom"),
]


class Namespace(BodyModel):
    """An MCP server's tools in Codex's format. Their names are unique only within the namespace."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[InNamespace], NoneAsEmpty] = Field([])


AnyTool = Annotated[
    Annotated[Annotated[Function | Namespace, Field(discriminator="type")], Tag("own")]
    | Annotated[ForeignTool, Tag("foreign")],
    tag_by_type("function", "custom", "namespace"),
    BeforeValidator(unnest_function),
]


class OfferedTool(NamedTuple):
    """A tool that the model may call, and its namespace, if any."""

    tool: Function
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        """Return the name that the model uses for the tool."""
        return full_name(self.tool.name, self.namespace)


def chat_tools(tools: list[Function | Namespace | ForeignTool]) -> list[dict[str, Any]]:
    """Return the tools in the chat completion format."""
    return [
        _chat_tool(tool) if isinstance(tool, OfferedTool) else tool.model_dump()
        for tool in _flatten_namespaces(tools)
    ]


def tools_by_name(tools: list[Function | Namespace | ForeignTool]) -> dict[str, OfferedTool]:
    """Return the tools that the model may call, keyed by full name."""
    return {
        tool.full_name: tool for tool in _flatten_namespaces(tools) if isinstance(tool, OfferedTool)
    }


def _flatten_namespaces(tools: list[Any]) -> Iterator[OfferedTool | ForeignTool]:
    """Yield all tools, including those in namespaces."""
    for tool in tools:
        if isinstance(tool, Namespace):
            for tool_in_namespace in tool.tools:
                yield _offered_tool(tool_in_namespace, namespace=tool.name)
        else:
            yield _offered_tool(tool, namespace=None)


def _offered_tool(tool: Function | ForeignTool, namespace: str | None) -> OfferedTool | ForeignTool:
    """Return a function as an `OfferedTool`, and any other tool unchanged."""
    return OfferedTool(tool, namespace) if isinstance(tool, Function) else tool


def _chat_tool(offered: OfferedTool) -> dict[str, Any]:
    """Return a tool in the chat completion format, under its full name. A custom tool has one argument, `input`."""
    tool = offered.tool.model_copy(update={"name": offered.full_name})
    parameters = CUSTOM_TOOL_SCHEMA if tool.type == "custom" else tool.parameters
    return function_tool(tool, parameters)
