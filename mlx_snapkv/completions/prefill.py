"""Handle prefills, which are final assistant messages that the answer continues."""

from typing import Any

from ..errors import SnapKVError
from .chat_template import apply_template
from .contents import replace_surrogates_in
from .messages import Message

ANSWER_MARK = "THE-ANSWER-GOES-ON-HERE"
THOUGHTS_LEFT_OUT = "the assistant's thoughts at the end are left out: only its text is continued"


def without_empty_answer(turns: list[Message]) -> tuple[list[Message], list[str]]:
    """Remove a final assistant message that has no text and no calls. Return the turns, and notes for the client.

    A chat's only message is kept.
    """
    if len(turns) < 2:
        return turns, []
    *earlier, last = turns
    is_empty_answer = last.role == "assistant" and not last.text.strip() and not last.calls
    if not is_empty_answer:
        return turns, []
    notes = [THOUGHTS_LEFT_OUT] if last.reasoning else []
    return earlier, notes


def prefill_of(turns: list[Message]) -> str:
    """Return the text that the answer continues, or "".

    The answer continues the last message if it is from the assistant and has text but no calls.
    """
    if not turns:
        return ""
    last = turns[-1]
    has_only_text = last.text.strip() and not last.calls
    is_continued = last.role == "assistant" and has_only_text
    return replace_surrogates_in(last.text) if is_continued else ""


def continued_text(tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """Return the rendered chat up to the end of the last message's text.

    The last message is rendered with a mark at its end, and the rendered chat is cut at the mark. This removes what the
    template adds after a message, and keeps trailing whitespace that the template would strip.

    If the template omits or rejects a final assistant message, the message's text is appended to the generation prompt.
    If the generation prompt starts reasoning, the reasoning is closed first.

    Raises: SnapKVError: the template fails, or omits the chat's only message.
    """

    def render_text(chat: list[dict[str, Any]], add_generation_prompt: bool) -> Any:
        all_options = options | {"add_generation_prompt": add_generation_prompt, "tokenize": False}
        return apply_template(tokenizer, chat, **all_options)

    *earlier, last = messages
    refusal = SnapKVError("the chat template leaves out the assistant's message at the end")
    last_with_mark = last | {"content": last["content"] + ANSWER_MARK}
    try:
        text_with_mark = render_text([*earlier, last_with_mark], add_generation_prompt=False)
        if ANSWER_MARK in text_with_mark:
            text_before_mark, _, _ = text_with_mark.rpartition(ANSWER_MARK)
            return text_before_mark
    except SnapKVError as error:
        refusal = error
    if not earlier:
        raise refusal
    text = render_text(earlier, add_generation_prompt=True)
    starts_reasoning = tokenizer.has_thinking and ends_in_thoughts(text, tokenizer)
    if starts_reasoning:
        text += f"{tokenizer.think_end}\n\n"
    return text + last["content"]


def ends_in_thoughts(text: str, tokenizer) -> bool:
    """Return whether `text` ends inside unfinished reasoning. The tokenizer must have reasoning markers."""
    return text.rfind(tokenizer.think_start) > text.rfind(tokenizer.think_end)
