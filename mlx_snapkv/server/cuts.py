"""Where later prompts are likely to part from this one: what is read is kept there."""

from __future__ import annotations

from typing import Any

from ..batch.openai_body import Body, ChatBody
from ..batch.openai_request import chat_tokens
from ..chat.common_prefix import common_prefix

SHORTEST = 128  # tokens that are worth it
TAIL = 11  # tokens in which a template may begin the model's thoughts, as mlx-lm's server has it


def cuts(body: Body, tokenizer: Any, prompt: list[int], at_end: bool, n_last: int) -> list[int]:
    """How many of a prompt's tokens are a beginning that others may have, in order.

    That is after the system messages; `at_end` also before the model's thoughts, of which templates leave nothing in
    the next turn's prompt. It is so much earlier that any prompt that goes on from there has its `n_last` last tokens
    to read.
    """
    if not isinstance(body, ChatBody):
        return []
    found = {_system_end(body, tokenizer, prompt) - (n_last - 1)}
    if at_end:
        found.add(min(_thoughts_start(tokenizer, prompt), len(prompt) - n_last))
    return sorted(n for n in found if SHORTEST <= n < len(prompt))


def _system_end(body: ChatBody, tokenizer: Any, prompt: list[int]) -> int:
    messages = body.template_messages()
    n = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if n == 0:
        return 0
    other = {"role": "user", "content": ""}
    alone = chat_tokens(body, tokenizer, [*messages[:n], other], add_generation_prompt=False)
    return common_prefix([alone, prompt])


def _thoughts_start(tokenizer: Any, prompt: list[int]) -> int:
    if not tokenizer.has_thinking:
        return len(prompt) - 1
    start = tokenizer.rfind_think_start(prompt, start=len(prompt) - TAIL)
    return len(prompt) - 1 if start < 0 else start
