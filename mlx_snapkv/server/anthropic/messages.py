"""Anthropic's `/v1/messages`: what it takes, checked, and as the chat that it asks for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from ...completions.body import ChatBody, Positive, Probability, as_body, require
from ..chat_messages import BREAK, ChatMessages, as_parts
from ..formatter import exchange_for, respond
from .formatter import MessageFormatter

COUNT_SECONDS = 60.0  # for a count, if the server was given no timeout

Name = Annotated[str, Field(min_length=1, max_length=128)]


class _Part(BaseModel):
    """Fields without a place here are ignored: `cache_control`, `citations` and so on."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Text(_Part):
    type: Literal["text"]
    text: str


class Source(_Part):
    type: Literal["text"]
    data: str


class Document(_Part):
    type: Literal["document"]
    source: Source
    title: str | None = None

    @property
    def text(self) -> str:
        title = "" if self.title is None else f"{self.title}\n"
        return f"{title}{self.source.data}{BREAK}"


class Thinking(_Part):
    type: Literal["thinking"]
    thinking: str


class Redacted(_Part):
    """Thoughts that another server has hidden."""

    type: Literal["redacted_thinking"]


class ToolUse(_Part):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


Plain = Annotated[Text | Document, Field(discriminator="type")]


class ToolResult(_Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Plain], BeforeValidator(as_parts)] = []


UserBlock = Annotated[Text | Document | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[Text | ToolUse | Thinking | Redacted, Field(discriminator="type")]


class UserMessage(_Part):
    role: Literal["user"]
    content: Annotated[list[UserBlock], BeforeValidator(as_parts), Field(min_length=1)]


class AssistantMessage(_Part):
    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], BeforeValidator(as_parts)]


class SystemMessage(_Part):
    role: Literal["system"]
    content: Annotated[list[Plain], BeforeValidator(as_parts)]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


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

    def for_template(self) -> dict[str, Any]:
        about = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**about, "parameters": self.input_schema}}


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

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Annotated[list[Text], BeforeValidator(as_parts)] = []
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingWish | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None

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

    def chat(self) -> ChatBody:
        """What is asked, in OpenAI's words; SnapKVError if that can't be answered."""
        messages = ChatMessages()
        for part in self.system:
            messages.say("system", part.text)
        for message in self.messages:
            _tell(messages, message)
        wish = self.thinking
        asked = {
            "messages": messages.all,
            "tools": [tool.for_template() for tool in self.tools or [] if tool.input_schema]
            or None,
            "tool_choice": self.tool_choice.type if self.tool_choice else None,
            "chat_template_kwargs": wish and {"enable_thinking": wish.type != "disabled"},
        }
        return as_body(ChatBody, asked | self.sampling())

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


def _tell(messages: ChatMessages, message: Message) -> None:
    texts: list[str] = []

    def say() -> None:
        if texts:
            messages.say(message.role, "".join(texts))
            texts.clear()

    for part in message.content or [Text(type="text", text="")]:
        if isinstance(part, (Text, Document)):
            texts.append(part.text)
        elif isinstance(part, Thinking):
            messages.think(part.thinking)
        elif isinstance(part, ToolUse):
            say()
            messages.call(part.id, part.name, json.dumps(part.input, ensure_ascii=False))
        elif isinstance(part, ToolResult):
            say()
            messages.result(part.tool_use_id, BREAK.join(found.text for found in part.content))
    say()


router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages")
async def create(request: Request, body: Messages) -> Response:
    """Answer a conversation's last message."""
    return await respond(request, body, [body.chat()], MessageFormatter)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountedMessages) -> dict[str, Any]:
    """The tokens of a message's prompt, which is not read."""
    exchange = exchange_for(request, [body.chat()], COUNT_SECONDS)
    return {"input_tokens": await exchange.count()}
