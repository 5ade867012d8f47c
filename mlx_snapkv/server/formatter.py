"""Format answers for an API, either as one response body or as server-sent events."""

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
    """Format `data` as JSON in a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


class ResponseFormatter(ABC):
    """Formats the answers to one HTTP request from the engine's events.

    Attributes:
        started: the `Started` events, by index of the answer.
        finished: the `Finished` events, by index of the answer.
    """

    def __init__(self) -> None:
        """Start without events."""
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}

    def handle(self, index: int, event: Event | None) -> Iterator[str]:
        """Store an event of an answer, and yield its server-sent events.

        Args:
            index: number of the answer.
            event: the event; None if there was none for a while.
        """
        if isinstance(event, Started):
            self.started[index] = event
        elif isinstance(event, Finished):
            self.finished[index] = event
        # Some APIs forbid keep-alive events before the first event. A comment may be sent at any time.
        if event is None and not self.started:
            yield ": waiting\n\n"
        else:
            yield from self.stream(index, event)

    @property
    def warnings(self) -> dict[str, list[str]]:
        """Return the response's field about ignored fields of the request, or an empty dict."""
        sentences = [warning for started in self.started.values() for warning in started.warnings]
        return {"warnings": list(dict.fromkeys(sentences))} if sentences else {}

    @property
    def n_generated(self) -> int:
        """Return the total number of tokens of all answers."""
        return sum(end.answer.n_tokens for end in self.finished.values())

    @abstractmethod
    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        """Yield the server-sent events for an event of the engine; see `handle`."""

    @abstractmethod
    def end(self) -> Iterator[str]:
        """Yield the last server-sent events, when all answers are complete."""

    @abstractmethod
    def response_body(self) -> dict[str, Any]:
        """Return the response's body, when all answers are complete."""

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
        """Return the server-sent events that end a stream with an error."""


Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer in Anthropic's messages and OpenAI's responses. It starts with the first visible character.

    Attributes:
        call: the tool call in OpenAI's format; None for other kinds.
        text: reasoning, text, or the arguments of the call.
        index: number of the block in the answer; None while its text is only white space.
    """

    kind: Kind
    call: dict[str, Any] | None = None
    text: str = ""
    index: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockFormatter(ResponseFormatter):
    """Formats one answer as a list of blocks, and streams the start, changes and end of each block."""

    def __init__(self) -> None:
        """Start without blocks."""
        super().__init__()
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @property
    @abstractmethod
    def keep_alive(self) -> str:
        """Return a server-sent event that keeps the connection alive."""

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """Yield the first server-sent events."""

    @abstractmethod
    def block_start(self, block: Block) -> Iterator[str]:
        """Yield the server-sent events for a new block."""

    @abstractmethod
    def block_delta(self, block: Block, text: str) -> Iterator[str]:
        """Yield the server-sent events for `text` that was added to a block."""

    @abstractmethod
    def block_stop(self, block: Block) -> Iterator[str]:
        """Yield the server-sent events for a complete block."""

    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        """Yield the server-sent events for an event of the engine."""
        if isinstance(event, Started):
            yield from self.begin()
        elif event is None or isinstance(event, PromptProgress):
            yield self.keep_alive
        elif isinstance(event, Reply):
            for call in event.calls:  # each call is a complete block
                yield from self._close()
                yield from self._add("call", call["function"]["arguments"], call)
                yield from self._close()
            yield from self._add("reasoning", event.reasoning)
            yield from self._add("text", event.text)
        elif isinstance(event, Finished):
            yield from self._close()

    def _add(self, kind: Kind, text: str, call: dict[str, Any] | None = None) -> Iterator[str]:
        """Add text to the open block, or to a new block if the open one is of another kind.

        A block is sent when it has a visible character, together with the white space before it.
        """
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            self._open = Block(kind, call)
        block = self._open
        if block.index is None:
            unsent = block.text + text
            if not unsent.strip():
                block.text = unsent
                return
            block.text = ""
            block.index = len(self.blocks)
            self.blocks.append(block)
            yield from self.block_start(block)
            text = unsent
        block.text += text
        yield from self.block_delta(block, text)

    def _close(self) -> Iterator[str]:
        """Close the open block. If it has only white space, drop it."""
        block = self._open
        self._open = None
        if block is not None and block.index is not None:
            yield from self.block_stop(block)
