"""What OpenAI's `/v1/responses` takes, checked, and as the chat that it asks for."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..batch.openai_body import ChatBody, Positive, Probability, require
from .failures import bad_request
from .parts import parts
from .reading import checked
from .turns import Turns


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    @abstractmethod
    def tell(self, turns: Turns) -> None:
        """Add what it says to a conversation."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    text: str


TEXTS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text"), _Part)


def _text(value: Any, name: str) -> str:
    """A text, or what parts of texts come to."""
    return value if isinstance(value, str) else "".join(p.text for p in parts(name, value, TEXTS))


class Said(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Any

    @field_validator("content")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return _text(value, "content")

    def tell(self, turns: Turns) -> None:
        turns.say(self.role, self.content)


class Called(_Item):
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str

    def tell(self, turns: Turns) -> None:
        turns.call(self.call_id, self.name, self.arguments)


class Returned(_Item):
    call_id: str
    output: Any

    @field_validator("output")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return _text(value, "output")

    def tell(self, turns: Turns) -> None:
        turns.result(self.call_id, self.output)


class Thought(_Item):
    """Thoughts that came in a response; those of other servers have no content, and are left out."""

    content: Any = None

    @field_validator("content")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return _text(value or [], "content")

    def tell(self, turns: Turns) -> None:
        if self.content:
            turns.think(self.content)


ITEMS: dict[str, type[_Item]] = {
    "message": Said,
    "function_call": Called,
    "function_call_output": Returned,
    "reasoning": Thought,
}


class Function(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _tellable(cls, value: Any) -> Any:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("parameters must have finite numbers") from None
        return value

    def for_template(self) -> dict[str, Any]:
        about = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**about, "parameters": self.parameters or {}}}


class ResponsesBody(BaseModel):
    """The body of `/v1/responses`. Nothing of a response is stored, whatever `store` says."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: Any = None
    input: Any
    instructions: str | None = None
    tools: list[Any] | None = None
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

    @field_validator("input")
    @classmethod
    def _items(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [Said(role="user", content=value)]
        return parts("input", value, ITEMS, default="message")

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[Any] | None) -> list[Any]:
        """The tools that are functions: what a service runs, or is made of, clients send along to any server."""
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value or []]
        require(all(isinstance(kind, str) for kind in kinds), "tools must have a type each", value)
        chosen = [tool for tool, kind in zip(value or [], kinds) if kind == "function"]
        return parts("tools", chosen, {"function": Function})

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

    def chat(self, volatile: Collection[str] = ()) -> ChatBody:
        """What is asked, in the words of chat completions.

        Args:
            volatile: names of header lines that the instructions are to begin without.

        Raises:
            ApiError: the input is empty, or a tool is to be forced.
        """
        turns = Turns(volatile)
        if self.instructions:
            turns.say("system", self.instructions)
        for item in self.input:
            item.tell(turns)
        if not turns.messages:
            raise bad_request("input must not be empty", param="input")
        asked = {
            "messages": turns.messages,
            "tools": [tool.for_template() for tool in self.tools or []] or None,
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        return checked(ChatBody, asked)
