"""Format answers as OpenAI response bodies."""

import time
import uuid
from typing import Any

from .answer import Completion
from .answer_parser import Reply


def answer_body(answer: Completion, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the response body for a finished answer, with `extra` as its `mlx_snapkv` field."""
    request = answer.request
    body = {
        **body_head(request.chat, model),
        "choices": [answer_choice(answer)],
        "usage": usage_fields(len(request.prompt), answer.n_tokens),
        "mlx_snapkv": extra,
    }
    if request.warnings:
        body["warnings"] = request.warnings
    return body


def body_head(is_chat: bool, model: str) -> dict[str, Any]:
    """Return the first fields of a response body, for a chat or a text completion."""
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def answer_choice(answer: Completion, index: int = 0, logprobs: Any = None) -> dict[str, Any]:
    """Return a finished answer as an element of `choices`."""
    reply = answer.reply
    answer_fields: dict[str, Any]
    if answer.request.chat:
        # Like OpenAI, send null rather than an empty string if there are calls.
        empty_content = None if reply.calls else ""
        non_empty_fields = message_fields(reply, answer.request.uses_functions)
        message = {"role": "assistant", "content": empty_content, **non_empty_fields}
        answer_fields = {"message": message}
    else:
        answer_fields = {"text": reply.text}
    return {
        "index": index,
        **answer_fields,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }


def message_fields(reply: Reply, uses_functions: bool = False) -> dict[str, Any]:
    """Return the non-empty fields of a message, or of one streamed part of the message.

    Clients that send `functions` also get the first call as `function_call`.
    """
    fields: dict[str, Any] = {
        "content": reply.text,
        # Some clients read `reasoning`, others `reasoning_content`.
        "reasoning": reply.reasoning,
        "reasoning_content": reply.reasoning,
        "tool_calls": reply.calls,
    }
    if uses_functions and reply.calls:
        first_call = reply.calls[0]
        # Streamed calls have an index, because the first call in a streamed part may not be the first call in the
        # answer. Calls in a complete answer have no index.
        is_first_of_answer = first_call.get("index", 0) == 0
        if is_first_of_answer:
            fields["function_call"] = first_call["function"]
    return {name: value for name, value in fields.items() if value}


def usage_fields(n_prompt: int, n_answer: int, n_cached: int | None = None) -> dict[str, Any]:
    """Return the `usage` field.

    `n_cached` is the number of prompt tokens from the prefix cache. If None, it is not reported.
    """
    fields: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
    }
    if n_cached is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": n_cached}
    return fields
