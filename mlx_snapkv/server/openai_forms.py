"""Answers as OpenAI's `/v1/chat/completions` and `/v1/completions` give them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..batch.answer import Piece, Said
from ..batch.openai_answer import beside, head, message, usage
from .channel import Chosen, Event, Finished, Idle, Read
from .exchange import Exchange
from .failures import ApiError
from .respond import Form, data

DONE = "data: [DONE]\n\n"


@dataclass
class Part(Said):
    """What pieces and tokens come to: an answer, or a part of one."""

    tokens: list[Chosen] = field(default_factory=list)


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
        self._parts: dict[int, Part] = {}
        self._head = head(self.prefix, model)

    def take(self, index: int, event: Event) -> None:
        part = self._parts.setdefault(index, Part())
        if isinstance(event, Chosen):
            part.tokens.append(event)
        elif isinstance(event, Piece):
            part.take(event)

    def _taken(self, index: int) -> Part:
        """What has come of an answer since this was last asked."""
        return self._parts.pop(index, Part())

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = [
            {"index": i, **self._choice(self._taken(i)), "finish_reason": end.reason}
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
        else:
            self.take(index, event)
        if isinstance(event, Piece):
            yield self._chunk(index, self._delta(self._taken(index), index), None)
        elif isinstance(event, Finished):
            yield self._chunk(index, self._delta(self._taken(index), index), event.reason)

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

    @abstractmethod
    def _choice(self, part: Part) -> dict[str, Any]:
        """A whole answer, as a choice without its index and end."""

    @abstractmethod
    def _delta(self, part: Part, index: int) -> dict[str, Any]:
        """What has been added to an answer."""


class ChatForm(OpenAIForm):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, with_usage: bool = False):
        super().__init__(model, with_usage)
        self._n_calls: dict[int, int] = {}

    def _choice(self, part: Part) -> dict[str, Any]:
        return {"message": message(part), "logprobs": _chat_logprobs(part.tokens)}

    def _delta(self, part: Part, index: int) -> dict[str, Any]:
        first = self._n_calls.get(index, 0)
        self._n_calls[index] = first + len(part.calls)
        part.calls = [{**call, "index": first + i} for i, call in enumerate(part.calls)]
        delta = {"content": part.text} if part.text else {}
        return {"delta": delta | beside(part), "logprobs": _chat_logprobs(part.tokens)}

    def _first(self, index: int) -> Iterator[str]:
        yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)


class CompletionForm(OpenAIForm):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, part: Part) -> dict[str, Any]:
        return {"text": part.text, "logprobs": _text_logprobs(part.tokens)}

    def _delta(self, part: Part, index: int) -> dict[str, Any]:
        return self._choice(part)


def usage_of(exchange: Exchange) -> dict[str, Any]:
    """Tokens of an exchange; a prompt that is answered several times counts once."""
    started = exchange.started[0]
    n_answer = sum(end.n_tokens for end in exchange.finished.values())
    return usage(started.n_prompt, n_answer, started.n_cached)


def _about(exchange: Exchange) -> dict[str, Any]:
    """What became of the first answer's prompt, as a field of our own."""
    report = exchange.finished[0].report if 0 in exchange.finished else None
    if report is None:
        return {}
    about: dict[str, Any] = {
        "policy": report.policy,
        "entries": report.entries if report.compressed else None,
        "kv_bytes_before": report.kv_bytes_before,
        "kv_bytes_after": report.kv_bytes_after,
        "reason": report.reason,
    }
    for name, part in (("verified", report.verified), ("book", report.book)):
        if part is not None:
            about[name] = asdict(part)
    return {"mlx_snapkv": about}


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
