"""An answer as it comes, in text, thoughts and tool calls, and the bodies that OpenAI's endpoints give it in."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import StreamingDetokenizer
from mlx_lm.tool_parsers import json_tools

from .calls import calls_in, is_unfinished
from .request import CompletionRequest


@dataclass
class Reply:
    """What a model says, or a part of it; `calls` are of tools, in OpenAI's form."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Completion:
    """One request's answer. Stop texts are matched in its text, since their tokens may be split in several ways; in
    thoughts and calls they end nothing.

    Attributes:
        reply: so far.
        n_tokens: the end-of-answer token included; `n_reasoning` of them are thoughts, with their delimiters.
        finish_reason: None until it has ended; "stop", "length", "tool_calls", or of old clients "function_call".
        stopped_by: the stop text that has ended it.
    """

    def __init__(self, request: CompletionRequest, tokenizer):
        self.request = request
        self.reply = Reply()
        self.n_tokens = self.n_reasoning = 0
        self.finish_reason: str | None = None
        self.stopped_by: str | None = None
        self._constraint = request.constraint
        self._is_call = bool(request.constraint and request.constraint.form.kind == "call")
        is_begun = bool(request.constraint and request.constraint.form.begun)
        # Whether it has yet to say what has a form.
        self._is_open = request.constraint is not None and not is_begun
        self._parser = json_tools.parse_tool_call if self._is_call else tokenizer.tool_parser
        self._call_start, self._call_end = tokenizer.tool_call_start, tokenizer.tool_call_end
        self._detokenizer = _detokenizer(tokenizer, not request.chat or bool(request.prefill))
        self._stops = TextStateMachine({"normal": [(text, None) for text in request.stop]})
        self._until_stop = self._stops.make_state()
        # What continues a text, or JSON, has no place for thoughts and calls: it stays as it is.
        is_text = is_begun or not request.chat
        self._machine = TextStateMachine() if is_text else make_text_state_machine(tokenizer)
        self._parts = self._machine.make_state(request.state)
        self._state = request.state
        self._call = ""  # as the model writes it
        self._is_thought = False  # whether that is within its thoughts

    def add(self, token: int, finish_reason: str | None) -> list[Reply]:
        """Take a token in, the last one with mlx-lm's `finish_reason`; what has become certain by it."""
        self.n_tokens += 1
        self.n_reasoning += self._state == "reasoning"
        if finish_reason != "stop":
            self._detokenizer.add_token(token)
        if finish_reason is not None:
            self._detokenizer.finalize()
        parts = self._parsed(self._detokenizer.last_segment, finish_reason is not None)
        pieces = list(self._until_stopped(parts, finish_reason is not None))
        if self.stopped_by is not None:
            finish_reason = "stop"
        for piece in pieces:
            self.reply.text += piece.text
            self.reply.reasoning += piece.reasoning
            self.reply.calls += piece.calls
        self.finish_reason = finish_reason
        if finish_reason == "stop" and self._constraint and self._constraint.is_cut:
            self.finish_reason = "length"
        elif finish_reason == "stop" and self.reply.calls:
            self.finish_reason = "function_call" if self.request.by_functions else "tool_calls"
        return pieces

    def _until_stopped(self, parts: Iterator[Reply], is_last: bool) -> Iterator[Reply]:
        """The parts up to a stop text; what may begin one is held back until it is certain."""
        if not self.request.stop:
            yield from parts
            return
        for part in parts:
            if not part.text:
                yield from self._held_back()
                yield part
                continue
            if not part.text.strip() and self.reply.reasoning and not self.reply.text.strip():
                yield part  # what parts the answer from the thoughts is no part of it
                continue
            pending = self._until_stop[3] + part.text
            self._until_stop, ((_, text), *_) = TextStateMachine.split(self._until_stop, part.text)
            if text:
                yield Reply(text)
            if self._until_stop[0] is None:
                rest = self._until_stop[3]
                self.stopped_by = pending[len(text) : len(pending) - len(rest)]
                return
        if is_last:
            yield from self._held_back()

    def _held_back(self) -> Iterator[Reply]:
        self._until_stop, text, _ = TextStateMachine.flush(self._until_stop)
        self._until_stop = self._stops.make_state()
        if text:
            yield Reply(text)

    def _parsed(self, text: str, is_last: bool) -> Iterator[Reply]:
        """An answer's text in its parts."""
        for state, piece in self._segments(text, is_last):
            self._state = state
            if state == "tool" or (self._is_call and state == "normal"):
                self._call += piece
                continue
            yield from self._called()
            if piece:
                yield Reply(reasoning=piece) if state == "reasoning" else Reply(piece)
        if is_last and self._call:
            yield from self._ended_in_call()

    def _segments(self, text: str, is_last: bool) -> Iterator[tuple[str, str]]:
        """Pieces of a text, each with what it is; a marker within a call's argument, or within JSON, is none."""
        after, segments = TextStateMachine.split(self._parts, text)
        in_call = bool(self._call_end) and any(state == "tool" for state, _ in segments)
        if not (in_call or self._begins(segments)):
            self._parts, text = after, ""
            yield from segments
        for letter in text:
            was, call = self._parts[0], self._call
            self._parts, segments = TextStateMachine.split(self._parts, letter)
            if was != "tool" and self._parts[0] == "tool":
                self._is_thought = was == "reasoning"
            if was == "tool" and self._parts[0] != "tool":
                call += segments[0][1]
                if is_unfinished(call):
                    segments = [("tool", segments[0][1] + self._call_end)]
                    self._parts = self._machine.make_state("tool")
                elif self._is_thought:
                    self._parts = self._machine.make_state("reasoning")
            if self._begins(segments):
                held, self._parts = self._parts[3], TextStateMachine().make_state()
                self._parts, more = TextStateMachine.split(self._parts, held)
                segments = [*segments, *more]
                self._is_open = False
            yield from segments
            self._is_open = self._is_open and self._parts[0] != "tool"
        self._is_open = self._is_open and self._parts[0] != "tool"
        if is_last:
            _, rest, state = TextStateMachine.flush(self._parts)
            yield state, rest

    def _begins(self, segments: list[tuple[str, str]]) -> bool:
        """Whether these have the first letter of JSON that was asked for, from which on nothing is a marker."""
        return self._is_open and any(state == "normal" and part.strip() for state, part in segments)

    def _called(self, is_ended: bool = True) -> Iterator[Reply]:
        """The calls that have become whole, if any; one that can't be parsed is text again."""
        text = self._call
        if text:
            calls = self._calls(is_ended)
            self._call = ""
            is_thought = is_ended and self._is_thought and not calls
            yield Reply(reasoning=text) if is_thought else Reply("" if calls else text, calls=calls)

    def _calls(self, is_ended: bool) -> list[dict[str, Any]]:
        """The calls that have been written, behind a marker or, as small models begin, behind two."""
        text, start = self._call, self._call_start
        if start and text.lstrip().startswith(start):
            text = text.lstrip().removeprefix(start)
        return calls_in(text, self._parser, self.request.tools, is_ended)

    def _ended_in_call(self) -> Iterator[Reply]:
        """What is left when the answer ends within a call: text, and the calls behind a marker that did end it."""
        first, end, rest = self._call.partition(self._call_end or "\0")
        if self._is_call or not end or self._calls(is_ended=False):
            yield from self._called(is_ended=False)
            return
        self._call, self._parts = "", self._machine.make_state()
        yield Reply(first or end)
        yield from self._parsed(rest, True)


def _detokenizer(tokenizer, continues: bool) -> StreamingDetokenizer:
    """mlx-lm's drops the space before an answer's first word, which one that `continues` a text needs."""
    detokenizer = tokenizer.detokenizer
    if continues:  # it has a word already
        detokenizer.add_token(tokenizer.encode("a", add_special_tokens=False)[-1])
        _ = detokenizer.last_segment
    return detokenizer


def answer_body(answer: Completion, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The response body of a whole answer, `extra` as its field `mlx_snapkv`."""
    used = usage(len(answer.request.prompt), answer.n_tokens)
    about = {"choices": [choice(answer)], "usage": used, "mlx_snapkv": extra}
    if answer.request.warnings:
        about["warnings"] = answer.request.warnings
    return head(answer.request.chat, model) | about


def head(chat: bool, model: str) -> dict[str, Any]:
    """What the body of a chat's answer, or of a text's, begins with."""
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def choice(answer: Completion, index: int = 0, logprobs: Any = None) -> dict[str, Any]:
    content: dict[str, Any] = {"text": answer.reply.text}
    if answer.request.chat:
        message = message_fields(answer.reply, answer.request.by_functions)
        fields = {"content": None if answer.reply.calls else ""} | message
        content = {"message": {"role": "assistant", **fields}}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def message_fields(reply: Reply, by_functions: bool = False) -> dict[str, Any]:
    """The fields of a message that have something; clients of functions look for the first call in its old place."""
    thoughts = dict.fromkeys(
        ("reasoning", "reasoning_content"), reply.reasoning
    )  # clients read either
    fields = {"content": reply.text, **thoughts, "tool_calls": reply.calls}
    if by_functions and reply.calls and not reply.calls[0].get("index"):
        fields["function_call"] = reply.calls[0]["function"]
    return {name: value for name, value in fields.items() if value}


def usage(n_prompt: int, n_answer: int, n_cached: int | None = None) -> dict[str, Any]:
    """Tokens; `n_cached` of the prompt had been read before."""
    cached = {} if n_cached is None else {"prompt_tokens_details": {"cached_tokens": n_cached}}
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_answer}
    return counts | {"total_tokens": n_prompt + n_answer} | cached
