"""Answers in the format of an API: whole, or as server-sent events."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..completions.answer_parser import Reply
from .api_error import ApiError
from .requests import Event, Finished, Read, Started


def server_sent(value: Any, event: str | None = None) -> str:
    """One server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


class ResponseFormatter(ABC):
    """Formats the answers to one request from their events, `started` and `finished` by answer."""

    def __init__(self) -> None:
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}

    def take(self, index: int, event: Event | None) -> Iterator[str]:
        """The server-sent events for an event, or for none in a while."""
        if isinstance(event, Started):
            self.started[index] = event
        elif isinstance(event, Finished):
            self.finished[index] = event
        if event is None and not self.started:
            yield ": waiting\n\n"
        else:
            yield from self.stream(index, event)

    @property
    def warnings(self) -> dict[str, list[str]]:
        """The field that says what of the request was left out, if anything was."""
        sentences = [warning for started in self.started.values() for warning in started.warnings]
        return {"warnings": list(dict.fromkeys(sentences))} if sentences else {}

    @property
    def n_generated(self) -> int:
        return sum(end.answer.n_tokens for end in self.finished.values())

    @abstractmethod
    def stream(self, index: int, event: Event | None) -> Iterator[str]: ...

    @abstractmethod
    def end(self) -> Iterator[str]: ...

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response's body, once everything has come."""

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """The body of a failed request, as OpenAI has it."""
        about = {"message": error.detail, "type": error.kind}
        return {"error": {**about, "param": error.param, "code": error.code}}

    @abstractmethod
    def stream_error(self, error: ApiError) -> str: ...


Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer, as Anthropic's messages and OpenAI's responses have it; it begins with the first word.

    Attributes:
        call: of a tool, in OpenAI's form; its arguments are the text.
        index: None until it has begun; its text is white space until then.
    """

    kind: Kind
    call: dict[str, Any] | None = None
    text: str = ""
    index: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockFormatter(ResponseFormatter):
    """Gives one answer in blocks and streams how they change; `alive` only shows that the connection lives."""

    @property
    @abstractmethod
    def alive(self) -> str: ...

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @abstractmethod
    def begin(self) -> Iterator[str]: ...

    @abstractmethod
    def opened(self, block: Block) -> Iterator[str]: ...

    @abstractmethod
    def added(self, block: Block, text: str) -> Iterator[str]: ...

    @abstractmethod
    def closed(self, block: Block) -> Iterator[str]: ...

    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        if isinstance(event, Started):
            yield from self.begin()
        elif event is None or isinstance(event, Read):
            yield self.alive
        elif isinstance(event, Reply):
            for call in event.calls:
                yield from self._close()
                yield from self._add("call", call["function"]["arguments"], call)
                yield from self._close()
            yield from self._add("reasoning", event.reasoning)
            yield from self._add("text", event.text)
        elif isinstance(event, Finished):
            yield from self._close()

    def _add(self, kind: Kind, text: str, call: dict[str, Any] | None = None) -> Iterator[str]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            self._open = Block(kind, call)
        block = self._open
        if block.index is None:
            block.text, text = "", block.text + text
            if text.strip():
                block.index = len(self.blocks)
                self.blocks.append(block)
                yield from self.opened(block)
        block.text += text
        if block.index is not None:
            yield from self.added(block, text)

    def _close(self) -> Iterator[str]:
        block, self._open = self._open, None
        if block is not None and block.index is not None:
            yield from self.closed(block)
