"""OpenAI's `/v1/chat/completions` and `/v1/completions`."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from ...completions.answer_body import answer_choice, body_head, message_fields, usage_fields
from ...completions.answer_parser import Reply
from ...completions.body import Body, ChatBody, CompletionBody
from ...engine.report import CompressionReport
from ..api_error import ApiError
from ..exchange import model_name, respond
from ..formatter import ResponseFormatter, server_sent_event
from ..requests import Event, Finished, Logprob, PromptProgress, Started, TokenLogprob
from .text_offsets import TextOffsets

DONE = "data: [DONE]\n\n"

router = APIRouter(tags=["OpenAI"])


async def _respond_to_body(request: Request, body: Body) -> Response:
    """Answer each of a body's prompts `n` times, each time with a different seed."""
    n_answers = body.n or 1
    prompt_bodies: list[Any] = body.split_prompts() if isinstance(body, CompletionBody) else [body]
    answer_bodies = [prompt_body for prompt_body in prompt_bodies for _ in range(n_answers)]
    if body.seed is not None:  # a shared seed would make all answers to a prompt identical
        answer_bodies = [
            answer_body.model_copy(update={"seed": body.seed + index})
            for index, answer_body in enumerate(answer_bodies)
        ]
    formatter = CompletionFormatter(
        model_name(request, body),
        is_chat=isinstance(body, ChatBody),
        with_usage=bool(body.stream_options and body.stream_options.include_usage),
        n_answers=n_answers,
        uses_functions=body.uses_functions,
    )
    return await respond(request, answer_bodies, formatter, bool(body.stream))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer the last message of a chat."""
    return await _respond_to_body(request, body)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continue the prompt."""
    return await _respond_to_body(request, body)


class CompletionFormatter(ResponseFormatter):
    """Formats chat completions and text completions.

    Args:
        model: the model's name in the response.
        is_chat: whether these are chat completions.
        with_usage: whether a stream ends with the token counts.
        n_answers: number of answers per prompt.
        uses_functions: whether the client sends `functions`, the predecessor of `tools`.
    """

    def __init__(
        self,
        model: str,
        is_chat: bool,
        with_usage: bool,
        n_answers: int,
        uses_functions: bool,
    ):
        """Create the fields that are the same in all chunks, such as the id."""
        super().__init__()
        self._is_chat = is_chat
        self._with_usage = with_usage
        self._n_answers = n_answers
        self._uses_functions = uses_functions
        self._head = body_head(is_chat, model)
        self._chunk_kind = "chat.completion.chunk" if is_chat else "text_completion"
        # Keyed by answer index.
        self._token_logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self._text_offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        self._n_sent_tokens: Counter[int] = Counter()
        self._n_sent_calls: Counter[int] = Counter()

    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        """Yield a chunk for each new part of an answer, and comments as progress reports and keep-alives."""
        match event:
            case None:
                yield ": keep-alive\n\n"
            case PromptProgress():
                yield f": reading {event.n_read}/{event.n_prompt}\n\n"
            case TokenLogprob():
                self._token_logprobs[index].append(event)
                self._text_offsets[index].add(event.sampled.data)
            case Started() if self._is_chat:
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            case Reply():
                yield self._chunk(index, self._unsent_part(index, event))
            case Finished():
                last_part = self._unsent_part(index, Reply())
                yield self._chunk(index, last_part, event.answer.finish_reason, **self.warnings)

    def end(self) -> Iterator[str]:
        """Yield the usage, if requested, and "[DONE]"."""
        if self._with_usage:
            usage_chunk = {"object": self._chunk_kind, "choices": [], **self._usage_and_report()}
            yield server_sent_event({**self._head, **usage_chunk})
        yield DONE

    def response_body(self) -> dict[str, Any]:
        """Return the completion, with all answers in `choices`."""
        choices = [
            answer_choice(finished.answer, index, self._logprobs(index, first=0))
            for index, finished in sorted(self.finished.items())
        ]
        return {**self._head, "choices": choices, **self._usage_and_report()}

    def stream_error(self, error: ApiError) -> str:
        """Return the error as an event, followed by "[DONE]"."""
        return server_sent_event(self.error(error)) + DONE

    def _chunk(
        self, index: int, part: dict[str, Any], finish_reason: str | None = None, **fields: Any
    ) -> str:
        """Return part of an answer as a streamed event, with additional `fields`."""
        choices = [{"index": index, **part, "finish_reason": finish_reason}]
        chunk = {**self._head, "object": self._chunk_kind, "choices": choices, **fields}
        return server_sent_event(chunk)

    def _unsent_part(self, index: int, reply: Reply) -> dict[str, Any]:
        """Return part of an answer, with the log-probabilities that have not been sent yet.

        The part's tokens and calls are marked as sent. Calls are numbered consecutively across the whole answer.
        """
        logprobs = self._logprobs(index, self._n_sent_tokens[index])
        self._n_sent_tokens[index] = len(self._token_logprobs[index])
        if not self._is_chat:
            return {"text": reply.text, "logprobs": logprobs}
        numbered_calls = [
            {**call, "index": number}
            for number, call in enumerate(reply.calls, start=self._n_sent_calls[index])
        ]
        self._n_sent_calls[index] += len(numbered_calls)
        numbered_reply = replace(reply, calls=numbered_calls)
        delta = message_fields(numbered_reply, self._uses_functions)
        return {"delta": delta, "logprobs": logprobs}

    def _logprobs(self, index: int, first: int) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer's tokens from index `first` on, or None if there are no tokens.

        Chat and text completions have different formats.
        """
        tokens = self._token_logprobs[index][first:]
        if not tokens:
            return None
        if self._is_chat:
            content = []
            for token in tokens:
                top_logprobs = [_logprob_fields(entry) for entry in token.top]
                content.append(_logprob_fields(token.sampled) | {"top_logprobs": top_logprobs})
            return {"content": content}
        return {
            "tokens": [token.sampled.token for token in tokens],
            "token_logprobs": [token.sampled.logprob for token in tokens],
            "top_logprobs": [
                {entry.token: entry.logprob for entry in token.top} for token in tokens
            ],
            "text_offset": self._text_offsets[index].starts[first:],
        }

    def _usage_and_report(self) -> dict[str, Any]:
        """Return the token counts, the first answer's compression report, and any warnings.

        A prompt with several answers is counted once.
        """
        report = self.finished[0].report
        # Each prompt has `n_answers` answers with consecutive indices, the first of which is a multiple of `n_answers`.
        first_started = [
            started for index, started in self.started.items() if index % self._n_answers == 0
        ]
        n_prompt = sum(started.n_prompt for started in first_started)
        n_cached = sum(started.n_cached for started in first_started)
        summary = {"usage": usage_fields(n_prompt, self.n_generated, n_cached)}
        if report is not None:
            summary["mlx_snapkv"] = _report_fields(report)
        return {**summary, **self.warnings}


def _report_fields(report: CompressionReport) -> dict[str, Any]:
    """Return the compression report fields to include in a response."""
    return {
        "policy": report.policy,
        "kv_bytes_before": report.kv_bytes_before,
        "kv_bytes_after": report.kv_bytes_after,
        "reason": report.reason,
        "entries": report.entries if report.compressed else None,
        **report.staying_fields,
    }


def _logprob_fields(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.data)}
