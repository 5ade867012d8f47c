"""Format answers for an API, as one response body or as server-sent events."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..completions.answer_parser import Reply
from .api_error import ApiError
from .requests import Event, Finished, PromptProgress, Started


def server_sent_event(data: Any, name: str | None = None) -> str:
    """Format `data` as a server-sent event with a JSON payload."""
    name_line = "" if name is None else f"event: {name}\n"
    payload = json.dumps(data, ensure_ascii=False)
    return f"{name_line}data: {payload}\n\n"


class ResponseFormatter(ABC):
    """Formats the engine's events as the response to one HTTP request.

    Attributes:
        started: the `Started` events by answer index.
        finished: the `Finished` events by answer index.
    """

    def __init__(self) -> None:
        """Start with no events."""
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}

    def handle(self, index: int, event: Event | None) -> Iterator[str]:
        """Record an answer's event, and yield server-sent events for it.

        Args:
            index: index of the answer.
            event: the event, or None if nothing has happened for a while.
        """
        if isinstance(event, Started):
            self.started[index] = event
        elif isinstance(event, Finished):
            self.finished[index] = event
        is_waiting_to_start = event is None and not self.started
        if is_waiting_to_start:
            # Some APIs forbid a keep-alive as the first event, but a comment may be sent at any time.
            yield ": waiting\n\n"
        else:
            yield from self.stream(index, event)

    @property
    def warnings(self) -> dict[str, list[str]]:
        """Return a response field that reports ignored request fields, or {} if none were ignored."""
        sentences = [warning for started in self.started.values() for warning in started.warnings]
        return {"warnings": list(dict.fromkeys(sentences))} if sentences else {}

    @property
    def n_generated(self) -> int:
        """Return the total number of answer tokens."""
        return sum(finished.answer.n_tokens for finished in self.finished.values())

    @abstractmethod
    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        """Yield server-sent events for an event from the engine, as described in `handle`."""

    @abstractmethod
    def end(self) -> Iterator[str]:
        """Yield the final server-sent events once all answers are complete."""

    @abstractmethod
    def response_body(self) -> dict[str, Any]:
        """Return the response body once all answers are complete."""

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """Return the body of an error response in OpenAI's format."""
        return {
            "error": {
                "message": error.detail,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }

    @abstractmethod
    def stream_error(self, error: ApiError) -> str:
        """Return server-sent events that end a stream with an error."""


Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer in Anthropic's Messages or OpenAI's Responses API.

    Attributes:
        call: the tool call in OpenAI's format. None for other kinds of block.
        text: the reasoning, the text, or the call's arguments.
        index: the block's position in the answer. None until the block is sent.
    """

    kind: Kind
    call: dict[str, Any] | None = None
    text: str = ""
    index: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockFormatter(ResponseFormatter):
    """Formats one answer as a list of blocks, and streams each block's start, changes and end."""

    def __init__(self) -> None:
        """Start with no blocks."""
        super().__init__()
        self.blocks: list[Block] = []
        self._open_block: Block | None = None

    @property
    @abstractmethod
    def keep_alive(self) -> str:
        """Return a server-sent event that keeps the connection alive."""

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Yield the initial server-sent events."""

    @abstractmethod
    def block_start(self, block: Block) -> Iterator[str]:
        """Yield server-sent events for a new block."""

    @abstractmethod
    def block_delta(self, block: Block, text: str) -> Iterator[str]:
        """Yield server-sent events for `text` added to a block."""

    @abstractmethod
    def block_stop(self, block: Block) -> Iterator[str]:
        """Yield server-sent events for a finished block."""

    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        """Yield server-sent events for an event from the engine."""
        if isinstance(event, Started):
            yield from self.begin()
        elif event is None or isinstance(event, PromptProgress):
            yield self.keep_alive
        elif isinstance(event, Reply):
            for call in event.calls:  # each call is a complete block
                yield from self._close_block()
                yield from self._add_to_block("call", call["function"]["arguments"], call)
                yield from self._close_block()
            yield from self._add_to_block("reasoning", event.reasoning)
            yield from self._add_to_block("text", event.text)
        elif isinstance(event, Finished):
            block = self._open_block
            # If the answer is only whitespace, no block has been sent yet, so send the last one.
            if block is not None and block.kind == "text" and not self.blocks:
                yield from self._send(block)
            yield from self._close_block()

    def _add_to_block(
        self, kind: Kind, text: str, call: dict[str, Any] | None = None
    ) -> Iterator[str]:
        """Add text to the open block, or to a new one if the open block is of a different kind.

        A new block is sent once it has a visible character, together with the whitespace before that character. Blocks
        of whitespace are dropped. But if a whole answer is whitespace, and its last block is text, that block is sent.
        """
        if not text:
            return
        if self._open_block is None or self._open_block.kind != kind:
            yield from self._close_block()
            self._open_block = Block(kind, call)
        block = self._open_block
        block.text += text
        if block.index is not None:
            yield from self.block_delta(block, text)
        elif block.text.strip():
            yield from self._send(block)

    def _send(self, block: Block) -> Iterator[str]:
        """Yield the start of a block, and its text so far."""
        text, block.text = block.text, ""
        block.index = len(self.blocks)
        self.blocks.append(block)
        yield from self.block_start(block)
        block.text = text
        yield from self.block_delta(block, text)

    def _close_block(self) -> Iterator[str]:
        """Close the open block. A block that was not sent is dropped."""
        block = self._open_block
        self._open_block = None
        if block is not None and block.index is not None:
            yield from self.block_stop(block)
