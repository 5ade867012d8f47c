"""Answers as OpenAI's `/v1/chat/completions` and `/v1/completions` give them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ...completions.answer import Piece, Said, beside, head, message, usage
from ..api_error import ApiError
from ..exchange import Exchange
from ..formatter import ResponseFormatter, server_sent
from ..requests import Event, Finished, Idle, Read, TokenLogprob

DONE = "data: [DONE]\n\n"


@dataclass
class Delta(Said):
    """What pieces and tokens come to: an answer, or what has been added to one."""

    tokens: list[TokenLogprob] = field(default_factory=list)


class OpenAIFormatter(ResponseFormatter):
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
        self._deltas: dict[int, Delta] = {}
        self._head = head(self.prefix, model)

    def take(self, index: int, event: Event) -> None:
        delta = self._deltas.setdefault(index, Delta())
        if isinstance(event, TokenLogprob):
            delta.tokens.append(event)
        elif isinstance(event, Piece):
            delta.take(event)

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                **self._choice(self._deltas.get(i, Delta())),
                "finish_reason": end.answer.finish_reason,
            }
            for i, end in sorted(exchange.finished.items())
        ]
        ending = _ending(exchange)
        return {**self._head, "object": self.kind, "choices": choices, **ending}

    def begin(self, exchange: Exchange) -> Iterator[str]:
        for index in exchange.started:
            yield from self._first(index)

    def stream(self, index: int, event: Event) -> Iterator[str]:
        if isinstance(event, Idle):
            yield ": keep-alive\n\n"
        elif isinstance(event, Read):
            yield f": reading {event.n_read}/{event.n_prompt}\n\n"
        else:
            self.take(index, event)
        if isinstance(event, (Piece, Finished)):
            delta = self._delta(self._deltas.pop(index), index)
            end = event.answer.finish_reason if isinstance(event, Finished) else None
            yield self._chunk(index, delta, end)

    def end(self, exchange: Exchange) -> Iterator[str]:
        if self._with_usage:
            last = {"object": self.chunk_kind, "choices": [], **_ending(exchange)}
            yield server_sent({**self._head, **last})
        yield DONE

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        about = {"message": error.detail, "type": error.kind}
        return {"error": {**about, "param": error.param, "code": error.code}}

    def stream_error(self, error: ApiError) -> str:
        return server_sent(self.error(error)) + DONE

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> str:
        choice = {"index": index, **delta, "finish_reason": reason}
        return server_sent({**self._head, "object": self.chunk_kind, "choices": [choice]})

    def _first(self, index: int) -> Iterator[str]:
        yield from ()

    @abstractmethod
    def _choice(self, delta: Delta) -> dict[str, Any]:
        """A whole answer, as a choice without its index and end."""

    @abstractmethod
    def _delta(self, delta: Delta, index: int) -> dict[str, Any]:
        """What has been added to an answer."""


class ChatFormatter(OpenAIFormatter):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, with_usage: bool = False):
        super().__init__(model, with_usage)
        self._n_calls: dict[int, int] = {}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {"message": message(delta), "logprobs": _chat_logprobs(delta.tokens)}

    def _delta(self, delta: Delta, index: int) -> dict[str, Any]:
        first = self._n_calls.get(index, 0)
        self._n_calls[index] = first + len(delta.calls)
        delta.calls = [{**call, "index": first + i} for i, call in enumerate(delta.calls)]
        content = {"content": delta.text} if delta.text else {}
        return {"delta": content | beside(delta), "logprobs": _chat_logprobs(delta.tokens)}

    def _first(self, index: int) -> Iterator[str]:
        yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)


class TextFormatter(OpenAIFormatter):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": _text_logprobs(delta.tokens)}

    def _delta(self, delta: Delta, index: int) -> dict[str, Any]:
        return self._choice(delta)


def _ending(exchange: Exchange) -> dict[str, Any]:
    """The tokens of an exchange, whose prompt counts once, and what became of the first answer's prompt."""
    started = exchange.started[0]
    n_answer = sum(end.answer.n_tokens for end in exchange.finished.values())
    ending: dict[str, Any] = {"usage": usage(started.n_prompt, n_answer, started.n_cached)}
    report = exchange.finished[0].report
    if report is not None:
        names = ("policy", "kv_bytes_before", "kv_bytes_after", "reason")
        about = {name: getattr(report, name) for name in names}
        about["entries"] = report.entries if report.compressed else None
        for name, part in (("verified", report.verified), ("book", report.book)):
            if part is not None:
                about[name] = asdict(part)
        ending["mlx_snapkv"] = about
    return ending


def _chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {**_token(each.token, each.logprob), "top_logprobs": [_token(*top) for top in each.top]}
        for each in tokens
    ]
    return {"content": content}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "tokens": [each.token for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [dict(each.top) for each in tokens],
        "text_offset": None,
    }
