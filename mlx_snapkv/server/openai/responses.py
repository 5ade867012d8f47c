"""OpenAI's `/v1/responses`, which Codex uses. Responses are not stored."""

import itertools
import json
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue

from ...completions.body import ChatBody, Messages
from ...completions.contents import as_list, replace_surrogates_in
from ...completions.fields import BodyModel, MaxTokens, Probability, Temperature
from ...completions.messages import Message, parse_message
from ...completions.validation import must, require
from ..api_error import ApiError
from ..chat_messages import ForeignTool, NoneAsEmpty, OutputConfig, chat_body
from ..exchange import model_name, respond
from ..formatter import Block, BlockFormatter, server_sent_event
from .response_tools import AnyTool, OfferedTool, chat_tools, tools_by_name

PART_TYPES = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}
REPEATED_FIELDS = set(
    "instructions metadata reasoning tool_choice max_output_tokens temperature top_p".split()
)
ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}

router = APIRouter(tags=["OpenAI"])


def _input_items(value: Any) -> Any:
    """Return the input as a list of items. Text becomes a user message.

    Raises: ValueError: the input is neither text nor a list.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    require(isinstance(value, list), "must be text or a list", value)
    return value


def _instruction_messages(instructions: Any) -> list[Message]:
    """Convert instructions to messages. Text and content parts become system messages, and messages keep their role.

    Raises: ValueError: the format of the instructions is invalid.
    """
    messages = []
    for item in as_list(instructions):
        is_message = isinstance(item, dict) and "role" in item
        message = item if is_message else {"role": "system", "content": item}
        messages += parse_message(message)
    return messages


def _require_readable(instructions: Any) -> Any:
    """Check the instructions, and return them unchanged.

    Raises: ValueError: their format is invalid.
    """
    _instruction_messages(instructions)
    return instructions


STATELESS = "can't be honoured: nothing is stored here, so send the whole conversation as input"
Stored = Annotated[Any, must(lambda value: not value, STATELESS)]


class ResponsesBody(BodyModel):
    """The body of `/v1/responses`. Unknown fields are passed on to the chat completion.

    `JsonValue` fields can't contain NaN or infinity, because the response repeats them as JSON.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: Annotated[Messages, BeforeValidator(_input_items)]
    instructions: Annotated[JsonValue, AfterValidator(_require_readable)] = None
    tools: Annotated[list[AnyTool], NoneAsEmpty] = Field([])
    tool_choice: JsonValue = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    reasoning: JsonValue = None
    metadata: JsonValue = None
    text: OutputConfig | None = None
    previous_response_id: Stored = None
    conversation: Stored = None
    prompt: Stored = None
    background: Stored = None

    def as_chat_body(self) -> ChatBody:
        """Convert to a chat completion body.

        Raises: SnapKVError: the resulting body is invalid.
        """
        return chat_body(
            self,
            _instruction_messages(self.instructions) + self.input,
            chat_tools(self.tools),
            max_tokens=self.max_output_tokens,
            continue_final_message=False,  # the answer is a new item, not a continuation
            response_format=self.text and self.text.format,
            **self.model_dump(include={"tool_choice", "temperature", "top_p", "reasoning"}),
        )


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer the last message of a conversation."""
    formatter = ResponsesFormatter(model_name(request, body), body)
    return await respond(request, [body.as_chat_body()], formatter, bool(body.stream))


class ResponsesFormatter(BlockFormatter):
    """Formats a response.

    Args:
        model: the model's name in the response.
        body: the request body.
    """

    def __init__(self, model: str, body: ResponsesBody):
        """Create the response's id. Events are numbered from 0."""
        super().__init__()
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "created_at": int(time.time())}
        self._model = model
        self._body = body
        self._sequence_numbers = itertools.count()
        self._tools_by_full_name = tools_by_name(body.tools)

    def begin(self) -> Iterator[str]:
        """Yield "response.created" and "response.in_progress"."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self.keep_alive

    @property
    def keep_alive(self) -> str:
        """Return a "response.in_progress" event.

        A comment is not enough, because Codex ignores comments and ends a stream after 300 seconds without an event.
        """
        return self._event("response.in_progress", response=self._response("in_progress"))

    def end(self) -> Iterator[str]:
        """Yield "response.completed" or "response.incomplete" with the whole response."""
        response = self.response_body()
        yield self._event(f"response.{response['status']}", response=response)

    def response_body(self) -> dict[str, Any]:
        """Return the response with all items. Its status is "incomplete" if the answer reached its maximum length."""
        started = self.started[0]
        answer = self.finished[0].answer
        usage = {
            "input_tokens": started.n_prompt,
            "input_tokens_details": {"cached_tokens": started.n_cached, "cache_write_tokens": 0},
            "output_tokens": answer.n_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
            "total_tokens": started.n_prompt + answer.n_tokens,
        }
        output = [self._output_item_fields(block) for block in self.blocks]
        if not self._is_cut_off:
            return self._response("completed", output=output, usage=usage)
        details = {"reason": "max_output_tokens"}
        return self._response("incomplete", output=output, usage=usage, incomplete_details=details)

    @property
    def _is_cut_off(self) -> bool:
        """Return whether the answer has ended because it reached its maximum length."""
        return any(finished.answer.finish_reason == "length" for finished in self.finished.values())

    def stream_error(self, error: ApiError) -> str:
        """Return "response.failed" with the error."""
        error_fields = {"code": error.code or error.kind, "message": error.detail}
        response = self._response("failed", error=error_fields)
        return self._event("response.failed", response=response)

    def block_start(self, block: Block) -> Iterator[str]:
        """Yield the events that start an item and, unless the item is a call, its only part."""
        yield self._output_item_event("added", block)
        if block.kind != "call":
            yield self._block_event("content_part.added", block, part=_content_part(block))

    def block_delta(self, block: Block, text: str) -> Iterator[str]:
        """Yield an item's new text or, for a call to a custom tool, the whole input."""
        if self._calls_custom_tool(block):
            # Calls arrive complete, so one delta contains the whole input, extracted from the JSON arguments.
            custom_input = _custom_input(block)
            yield self._block_event("custom_tool_call_input.delta", block, delta=custom_input)
            return
        delta_kind = f"{PART_TYPES[block.kind]}.delta"
        yield self._block_event(delta_kind, block, delta=text, **_empty_logprobs(block))

    def block_stop(self, block: Block) -> Iterator[str]:
        """Yield the events that end an item: its whole text, the end of its part, and the end of the item.

        Calls have no parts.
        """
        done_kind = f"{PART_TYPES[block.kind]}.done"
        if self._calls_custom_tool(block):
            yield self._block_event(
                "custom_tool_call_input.done", block, input=_custom_input(block)
            )
        elif block.call is not None:
            name = self._client_names(block)["name"]
            yield self._block_event(done_kind, block, name=name, arguments=block.text)
        else:
            yield self._block_event(done_kind, block, text=block.text, **_empty_logprobs(block))
            yield self._block_event("content_part.done", block, part=_content_part(block))
        yield self._output_item_event("done", block)

    def _output_item_event(self, change: Literal["added", "done"], block: Block) -> str:
        """Return the event for an item that was added (with no content yet) or is done."""
        item = self._output_item_fields(block, is_new=(change == "added"))
        return self._event(f"response.output_item.{change}", output_index=block.index, item=item)

    def _called_tool(self, block: Block) -> OfferedTool | None:
        """Return the tool that a block calls, or None if the block is not a call or names an unknown tool."""
        if block.call is None:
            return None
        return self._tools_by_full_name.get(block.call["function"]["name"])

    def _calls_custom_tool(self, block: Block) -> bool:
        """Return whether a block calls a custom tool."""
        offered = self._called_tool(block)
        return offered is not None and offered.tool.type == "custom"

    def _client_names(self, block: Block) -> dict[str, str]:
        """Return the `name` of the tool that a block calls, and its `namespace` if it has one, as the client sent them.

        The model calls a tool by its full name `namespace__name`, which the client does not know. If the client offered
        no such tool, return the name that the model used.
        """
        assert block.call is not None
        offered = self._called_tool(block)
        if offered is None:
            return {"name": block.call["function"]["name"]}
        if not offered.namespace:
            return {"name": offered.tool.name}
        return {"name": offered.tool.name, "namespace": offered.namespace}

    def _output_item_fields(self, block: Block, is_new: bool = False) -> dict[str, Any]:
        """Return a block as an output item. A new item has no content."""
        status = "in_progress" if is_new else "completed"
        if self._is_cut_off and block is self.blocks[-1]:
            status = "incomplete"
        head = {"id": _item_id(block), "status": status}
        if block.call is not None:
            call_fields = {"call_id": block.call["id"], **self._client_names(block)}
            if self._calls_custom_tool(block):
                custom_input = "" if is_new else _custom_input(block)
                return {"type": "custom_tool_call", **head, **call_fields, "input": custom_input}
            return {"type": "function_call", **head, **call_fields, "arguments": block.text}
        content = [] if is_new else [_content_part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _block_event(self, kind: str, block: Block, **fields: Any) -> str:
        """Return an event about a block, with `fields`. Items other than calls have exactly one content part."""
        position: dict[str, Any] = {"output_index": block.index, "item_id": _item_id(block)}
        if block.kind != "call":
            position["content_index"] = 0
        return self._event(f"response.{kind}", **position, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        """Return an event with the next sequence number."""
        data = {"type": kind, "sequence_number": next(self._sequence_numbers), **fields}
        return server_sent_event(data, kind)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Return the response body. `fields` override the defaults."""
        client_fields = replace_surrogates_in(self._body.model_dump(include=REPEATED_FIELDS))
        own_tools = [tool for tool in self._body.tools if not isinstance(tool, ForeignTool)]
        return {
            **self._head,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": None,
            **client_fields,
            "tools": replace_surrogates_in([tool.model_dump() for tool in own_tools]),
            "metadata": client_fields["metadata"] or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "store": False,
            "tool_choice": client_fields["tool_choice"] or "auto",
            "usage": None,
            **self.warnings,
            **fields,
        }


def _item_id(block: Block) -> str:
    return f"{ID_PREFIXES[block.kind]}_{block.id}"


def _custom_input(block: Block) -> str:
    """Return the text argument of a call to a custom tool, or all arguments as JSON if the text is missing."""
    arguments_json = block.text
    custom_input = json.loads(arguments_json).get("input")
    return custom_input if isinstance(custom_input, str) else arguments_json


def _content_part(block: Block) -> dict[str, Any]:
    """Return the content part for a block's text or reasoning."""
    part: dict[str, Any] = {"type": PART_TYPES[block.kind], "text": block.text}
    if block.kind == "text":
        part |= {"annotations": [], "logprobs": []}
    return part


def _empty_logprobs(block: Block) -> dict[str, Any]:
    """Return the `logprobs` field that clients expect with text. It is always empty."""
    return {"logprobs": []} if block.kind == "text" else {}
