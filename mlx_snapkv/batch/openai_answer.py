"""Bodies that OpenAI's completion endpoints give answers in."""

from __future__ import annotations

import time
import uuid
from typing import Any

from .answer import Answer, Said


def answer_body(answer: Answer, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The response body of a whole answer, `extra` as its field `mlx_snapkv`."""
    chat, said = answer.asked.chat, answer.said
    content = {"message": message(said)} if chat else {"text": said.text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": answer.finish_reason}
    n_prompt = len(answer.asked.prompt)
    kind = "chat.completion" if chat else "text_completion"
    return {
        **head("chatcmpl" if chat else "cmpl", model),
        "object": kind,
        "choices": [choice],
        "usage": usage(n_prompt, answer.n_tokens),
        "mlx_snapkv": extra,
    }


def head(prefix: str, model: str) -> dict[str, Any]:
    """What every body begins with; `prefix` is of its id."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def message(said: Said) -> dict[str, Any]:
    """An assistant's message."""
    content = said.text if said.text or not said.calls else None
    return {"role": "assistant", "content": content, **beside(said)}


def beside(said: Said) -> dict[str, Any]:
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
