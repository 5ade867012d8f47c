"""What Anthropic's `/v1/messages` takes, checked, and as the chat that it asks for."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..batch.openai_body import ChatBody, Positive, Probability, require
from .parts import parts
from .reading import checked
from .turns import BREAK, Turns

Name = Annotated[str, Field(min_length=1, max_length=128)]


class _Part(BaseModel):
    """Fields without a place here are ignored: `cache_control`, `citations` and so on."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Text(_Part):
    text: str


class Thinking(_Part):
    thinking: str


class Redacted(_Part):
    """Thoughts that another server has hidden."""


class ToolUse(_Part):
    id: str
    name: Name
    input: dict[str, Any]


class Source(_Part):
    type: Literal["text"]
    data: str


class Document(_Part):
    source: Source
    title: str | None = None

    @property
    def text(self) -> str:
        title = "" if self.title is None else f"{self.title}\n"
        return f"{title}{self.source.data}{BREAK}"


def _parts(value: Any, kinds: dict[str, type[_Part]], name: str = "content") -> list[Any]:
    """A content's parts; a text alone is one."""
    return [Text(text=value)] if isinstance(value, str) else parts(name, value, kinds)


PLAIN: dict[str, type[_Part]] = {"text": Text, "document": Document}


class ToolResult(_Part):
    tool_use_id: str
    content: Any = ""

    @field_validator("content")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return [] if value is None else _parts(value, PLAIN)


PARTS: dict[str, dict[str, type[_Part]]] = {
    "system": PLAIN,
    "user": {**PLAIN, "tool_result": ToolResult},
    "assistant": {
        "text": Text,
        "tool_use": ToolUse,
        "thinking": Thinking,
        "redacted_thinking": Redacted,
    },
}


class Message(_Part):
    role: Literal["user", "assistant", "system"]
    content: Any

    @field_validator("content")
    @classmethod
    def _in_parts(cls, value: Any, info: Any) -> Any:
        return _parts(value, PARTS.get(info.data.get("role"), {}))


class Tool(_Part):
    """A tool of the client's; those that run at Anthropic have no schema here, and are left out."""

    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @field_validator("input_schema")
    @classmethod
    def _object(cls, value: Any) -> Any:
        ok = value is None or value.get("type", "object") == "object"
        require(ok, "input_schema must be the JSON schema of an object", value)
        return value


class ToolChoice(_Part):
    type: str

    @field_validator("type")
    @classmethod
    def _free(cls, value: Any) -> Any:
        ok = value in ("auto", "none")
        require(ok, "type must be auto or none: no tool can be forced", value)
        return value


class ThinkingWish(_Part):
    type: Literal["enabled", "disabled", "adaptive"]


class CountedMessages(BaseModel):
    """The body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: Any = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Any = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingWish | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None

    @field_validator("system")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return [] if value is None else _parts(value, {"text": Text}, "system")

    @field_validator("messages")
    @classmethod
    def _to_answer(cls, value: list[Message]) -> list[Message]:
        if value[-1].role == "assistant":
            raise ValueError("messages must not end with the assistant's: none can be continued")
        return value

    @field_validator("tools")
    @classmethod
    def _with_schemas(cls, value: list[Tool] | None) -> list[Tool] | None:
        for tool in value or []:
            whole = tool.name is not None and tool.input_schema is not None
            ok = whole or tool.type not in (None, "custom")
            require(ok, "tools must have a name and an input_schema", tool.model_dump())
        return value

    @field_validator("output_config", "output_format")
    @classmethod
    def _free_text(cls, value: Any, info: Any) -> Any:
        config = info.field_name == "output_config"
        form = (value or {}).get("format") if config else value
        require(form is None, f"{info.field_name} can't force a form on an answer: drop it", form)
        return value

    def chat(self, volatile: Collection[str] = ()) -> ChatBody:
        """What is asked, in OpenAI's words.

        Args:
            volatile: names of header lines that the system prompt is to begin without.

        Raises:
            ApiError: nothing is left of the messages.
        """
        turns = Turns(volatile)
        for part in self.system or []:
            turns.say("system", part.text)
        for message in self.messages:
            _tell(turns, message)
        wish = self.thinking
        asked = {
            "messages": turns.messages,
            "tools": [_function(tool) for tool in self.tools or [] if tool.input_schema] or None,
            "tool_choice": self.tool_choice.type if self.tool_choice else None,
            "chat_template_kwargs": wish and {"enable_thinking": wish.type != "disabled"},
        }
        return checked(ChatBody, asked | self.sampling())

    def sampling(self) -> dict[str, Any]:
        return {}


class Messages(CountedMessages):
    """The body of `/v1/messages`."""

    max_tokens: Positive
    temperature: Probability | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def sampling(self) -> dict[str, Any]:
        names = "max_tokens", "temperature", "top_p", "top_k"
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _tell(turns: Turns, message: Message) -> None:
    texts: list[str] = []

    def said() -> None:
        if texts:
            turns.say(message.role, "".join(texts))
            texts.clear()

    for part in message.content or [Text(text="")]:
        if isinstance(part, (Text, Document)):
            texts.append(part.text)
        elif isinstance(part, Thinking):
            turns.think(part.thinking)
        elif isinstance(part, ToolUse):
            said()
            turns.call(part.id, part.name, json.dumps(part.input, ensure_ascii=False))
        elif isinstance(part, ToolResult):
            said()
            turns.result(part.tool_use_id, BREAK.join(found.text for found in part.content))
    said()


def _function(tool: Tool) -> dict[str, Any]:
    about = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **about, "parameters": tool.input_schema}
    return {"type": "function", "function": function}
