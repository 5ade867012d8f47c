"""Token ids of the prompts of data sets, and where their documents end."""

from __future__ import annotations

from typing import Any

from ..chat.common_prefix import common_prefix
from ..engine.generate import encode_prompt
from ..errors import SnapKVError
from ..models.length import trained_length

LEAST = 64  # tokens of a text
OTHER = "Why?"  # another question, to see where a document ends


def plain(tokenizer, text: str) -> list[int]:
    """The text itself, with the special tokens that the tokenizer adds."""
    return encode_prompt(tokenizer, text).tolist()  # type: ignore[return-value]


def chat_text(tokenizer, *turns: str) -> str:
    """A conversation up to where its next answer begins: what user and model say in turn, in the chat template."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, tokenize=False
    )


def chat(tokenizer, text: str, ending: str = "") -> list[int]:
    """A user's message in the chat template, with what the answer begins with; the text itself without a template."""
    if not tokenizer.has_chat_template:
        return plain(tokenizer, text + ending)
    return tokenizer.encode(chat_text(tokenizer, text) + ending, add_special_tokens=False)


def in_two(
    tokenizer, document: str, question: str, ending: str = "", raw_ending: str = ""
) -> tuple[list[int], int]:
    """A document and a question in one message, encoded apart; and the document's tokens.

    Args:
        ending: what the answer begins with.
        raw_ending: what stands before that if there is no chat template.
    """
    if tokenizer.has_chat_template:
        mark = "#" * (len(document) + len(question) + 10)
        made = chat_text(tokenizer, document + mark + question)
        before, after = made.split(mark)
        first = tokenizer.encode(before, add_special_tokens=False)
    else:
        first, after = plain(tokenizer, document), question + raw_ending
    rest = tokenizer.encode(after + ending, add_special_tokens=False)
    return first + rest, len(first)


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Tokens that a prompt begins with whatever is asked, by other prompts about the same document; never all."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))


def cut_middle(tokenizer, text: str, most: int | None) -> str:
    """The text without its middle, if it has more than `most` tokens: its first half of them and its last."""
    tokens = tokenizer.encode(text)
    if most is None or len(tokens) <= most:
        return text
    half = max(1, most // 2)
    first, last = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:half], tokens[-half:])
    )
    return first + last


def left(room: int | None, taken: int) -> int | None:
    """Tokens left for a text beside those of the answer and the template.

    Raises:
        SnapKVError: there are hardly any.
    """
    if room is not None and room - taken < LEAST:
        raise SnapKVError(
            f"{room} tokens leave no room for a prompt: its template and answer take {taken}, so give a greater "
            "--length or another model"
        )
    return None if room is None else room - taken


def room(model: Any, length: int | None) -> int | None:
    """Tokens that a prompt and its answer may have: `length`, or what the model was trained to; None: unknown."""
    return trained_length(model) if length is None else length
