"""Answers as OpenAI's `/v1/responses` gives them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from .block_form import BlockForm
from .blocks import Block, Change
from .exchange import Exchange
from .failures import ApiError
from .openai_forms import OpenAIForm
from .respond import data
from .responses_bodies import ResponsesBody

PARTS = {"reasoning": "reasoning_text", "text": "output_text"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseForm(BlockForm):
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
        cut = exchange.finished[0].reason == "length"
        output = [self._item(block) for block in self.blocks.all]
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
        return OpenAIForm.error(error)

    def streamed_error(self, error: ApiError) -> str:
        told = {"code": error.code or error.kind, "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=told))

    def changed(self, change: Change, block: Block, text: str) -> Iterator[str]:
        place = {"output_index": block.index}
        if change == "start":
            yield self._event("response.output_item.added", **place, item=self._item(block, True))
        where = place | {"item_id": self._name(block)}
        if block.kind == "call":
            yield from self._arguments(change, block, text, where)
        else:
            yield from self._text(change, block, text, where | {"content_index": 0})
        if change == "end":
            yield self._event("response.output_item.done", **place, item=self._item(block))

    def _arguments(self, change: Change, block: Block, text: str, where: dict) -> Iterator[str]:
        kind = "response.function_call_arguments"
        if change == "add":
            yield self._event(f"{kind}.delta", **where, delta=text)
        elif change == "end":
            assert block.call is not None
            name = block.call["function"]["name"]
            yield self._event(f"{kind}.done", **where, name=name, arguments=block.text)

    def _text(self, change: Change, block: Block, text: str, where: dict) -> Iterator[str]:
        kind = f"response.{PARTS[block.kind]}"
        beside: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change == "start":
            yield self._event("response.content_part.added", **where, part=_part(block, ""))
        elif change == "add":
            yield self._event(f"{kind}.delta", **where, delta=text, **beside)
        else:
            yield self._event(f"{kind}.done", **where, text=block.text, **beside)
            yield self._event("response.content_part.done", **where, part=_part(block, block.text))

    def _item(self, block: Block, begun: bool = False) -> dict[str, Any]:
        """An item of the output, empty when it has only begun."""
        status = "in_progress" if begun else "completed"
        head = {"id": self._name(block), "status": status}
        if block.call is not None:
            name, arguments = block.call["function"]["name"], "" if begun else block.text
            call = {"call_id": block.call["id"], "name": name, "arguments": arguments}
            return {"type": "function_call", **head, **call}
        content = [] if begun else [_part(block, block.text)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _name(self, block: Block) -> str:
        new = f"{PREFIXES[block.kind]}_{uuid.uuid4().hex}"
        return self._names.setdefault(block.index, new)

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._n_events = self._n_events, self._n_events + 1
        return data({"type": kind, "sequence_number": number, **fields}, kind)

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
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    beside: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": PARTS[block.kind], "text": text, **beside}


def _usage(exchange: Exchange) -> dict[str, Any]:
    started, end = exchange.started[0], exchange.finished[0]
    known = {"cached_tokens": started.n_cached, "cache_write_tokens": 0}
    return {
        "input_tokens": started.n_prompt,
        "input_tokens_details": known,
        "output_tokens": end.n_tokens,
        "output_tokens_details": {"reasoning_tokens": end.n_reasoning},
        "total_tokens": started.n_prompt + end.n_tokens,
    }
