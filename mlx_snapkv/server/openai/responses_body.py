"""What OpenAI's `/v1/responses` takes, checked, and as the chat that it asks for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from ...completions.body import ChatBody, Positive, Probability, as_body, require
from ..chat_messages import ChatMessages, as_parts


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class Text(_Part):
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


Texts = Annotated[list[Text], BeforeValidator(as_parts)]


class Said(_Part):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts

    def tell(self, messages: ChatMessages) -> None:
        messages.say(self.role, _joined(self.content))


class Called(_Part):
    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str

    def tell(self, messages: ChatMessages) -> None:
        messages.call(self.call_id, self.name, self.arguments)


class Returned(_Part):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts

    def tell(self, messages: ChatMessages) -> None:
        messages.result(self.call_id, _joined(self.output))


class Thought(_Part):
    """Thoughts that came in a response; those of other servers have no content, and are left out."""

    type: Literal["reasoning"]
    content: Texts = []

    def tell(self, messages: ChatMessages) -> None:
        if self.content:
            messages.think(_joined(self.content))


def _joined(parts: list[Text]) -> str:
    return "".join(part.text for part in parts)


def _items(value: Any) -> Any:
    """A text is a user's message, and so is an item without a type."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    require(isinstance(value, list), "input must be text or a list", value)
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]


def _functions(value: Any) -> Any:
    """The tools that are functions: what a service runs, or is made of, clients send along to any server."""
    if not isinstance(value, list):
        return value or []
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value]
    require(all(isinstance(kind, str) for kind in kinds), "tools must have a type each", value)
    return [tool for tool, kind in zip(value, kinds) if kind == "function"]


class Function(_Part):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        """Responses repeat it."""
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("parameters must have finite numbers") from None
        return value

    def for_template(self) -> dict[str, Any]:
        about = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**about, "parameters": self.parameters or {}}}


Item = Annotated[Said | Called | Returned | Thought, Field(discriminator="type")]


class ResponsesBody(BaseModel):
    """The body of `/v1/responses`. Nothing of a response is stored, whatever `store` says."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_items), Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[Function], BeforeValidator(_functions)] = []
    tool_choice: Any = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None

    @field_validator("text")
    @classmethod
    def _free_text(cls, value: dict[str, Any] | None) -> Any:
        form = (value or {}).get("format")
        ok = form is None or form == {"type": "text"}
        require(ok, "text.format must be text: no form can be forced on an answer", form)
        return value

    @field_validator("previous_response_id", "conversation", "prompt", "background")
    @classmethod
    def _whole(cls, value: Any, info: Any) -> Any:
        told = f"{info.field_name} can't be honoured: nothing is stored here"
        require(not value, f"{told}, so send the whole conversation as input", value)
        return value

    def chat(self) -> ChatBody:
        """What is asked, in the words of chat completions; SnapKVError if that can't be answered."""
        messages = ChatMessages()
        if self.instructions:
            messages.say("system", self.instructions)
        for item in self.input:
            item.tell(messages)
        asked = {
            "messages": messages.all,
            "tools": [tool.for_template() for tool in self.tools] or None,
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        return as_body(ChatBody, asked)
