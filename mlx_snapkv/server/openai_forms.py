"""Answers as OpenAI's `/v1/chat/completions` and `/v1/completions` give them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .channel import Chosen, Event, Finished, Idle, Piece, Read
from .exchange import Exchange
from .failures import ApiError
from .respond import Form, data

DONE = "data: [DONE]\n\n"


@dataclass
class Said:
    """What has come of one answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Chosen] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, Chosen):
            self.tokens.append(event)
        elif isinstance(event, Piece):
            self.calls += event.calls
            if event.state == "reasoning":
                self.reasoning += event.text
            else:
                self.text += event.text


class OpenAIForm(Form):
    """What both endpoints have in common.

    Args:
        model: what the client called it.
        with_usage: streams end with it.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, with_usage: bool = False):
        self._with_usage = with_usage
        self._said: dict[int, Said] = {}
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def said(self, index: int) -> Said:
        return self._said.setdefault(index, Said())

    def take(self, index: int, event: Event) -> None:
        self.said(index).take(event)

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = [
            {"index": i, **self._choice(self.said(i)), "finish_reason": end.reason}
            for i, end in sorted(exchange.finished.items())
        ]
        usage = {"usage": usage_of(exchange)}
        return {**self._head, "object": self.kind, "choices": choices, **usage, **_about(exchange)}

    def begin(self, exchange: Exchange) -> Iterator[str]:
        for index in exchange.started:
            yield from self._first(index)

    def streamed(self, index: int, event: Event, exchange: Exchange) -> Iterator[str]:
        if isinstance(event, Idle):
            yield ": keep-alive\n\n"
        elif isinstance(event, Read):
            yield f": reading {event.n_read}/{event.n_prompt}\n\n"
        elif isinstance(event, Chosen):
            self.said(index).tokens.append(event)
        elif isinstance(event, Piece):
            said = self.said(index)
            now = Said(tokens=said.tokens)
            now.take(event)
            said.tokens = []
            yield self._chunk(index, self._delta(now), None)
        elif isinstance(event, Finished):
            rest = Said(tokens=self.said(index).tokens)
            yield self._chunk(index, self._delta(rest), event.reason)

    def end(self, exchange: Exchange) -> Iterator[str]:
        if self._with_usage:
            usage = {"choices": [], "usage": usage_of(exchange), **_about(exchange)}
            yield data({**self._head, "object": self.chunk_kind, **usage})
        yield DONE

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        about = {"message": error.message, "type": error.kind}
        return {"error": {**about, "param": error.param, "code": error.code}}

    def streamed_error(self, error: ApiError) -> str:
        return data(self.error(error)) + DONE

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> str:
        choice = {"index": index, **delta, "finish_reason": reason}
        return data({**self._head, "object": self.chunk_kind, "choices": [choice]})

    def _first(self, index: int) -> Iterator[str]:
        yield from ()

    def _choice(self, said: Said) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, said: Said) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(OpenAIForm):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, said: Said) -> dict[str, Any]:
        content = said.text if said.text or not said.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return {"message": message | _beside(said), "logprobs": _chat_logprobs(said.tokens)}

    def _delta(self, said: Said) -> dict[str, Any]:
        delta = {"content": said.text} if said.text else {}
        calls = [{**call, "index": i} for i, call in enumerate(said.calls)]
        more = _beside(said) | ({"tool_calls": calls} if calls else {})
        return {"delta": delta | more, "logprobs": _chat_logprobs(said.tokens)}

    def _first(self, index: int) -> Iterator[str]:
        yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)


class CompletionForm(OpenAIForm):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, said: Said) -> dict[str, Any]:
        return {"text": said.text, "logprobs": _text_logprobs(said.tokens)}

    _delta = _choice


def usage_of(exchange: Exchange) -> dict[str, Any]:
    """Tokens of an exchange, in OpenAI's words; a prompt that is answered several times counts once."""
    started = exchange.started[0]
    n_answer = sum(end.n_tokens for end in exchange.finished.values())
    return {
        "prompt_tokens": started.n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": started.n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": started.n_cached},
    }


def _about(exchange: Exchange) -> dict[str, Any]:
    """What became of the first answer's prompt, as a field of our own."""
    report = exchange.finished[0].report if 0 in exchange.finished else None
    if report is None:
        return {}
    return {
        "mlx_snapkv": {
            "policy": report.policy,
            "entries": report.entries if report.compressed else None,
            "kv_bytes_before": report.kv_bytes_before,
            "kv_bytes_after": report.kv_bytes_after,
            "reason": report.reason,
        }
    }


def _beside(said: Said) -> dict[str, Any]:
    """Fields of a message besides its text."""
    found: dict[str, Any] = {}
    if said.reasoning:
        found["reasoning"] = said.reasoning
    if said.calls:
        found["tool_calls"] = said.calls
    return found


def _chat_logprobs(tokens: list[Chosen]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "content": [
            {
                **_token(chosen.token, chosen.logprob),
                "top_logprobs": [_token(*likely) for likely in chosen.top],
            }
            for chosen in tokens
        ]
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text_logprobs(tokens: list[Chosen]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "tokens": [chosen.token for chosen in tokens],
        "token_logprobs": [chosen.logprob for chosen in tokens],
        "top_logprobs": [dict(chosen.top) for chosen in tokens],
        "text_offset": None,
    }
