"""OpenAI's `/v1/responses`, as Codex asks; nothing of a response is stored."""

import itertools
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, JsonValue

from ...completions.body import ChatBody, Part, Parts, Positive, Probability, must, require
from ..api_error import ApiError
from ..chat_messages import (
    OutputConfig,
    chat_body,
    function_tool,
    own_tools,
    tool_call,
    tool_result,
)
from ..exchange import respond
from ..formatter import Block, BlockFormatter, server_sent

KINDS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
REPEATED = {"instructions", "max_output_tokens", "temperature", "tools", "top_p"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}

router = APIRouter(tags=["OpenAI"])


class Text(Part):
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


Texts = Annotated[list[Text], Parts]


class Message(Part):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class FunctionCall(Part):
    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class FunctionCallOutput(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class Reasoning(Part):
    """From an earlier response; other servers hide its content, and it is left out then."""

    type: Literal["reasoning"]
    content: Texts = Field([])


Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | Reasoning, Field(discriminator="type")
]


def _items(value: Any) -> Any:
    """A text is a user's message; an item without a type is a message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    require(isinstance(value, list), "must be text or a list", value)
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in value]


class Function(Part):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None  # finite numbers only: responses repeat it


STATELESS = "can't be honoured: nothing is stored here, so send the whole conversation as input"
Stored = Annotated[Any, must(lambda value: not value, STATELESS)]


class ResponsesBody(Part):
    """The body of `/v1/responses`."""

    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_items), Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[Function], own_tools("function")] = Field([])
    tool_choice: Any = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    text: OutputConfig | None = None
    previous_response_id: Stored = None
    conversation: Stored = None
    prompt: Stored = None
    background: Stored = None

    def chat(self) -> ChatBody:
        """The same as a chat completion's body. Raises: SnapKVError: that can't be answered."""
        said = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return chat_body(
            said + [piece for item in self.input for piece in _pieces(item)],
            [function_tool(tool, tool.parameters) for tool in self.tools],
            max_tokens=self.max_output_tokens,
            tool_choice=_tool_choice(self.tool_choice),
            response_format=self.text and self.text.format and self.text.format.response_format,
            **self.model_dump(include={"temperature", "top_p"}),
        )


def _tool_choice(choice: Any) -> Any:
    """The same as chat completions have it, which name a function one level deeper."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _pieces(item: Any) -> Iterator[dict[str, Any]]:
    match item:
        case Message():
            yield {"role": item.role, "content": _text(item.content)}
        case Reasoning() if item.content:
            yield {"role": "assistant", "reasoning_content": _text(item.content)}
        case FunctionCall():
            yield tool_call(item.call_id, item.name, item.arguments)
        case FunctionCallOutput():
            yield tool_result(item.call_id, _text(item.output))


def _text(parts: list[Text]) -> str:
    return "".join(part.text for part in parts)


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation's last message."""
    return await respond(request, body, [body.chat()], partial(ResponsesFormatter, body=body))


class ResponsesFormatter(BlockFormatter):
    """A response to `body`; `model` is the client's name for it."""

    alive = ": keep-alive\n\n"

    def __init__(self, model: str, body: ResponsesBody):
        super().__init__()
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "created_at": int(time.time())}
        self._model, self._body = model, body
        self._numbers = itertools.count()

    def begin(self) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def end(self) -> Iterator[str]:
        response = self.whole()
        yield self._event(f"response.{response['status']}", response=response)

    def whole(self) -> dict[str, Any]:
        started, answer = self.started[0], self.finished[0].answer
        usage = {
            "input_tokens": started.n_prompt,
            "input_tokens_details": {"cached_tokens": started.n_cached, "cache_write_tokens": 0},
            "output_tokens": answer.n_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
            "total_tokens": started.n_prompt + answer.n_tokens,
        }
        output = [_item(block) for block in self.blocks]
        if answer.finish_reason != "length":
            return self._response("completed", output=output, usage=usage)
        if output:
            output[-1]["status"] = "incomplete"
        details = {"reason": "max_output_tokens"}
        return self._response("incomplete", output=output, usage=usage, incomplete_details=details)

    def stream_error(self, error: ApiError) -> str:
        about = {"code": error.code or error.kind, "message": error.detail}
        return self._event("response.failed", response=self._response("failed", error=about))

    def opened(self, block: Block) -> Iterator[str]:
        yield self._output_item("added", block)
        if block.kind != "call":
            yield self._block_event("content_part.added", block, part=_part(block))

    def added(self, block: Block, text: str) -> Iterator[str]:
        yield self._block_event(f"{KINDS[block.kind]}.delta", block, delta=text, **_logprobs(block))

    def closed(self, block: Block) -> Iterator[str]:
        done = f"{KINDS[block.kind]}.done"
        if block.call is not None:
            name = block.call["function"]["name"]
            yield self._block_event(done, block, name=name, arguments=block.text)
        else:
            yield self._block_event(done, block, text=block.text, **_logprobs(block))
            yield self._block_event("content_part.done", block, part=_part(block))
        yield self._output_item("done", block)

    def _output_item(self, what: str, block: Block) -> str:
        item = _item(block, is_new=what == "added")
        return self._event(f"response.output_item.{what}", output_index=block.index, item=item)

    def _block_event(self, kind: str, block: Block, **fields: Any) -> str:
        place = {"output_index": block.index, "item_id": _id(block)}
        content = {} if block.kind == "call" else {"content_index": 0}
        return self._event(f"response.{kind}", **place, **content, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        return server_sent({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body = self._body
        return {
            **self._head,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": None,
            **body.model_dump(include=REPEATED),
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "store": False,
            "tool_choice": body.tool_choice or "auto",
            "usage": None,
            **fields,
        }


def _id(block: Block) -> str:
    return f"{PREFIXES[block.kind]}_{block.id}"


def _item(block: Block, is_new: bool = False) -> dict[str, Any]:
    """An item of the output, still empty if it is new."""
    head = {"id": _id(block), "status": "in_progress" if is_new else "completed"}
    if block.call is not None:
        call = {"call_id": block.call["id"], "name": block.call["function"]["name"]}
        return {"type": "function_call", **head, **call, "arguments": block.text}
    content = [] if is_new else [_part(block)]
    if block.kind == "reasoning":
        return {"type": "reasoning", **head, "summary": [], "content": content}
    return {"type": "message", **head, "role": "assistant", "content": content}


def _part(block: Block) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if block.kind == "text" else {}
    return {"type": KINDS[block.kind], "text": block.text, **more, **_logprobs(block)}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}
