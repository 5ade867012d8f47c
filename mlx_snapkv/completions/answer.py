"""An answer as it comes, in text, thoughts and tool calls, and the bodies that OpenAI's endpoints give it in."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter

from .request import CompletionRequest


@dataclass(frozen=True)
class Delta:
    """A part of an answer.

    Attributes:
        state: "normal" or "reasoning", in mlx-lm's words.
        calls: of tools, in OpenAI's form, instead of text.
    """

    state: str
    text: str
    calls: tuple[dict[str, Any], ...] = ()


@dataclass
class Reply:
    """What pieces come to."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, piece: Delta) -> None:
        self.calls += piece.calls
        if piece.state == "reasoning":
            self.reasoning += piece.text
        else:
            self.text += piece.text


class Completion:
    """One request's answer. Stop texts are matched in the text, since their tokens may be split in several ways.

    Attributes:
        said: all pieces so far.
        n_tokens: the end-of-answer token included.
        n_reasoning: those of them that are thoughts, with their delimiters.
        finish_reason: None until it has ended; "stop", "length" or "tool_calls".
        stopped_by: the stop text that has ended it.
    """

    def __init__(self, asked: CompletionRequest, tokenizer):
        self.asked = asked
        self.said = Reply()
        self.n_tokens = self.n_reasoning = 0
        self.finish_reason: str | None = None
        self.stopped_by: str | None = None
        self._parser = tokenizer.tool_parser
        self._detokenizer = tokenizer.detokenizer
        stops = TextStateMachine({"normal": [(text, None) for text in asked.stop]})
        self._until_stop = stops.make_state()
        # What continues a text has no place for thoughts and calls: it stays as it is.
        parts = make_text_state_machine(tokenizer) if asked.chat else TextStateMachine()
        self._parts = parts.make_state(asked.state)
        self._state = asked.state
        self._call = ""  # as the model writes it
        self._new: list[Delta] = []

    def add(self, token: int, finish_reason: str | None) -> list[Delta]:
        """Take a token in, the last one with mlx-lm's `finish_reason`; what has become certain by it."""
        self.n_tokens += 1
        self.n_reasoning += self._state == "reasoning"
        if finish_reason != "stop":
            self._detokenizer.add_token(token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        new = self._detokenizer.last_segment
        pending = self._until_stop[3] + new
        self._until_stop, ((_, text), *_) = TextStateMachine.split(self._until_stop, new)
        self._take(text)
        if self._until_stop[0] is None:
            finish_reason = "stop"
            rest = self._until_stop[3]
            self.stopped_by = pending[len(text) : len(pending) - len(rest)]
        elif finish_reason is not None:
            self._take(TextStateMachine.flush(self._until_stop)[1])
        if finish_reason is not None:
            self._end(finish_reason)
        found, self._new = self._new, []
        for piece in found:
            self.said.take(piece)
        if self.finish_reason == "stop" and self.said.calls:
            self.finish_reason = "tool_calls"
        return found

    def _take(self, text: str) -> None:
        """Text that is no part of a stop text."""
        self._parts, segments = TextStateMachine.split(self._parts, text)
        for state, piece in segments:
            self._put(state, piece)

    def _put(self, state: str, text: str) -> None:
        if self._state == "tool" and state != "tool":
            self._end_call()
        self._state = state
        if state == "tool":
            self._call += text
        elif text:
            self._new.append(Delta(state, text))

    def _end(self, finish_reason: str) -> None:
        _, rest, state = TextStateMachine.flush(self._parts)
        self._put(state, rest)
        self._end_call()
        self.finish_reason = finish_reason

    def _end_call(self) -> None:
        """A call is whole; one that can't be parsed is text again."""
        text, self._call = self._call, ""
        if not text:
            return
        try:
            calls = ToolCallFormatter(self._parser, self.asked.tools)([text])
        except Exception:  # parsers of what a model wrote
            calls = []
        self._new.append(Delta("tool", "", tuple(calls)) if calls else Delta("normal", text))


def answer_body(answer: Completion, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The response body of a whole answer, `extra` as its field `mlx_snapkv`."""
    chat, said = answer.asked.chat, answer.said
    content = {"message": message(said)} if chat else {"text": said.text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": answer.finish_reason}
    n_prompt = len(answer.asked.prompt)
    return {
        **head("chatcmpl" if chat else "cmpl", model),
        "object": "chat.completion" if chat else "text_completion",
        "choices": [choice],
        "usage": usage(n_prompt, answer.n_tokens),
        "mlx_snapkv": extra,
    }


def head(prefix: str, model: str) -> dict[str, Any]:
    """What every body begins with; `prefix` is of its id."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def message(said: Reply) -> dict[str, Any]:
    """An assistant's message."""
    content = said.text if said.text or not said.calls else None
    return {"role": "assistant", "content": content, **beside(said)}


def beside(said: Reply) -> dict[str, Any]:
    """The fields of a message besides its text."""
    reasoning = {"reasoning": said.reasoning} if said.reasoning else {}
    return reasoning | ({"tool_calls": said.calls} if said.calls else {})


def usage(n_prompt: int, n_answer: int, n_cached: int | None = None) -> dict[str, Any]:
    """Tokens; `n_cached` of the prompt had been read before."""
    known = {} if n_cached is None else {"prompt_tokens_details": {"cached_tokens": n_cached}}
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        **known,
    }
