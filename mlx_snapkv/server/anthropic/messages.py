"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, Tag

from ...completions.body import ChatBody, Messages
from ...completions.contents import text_parts
from ...completions.fields import BodyModel, MaxTokens, Name, Probability, Stops, Temperature, TopK
from ...completions.messages import Message
from ...completions.response_format import ResponseFormat
from ...completions.validation import required_for
from ..api_error import ApiError
from ..changing_lines import drop_volatile_lines
from ..chat_messages import (
    ForeignTool,
    NoneAsEmpty,
    OutputConfig,
    chat_body,
    function_tool,
    tag_by_type,
    unnest_function,
)
from ..exchange import model_name, respond
from ..formatter import Block, BlockFormatter, server_sent_event

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",  # the client sent `functions`, the predecessor of `tools`
}


class BlockFormat(NamedTuple):
    """Anthropic's names for a kind of block and its streamed parts."""

    field: str
    delta_type: str
    delta_field: str


BLOCK_FORMATS = {
    "reasoning": BlockFormat("thinking", "thinking_delta", "thinking"),
    "text": BlockFormat("text", "text_delta", "text"),
    "call": BlockFormat("input", "input_json_delta", "partial_json"),
}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

router = APIRouter(tags=["Anthropic"])


def _anthropic_tool(value: Any) -> Any:
    """Convert a tool to Anthropic's format. OpenAI's `parameters` become `input_schema`."""
    tool = unnest_function(value)
    if isinstance(tool, dict) and "parameters" in tool and "input_schema" not in tool:
        return tool | {"input_schema": tool["parameters"] or {}}
    return tool


class Tool(BodyModel):
    """A tool that the client runs, with a JSON schema for its arguments."""

    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[ForeignTool, Tag("foreign")],
    tag_by_type(None, "custom", "function"),
    BeforeValidator(_anthropic_tool),
]


def _anthropic_choice(value: Any) -> Any:
    """Convert a tool choice in one of OpenAI's formats to Anthropic's.

    Other values are returned unchanged.
    """
    choice = {"type": value} if isinstance(value, str) else value
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "required":
        return {"type": "any"}
    if kind == "function":
        return unnest_function(choice) | {"type": "tool"}
    return choice


class ToolChoice(BodyModel):
    """Specifies whether an answer may call tools, must call one, or must call the tool `name`."""

    type: Literal["auto", "none", "any", "tool"]
    name: Annotated[Name | None, required_for("tool")] = Field(None, validate_default=True)
    disable_parallel_tool_use: Any = None

    @property
    def as_chat_choice(self) -> Any:
        """Return the choice in the chat completion format."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


def _system_messages(value: Any) -> list[Message]:
    """Return one system message per part of the system prompt."""
    return [
        Message("system", part.text, notes=(part.note,) if part.note else ())
        for part in text_parts(value, "user")
    ]


class CountedMessages(BodyModel):
    """The body of `/v1/messages/count_tokens`. Unknown fields go to the chat body; see `chat_body`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: Messages
    system: Annotated[list[InstanceOf[Message]], BeforeValidator(_system_messages)] = Field([])
    tools: Annotated[list[AnyTool], NoneAsEmpty] = Field([])
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_anthropic_choice)] = None
    thinking: Any = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None

    def as_chat_body(self, **sampling: Any) -> ChatBody:
        """Convert to a chat completion body.

        Raises: SnapKVError: the resulting body is invalid.
        """
        output_config = self.output_config or OutputConfig()
        if self.tool_choice and self.tool_choice.disable_parallel_tool_use is True:
            sampling["parallel_tool_calls"] = False
        tools = [
            function_tool(tool, tool.input_schema) if isinstance(tool, Tool) else tool.model_dump()
            for tool in self.tools
        ]
        return chat_body(
            self,
            [*self.system, *self.messages],
            tools,
            tool_choice=self.tool_choice and self.tool_choice.as_chat_choice,
            response_format=self.output_format or output_config.format,
            thinking=self.thinking,
            reasoning_effort=output_config.effort,
            **sampling,
        )


class MessagesBody(CountedMessages):
    """The body of `/v1/messages`."""

    max_tokens: MaxTokens
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None


@router.post("/v1/messages")
async def create(request: Request, body: MessagesBody) -> Response:
    """Answer the last message of a conversation."""
    sampling = body.model_dump(include={"max_tokens", "temperature", "top_p", "top_k"})
    chat = body.as_chat_body(**sampling, stop=body.stop_sequences)
    formatter = MessageFormatter(model_name(request, body))
    return await respond(request, [chat], formatter, bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountedMessages) -> dict[str, Any]:
    """Count a prompt's tokens without running the model."""
    state = request.app.state
    chat = body.as_chat_body()
    drop_volatile_lines(chat, state.settings.volatile_headers)
    return {"input_tokens": await asyncio.to_thread(state.engine.count_tokens, chat)}


class MessageFormatter(BlockFormatter):
    """Formats a message. `model` is the model's name in the response."""

    def __init__(self, model: str):
        """Create the message's id."""
        super().__init__()
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    @property
    def keep_alive(self) -> str:
        """Return a "ping" event."""
        return _event("ping")

    def begin(self) -> Iterator[str]:
        """Yield an empty "message_start", and a "ping"."""
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
            **self.warnings,
        }
        yield _event("message_start", message=message)
        yield self.keep_alive

    def end(self) -> Iterator[str]:
        """Yield the stop reason, the token counts, and "message_stop"."""
        yield _event("message_delta", delta=self._stop_fields(), usage=self._usage())
        yield _event("message_stop")

    def response_body(self) -> dict[str, Any]:
        """Return the message with all blocks. Call arguments are objects rather than JSON text."""
        content = []
        for block in self.blocks:
            field = BLOCK_FORMATS[block.kind].field
            value = json.loads(block.text) if block.kind == "call" else block.text
            content.append(_empty_content_block(block) | {field: value})
        return {
            **self._head,
            "content": content,
            **self._stop_fields(),
            "usage": self._usage(),
            **self.warnings,
        }

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """Return the body of an error response in Anthropic's format."""
        default_kind = "invalid_request_error" if error.status_code < 500 else "api_error"
        kind = ERROR_TYPES.get(error.status_code, default_kind)
        return {"type": "error", "error": {"type": kind, "message": error.detail}}

    def stream_error(self, error: ApiError) -> str:
        """Return an "error" event, which ends the stream."""
        return server_sent_event(self.error(error), "error")

    def block_start(self, block: Block) -> Iterator[str]:
        """Yield "content_block_start" with an empty block."""
        yield _event(
            "content_block_start", index=block.index, content_block=_empty_content_block(block)
        )

    def block_delta(self, block: Block, text: str) -> Iterator[str]:
        """Yield "content_block_delta" with new text, or with all arguments of a call as JSON."""
        block_format = BLOCK_FORMATS[block.kind]
        delta = {"type": block_format.delta_type, block_format.delta_field: text}
        yield _event("content_block_delta", index=block.index, delta=delta)

    def block_stop(self, block: Block) -> Iterator[str]:
        """Yield "content_block_stop"."""
        yield _event("content_block_stop", index=block.index)

    def _stop_fields(self) -> dict[str, Any]:
        """Return the stop reason, and the stop string that ended the answer (or None)."""
        answer = self.finished[0].answer
        # If a stop string ended the answer after a call, return "tool_use", so that the client runs the call.
        stop_reason = STOP_REASONS[answer.finish_reason or "stop"]
        if answer.stopped_by is not None and stop_reason != "tool_use":
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
        return {"stop_reason": stop_reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the token counts. Anthropic's `input_tokens` excludes cached tokens."""
        started = self.started[0]
        return {
            "input_tokens": started.n_prompt - started.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": started.n_cached,
            "output_tokens": self.n_generated,
        }


def _event(kind: str, **fields: Any) -> str:
    return server_sent_event({"type": kind, **fields}, kind)


def _empty_content_block(block: Block) -> dict[str, Any]:
    """Return a block in Anthropic's format, with empty content."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.call is None:
        return {"type": "text", "text": ""}
    name = block.call["function"]["name"]
    return {"type": "tool_use", "id": block.call["id"], "name": name, "input": {}}
