"""The tokens with which a conversation about one text begins, whatever is asked about it."""

from datetime import datetime

from ..chat.common_prefix import common_prefix
from ..errors import SnapKVError
from .prompt_text import encode

# Beginnings of questions: what their prompts share can be read before the question is known.
PROBES = ("Why", "1", "(", "\u4e2d", "\nand", " so")


def opening_tokens(
    tokenizer, text: str, system_prompt: str | None, today: datetime | None = None
) -> list[int]:
    """Token ids that start the prompt of every question about `text`.

    Raises:
        SnapKVError: the chat template fails, or puts the question first.
    """
    prompts = [conversation(tokenizer, text, q, system_prompt, today) for q in PROBES]
    shared = prompts[0][: common_prefix(prompts)]
    if not shared:
        raise SnapKVError("this model's chat template puts nothing before a question to be saved")
    return shared


def conversation(
    tokenizer, text: str, question: str, system_prompt: str | None, today: datetime | None
) -> list[int]:
    """Token ids of a whole prompt: a text and a question about it, as `generate` puts them together."""
    return encode(tokenizer, f"{text}\n\n{question}", system_prompt, False, today)
