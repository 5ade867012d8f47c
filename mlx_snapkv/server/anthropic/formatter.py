"""Answers as Anthropic's `/v1/messages` gives them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from ..api_error import ApiError
from ..exchange import Exchange
from ..formatter import Block, BlockFormatter, server_sent

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageFormatter(BlockFormatter):
    """A message; `model` is what the client called it."""

    alive = server_sent({"type": "ping"}, "ping")

    def __init__(self, model: str):
        super().__init__()
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._head = {**head, "model": model}

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        content = [_content(block) for block in self.blocks]
        usage = {"usage": _usage(exchange)}
        return {**self._head, "content": content, **_ending(exchange), **usage}

    def begin(self, exchange: Exchange) -> Iterator[str]:
        pending = {"stop_reason": None, "stop_sequence": None, "usage": _usage(exchange)}
        yield _event("message_start", message={**self._head, "content": [], **pending})
        yield self.alive

    def end(self, exchange: Exchange) -> Iterator[str]:
        yield _event("message_delta", delta=_ending(exchange), usage=_usage(exchange))
        yield _event("message_stop")

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        kind = KINDS.get(
            error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error"
        )
        return {"type": "error", "error": {"type": kind, "message": error.detail}}

    def stream_error(self, error: ApiError) -> str:
        return server_sent(self.error(error), "error")

    def started(self, block: Block) -> Iterator[str]:
        yield _event("content_block_start", index=block.index, content_block=_empty(block))

    def added(self, block: Block, text: str) -> Iterator[str]:
        yield _event("content_block_delta", index=block.index, delta=_delta(block, text))

    def ended(self, block: Block) -> Iterator[str]:
        yield _event("content_block_stop", index=block.index)


def _event(kind: str, **fields: Any) -> str:
    return server_sent({"type": kind, **fields}, kind)


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.call is None:
        return {"type": "text", "text": ""}
    name = block.call["function"]["name"]
    return {"type": "tool_use", "id": block.call["id"], "name": name, "input": {}}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text}


def _content(block: Block) -> dict[str, Any]:
    content = _empty(block)
    if block.kind == "call":
        return content | {"input": json.loads(block.text)}
    return content | {"thinking" if block.kind == "reasoning" else "text": block.text}


def _ending(exchange: Exchange) -> dict[str, Any]:
    answer = exchange.finished[0].answer
    called = answer.finish_reason == "tool_calls"
    by = None if called else answer.stopped_by
    reason = "stop_sequence" if by is not None else REASONS[answer.finish_reason or "stop"]
    return {"stop_reason": reason, "stop_sequence": by}


def _usage(exchange: Exchange) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that are not cached."""
    started = exchange.started[0]
    return {
        "input_tokens": started.n_prompt - started.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": started.n_cached,
        "output_tokens": sum(end.answer.n_tokens for end in exchange.finished.values()),
    }
