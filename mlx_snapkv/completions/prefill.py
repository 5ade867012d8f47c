"""A prefill: an assistant's message at the end of a chat, with which the answer goes on."""

from typing import Any

from ..errors import SnapKVError
from .chat_template import apply_template
from .messages import Message, whole

ANSWER_MARK = "THE-ANSWER-GOES-ON-HERE"
THOUGHTS_LEFT_OUT = "the assistant's thoughts at the end are left out: only its text is continued"


def without_empty(turns: list[Message]) -> tuple[list[Message], list[str]]:
    """Turns without an assistant's that says nothing at the end, and what is left out with it."""
    *before, last = turns or [Message("user")]
    if not before or last.role != "assistant" or last.text.strip() or last.calls:
        return turns, []
    return before, [THOUGHTS_LEFT_OUT] if last.reasoning else []


def prefill_of(turns: list[Message]) -> str:
    """The text that an answer goes on with; none behind calls, after which the assistant begins anew."""
    last = turns[-1] if turns else Message("user")
    continues = last.role == "assistant" and last.text.strip() and not last.calls
    return whole(last.text) if continues else ""


def continued_text(tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """The chat up to the last word of its last message, whatever the template strips off a message or puts behind it.

    Where a template leaves that message out or refuses it, it stands behind what begins an answer, its thoughts ended.
    """

    def text(given: list[dict[str, Any]], opens: bool) -> Any:
        how = options | {"add_generation_prompt": opens, "tokenize": False}
        return apply_template(tokenizer, given, **how)

    *before, last = messages
    refusal = SnapKVError("the chat template leaves out the assistant's message at the end")
    try:
        whole = text([*before, last | {"content": last["content"] + ANSWER_MARK}], False)
        if ANSWER_MARK in whole:
            return whole[: whole.rfind(ANSWER_MARK)]
    except SnapKVError as error:
        refusal = error
    if not before:
        raise refusal
    head = text(before, True)
    if tokenizer.has_thinking and thinks_at_end(head, tokenizer):
        head += f"{tokenizer.think_end}\n\n"
    return head + last["content"]


def thinks_at_end(text: str, tokenizer) -> bool:
    """Whether a text ends within thoughts, of a model that thinks."""
    return text.rfind(tokenizer.think_start) > text.rfind(tokenizer.think_end)
