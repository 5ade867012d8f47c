"""Documents with questions, as the evaluations ask them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_snapkv.chat.prompts import common_prefix
from mlx_snapkv.measure.records import Record


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, what a right answer contains, and the score (0 to 1) of an answer's text."""

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int


@dataclass(frozen=True)
class Document:
    """A document's questions, whose prompts share their first `n_shared` tokens: at least one, never all."""

    questions: list[Question]
    n_shared: int


@dataclass(frozen=True)
class Dataset:
    """Documents, each of which is made when it is asked about."""

    tokenizer: Any
    # What the prompts depend on besides the tokenizer, as a JSON object with the `task`.
    setting: dict[str, Any]
    places: Sequence[Record]  # each document's `task`, `length` (or None), `document`, and more
    make: Callable[[Record], Document]


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Tokens that a prompt shares with others about the same document: at least one, never all of them."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))
