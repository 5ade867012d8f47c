"""Answers as OpenAI's `/v1/responses` gives them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from ..api_error import ApiError
from ..exchange import Exchange
from ..formatter import Block, BlockFormatter, server_sent
from .completion_formatter import OpenAIFormatter
from .responses_body import ResponsesBody

KINDS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesFormatter(BlockFormatter):
    """A response to `body`; `model` is what the client called it."""

    alive = ": keep-alive\n\n"

    def __init__(self, model: str, body: ResponsesBody):
        super().__init__()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._since = int(time.time())
        self._model, self._body = model, body
        self._names: dict[int, str] = {}
        self._n_events = 0

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        cut = exchange.finished[0].answer.finish_reason == "length"
        output = [self._item(block) for block in self.blocks]
        if cut and output:
            output[-1]["status"] = "incomplete"
        details = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}
        status = "incomplete" if cut else "completed"
        return self._response(status, output=output, usage=_usage(exchange), **details)

    def begin(self, exchange: Exchange) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def end(self, exchange: Exchange) -> Iterator[str]:
        response = self.whole(exchange)
        yield self._event(f"response.{response['status']}", response=response)

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        return OpenAIFormatter.error(error)

    def stream_error(self, error: ApiError) -> str:
        told = {"code": error.code or error.kind, "message": error.detail}
        return self._event("response.failed", response=self._response("failed", error=told))

    def started(self, block: Block) -> Iterator[str]:
        yield self._output_item("added", block)
        if block.kind != "call":
            yield self._content_part("added", block)

    def added(self, block: Block, text: str) -> Iterator[str]:
        beside: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        yield self._block_event(f"{KINDS[block.kind]}.delta", block, delta=text, **beside)

    def ended(self, block: Block) -> Iterator[str]:
        if block.call is not None:
            whole = {"name": block.call["function"]["name"], "arguments": block.text}
        else:
            whole = {"text": block.text} | ({"logprobs": []} if block.kind == "text" else {})
        yield self._block_event(f"{KINDS[block.kind]}.done", block, **whole)
        if block.call is None:
            yield self._content_part("done", block)
        yield self._output_item("done", block)

    def _output_item(self, what: str, block: Block) -> str:
        item = self._item(block, begun=what == "added")
        return self._event(f"response.output_item.{what}", output_index=block.index, item=item)

    def _content_part(self, what: str, block: Block) -> str:
        return self._block_event(f"content_part.{what}", block, part=_part(block))

    def _block_event(self, kind: str, block: Block, **fields: Any) -> str:
        place = {"output_index": block.index, "item_id": self._name(block)}
        content = {} if block.kind == "call" else {"content_index": 0}
        return self._event(f"response.{kind}", **place, **content, **fields)

    def _item(self, block: Block, begun: bool = False) -> dict[str, Any]:
        """An item of the output, empty when it has only begun."""
        status = "in_progress" if begun else "completed"
        head = {"id": self._name(block), "status": status}
        if block.call is not None:
            name, arguments = block.call["function"]["name"], "" if begun else block.text
            call = {"call_id": block.call["id"], "name": name, "arguments": arguments}
            return {"type": "function_call", **head, **call}
        content = [] if begun else [_part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _name(self, block: Block) -> str:
        new = f"{PREFIXES[block.kind]}_{uuid.uuid4().hex}"
        return self._names.setdefault(block.index, new)

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._n_events = self._n_events, self._n_events + 1
        return server_sent({"type": kind, "sequence_number": number, **fields}, kind)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._since,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _part(block: Block) -> dict[str, Any]:
    beside: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": KINDS[block.kind], "text": block.text, **beside}


def _usage(exchange: Exchange) -> dict[str, Any]:
    started, answer = exchange.started[0], exchange.finished[0].answer
    known = {"cached_tokens": started.n_cached, "cache_write_tokens": 0}
    return {
        "input_tokens": started.n_prompt,
        "input_tokens_details": known,
        "output_tokens": answer.n_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.n_reasoning},
        "total_tokens": started.n_prompt + answer.n_tokens,
    }
