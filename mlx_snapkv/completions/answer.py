"""An answer as it comes, in text, thoughts and tool calls, and the bodies that OpenAI's endpoints give it in."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter
from mlx_lm.tool_parsers import json_tools

from .request import CompletionRequest


@dataclass
class Said:
    """What a model says, or a part of it; `calls` are of tools, in OpenAI's form."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Completion:
    """One request's answer. Stop texts are matched in the text, since their tokens may be split in several ways.

    Attributes:
        said: so far.
        n_tokens: the end-of-answer token included; `n_reasoning` of them are thoughts, with their delimiters.
        finish_reason: None until it has ended; "stop", "length" or "tool_calls".
        stopped_by: the stop text that has ended it.
    """

    def __init__(self, asked: CompletionRequest, tokenizer):
        self.asked = asked
        self.said = Said()
        self.n_tokens = self.n_reasoning = 0
        self.finish_reason: str | None = None
        self.stopped_by: str | None = None
        self._constraint = asked.constraint
        self._is_call = bool(asked.constraint and asked.constraint.form.kind == "call")
        self._parser = json_tools.parse_tool_call if self._is_call else tokenizer.tool_parser
        self._detokenizer = tokenizer.detokenizer
        stops = TextStateMachine({"normal": [(text, None) for text in asked.stop]})
        self._until_stop = stops.make_state()
        # What continues a text has no place for thoughts and calls: it stays as it is.
        parts = make_text_state_machine(tokenizer) if asked.chat else TextStateMachine()
        self._parts = parts.make_state(asked.state)
        self._state = asked.state
        self._call = ""  # as the model writes it

    def add(self, token: int, finish_reason: str | None) -> list[Said]:
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
        if self._until_stop[0] is None:
            finish_reason, rest = "stop", self._until_stop[3]
            self.stopped_by = pending[len(text) : len(pending) - len(rest)]
        elif finish_reason is not None:
            text += TextStateMachine.flush(self._until_stop)[1]
        found = list(self._parsed(text, finish_reason is not None))
        for piece in found:
            self.said.text += piece.text
            self.said.reasoning += piece.reasoning
            self.said.calls += piece.calls
        self.finish_reason = finish_reason
        if finish_reason == "stop" and self._constraint and self._constraint.is_cut:
            self.finish_reason = "length"
        elif finish_reason == "stop" and self.said.calls:
            self.finish_reason = "tool_calls"
        return found

    def _parsed(self, text: str, is_last: bool) -> Iterator[Said]:
        """Text without stop texts, in its parts."""
        self._parts, segments = TextStateMachine.split(self._parts, text)
        if self._constraint and any(state == "normal" and part.strip() for state, part in segments):
            held = self._parts[3]  # JSON has begun, in which nothing marks thoughts or calls
            self._parts, more = TextStateMachine.split(TextStateMachine().make_state(), held)
            segments = [*segments, *more]
        if is_last:
            _, rest, state = TextStateMachine.flush(self._parts)
            segments = [*segments, (state, rest)]
        for self._state, piece in segments:
            if self._state == "tool" or (self._is_call and self._state == "normal"):
                self._call += piece
                continue
            yield from self._called()
            if piece:
                yield Said(**{"reasoning" if self._state == "reasoning" else "text": piece})
        if is_last:
            yield from self._called()

    def _called(self) -> Iterator[Said]:
        """The call that has become whole, if any; one that can't be parsed is text again."""
        text, self._call = self._call, ""
        if not text:
            return
        try:
            calls = ToolCallFormatter(self._parser, self.asked.tools)([text])
        except Exception:  # parsers of what a model wrote
            calls = []
        yield Said(calls=calls) if calls else Said(text)


def answer_body(answer: Completion, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The response body of a whole answer, `extra` as its field `mlx_snapkv`."""
    used = usage(len(answer.asked.prompt), answer.n_tokens)
    about = {"choices": [choice(answer)], "usage": used, "mlx_snapkv": extra}
    return head(answer.asked.chat, model) | about


def head(chat: bool, model: str) -> dict[str, Any]:
    """What the body of a chat's answer, or of a text's, begins with."""
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def choice(answer: Completion, index: int = 0, logprobs: Any = None) -> dict[str, Any]:
    content: dict[str, Any] = {"text": answer.said.text}
    if answer.asked.chat:
        fields = {"content": None if answer.said.calls else ""} | message_fields(answer.said)
        content = {"message": {"role": "assistant", **fields}}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def message_fields(said: Said) -> dict[str, Any]:
    """The fields of a message that have something."""
    fields = {"content": said.text, "reasoning": said.reasoning, "tool_calls": said.calls}
    return {name: value for name, value in fields.items() if value}


def usage(n_prompt: int, n_answer: int, n_cached: int | None = None) -> dict[str, Any]:
    """Tokens; `n_cached` of the prompt had been read before."""
    known = {} if n_cached is None else {"prompt_tokens_details": {"cached_tokens": n_cached}}
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_answer}
    return counts | {"total_tokens": n_prompt + n_answer} | known
