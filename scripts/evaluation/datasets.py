"""Documents, and the questions that evaluations ask about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_snapkv.chat.prompts import common_prefix
from mlx_snapkv.measure.records import Record


@dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        prompt: token ids of document and question.
        expected: what a right answer contains, for the record.
        score: returns the score of an answer's text, 0 to 1.
        max_tokens: limit for the answer, `begun` included.
        begun: the first tokens of every answer, whatever the model predicts. They are not scored.
    """

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int
    begun: Sequence[int] = ()


@dataclass(frozen=True)
class Document:
    """Questions about one document; their prompts share their first `n_shared` tokens, at least one and never all."""

    questions: list[Question]
    n_shared: int


@dataclass(frozen=True)
class Dataset:
    """Documents that are made when they are needed.

    Attributes:
        setting: what the prompts depend on besides the tokenizer, as a JSON object with the `task`.
        places: for each document its `task`, `length` (or None), `document` and more, the arguments of `make`.
        make: makes a document.
    """

    tokenizer: Any
    setting: dict[str, Any]
    places: Sequence[Record]
    make: Callable[[Record], Document]


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Return how many first tokens a prompt shares with others about its document: at least one, never all."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))
