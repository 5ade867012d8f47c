"""What stands around a text in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import SnapKVError, brief

MARK = "THE TEXT STANDS HERE"


@dataclass(frozen=True)
class Frame:
    """Token ids around a text.

    Attributes:
        start: special tokens that a text by itself begins with.
        before: what a prompt about it begins with.
        after: the question, and the end of that prompt.
    """

    start: list[int]
    before: list[int]
    after: list[int]


def frame_of(tokenizer: Any, question: str | None) -> Frame:
    """Of a text with a question behind it, in the chat template if there is one; of a text alone if nothing is asked.

    Raises:
        SnapKVError: the template fails, or changes what the user says.
    """
    start = tokenizer.encode("")
    if question is None:
        return Frame(start, start, [])
    if not tokenizer.has_chat_template:
        after = tokenizer.encode(f"\n\n{question}\n", add_special_tokens=False)
        return Frame(start, start, after)
    parts = around(tokenizer, f"\n\n{question}")
    return Frame(start, *(tokenizer.encode(part, add_special_tokens=False) for part in parts))


def around(tokenizer: Any, ending: str = "") -> tuple[str, str]:
    """What the chat template has before what the user says, and from its `ending` on.

    Raises:
        SnapKVError: the template fails, or changes what the user says.
    """
    messages = [{"role": "user", "content": f"{MARK}{ending}"}]
    try:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
        before, after = prompt.split(MARK)
    except Exception as error:  # templates are code of the model's authors
        raise SnapKVError(f"the chat template failed: {brief(error)}") from error
    return before, after
