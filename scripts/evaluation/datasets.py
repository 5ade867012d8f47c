"""Documents, and the questions that evaluations ask about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_snapkv.engine.token_ids import common_prefix
from mlx_snapkv.measure.records import Record


@dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        prompt: token ids of document and question.
        expected: content of a right answer, for the record.
        score: returns the score (0 to 1) of an answer's text.
        max_tokens: maximum number of answer tokens, including `begun`.
        begun: first tokens of every answer, regardless of the model's predictions. They are not scored.
    """

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int
    begun: Sequence[int] = ()


@dataclass(frozen=True)
class Document:
    """Questions about one document. Their prompts share the first `n_shared` tokens: at least one, never all."""

    questions: list[Question]
    n_shared: int


@dataclass(frozen=True)
class Dataset:
    """Documents that are generated on demand.

    Attributes:
        setting: what the prompts depend on in addition to the tokenizer, as a JSON object with the `task`.
        places: for each document, a record with its `task`, `length` (or None), `document` (its number or name) and
            whatever else `make` needs.
        make: generates the document of a place.
    """

    tokenizer: Any
    setting: dict[str, Any]
    places: Sequence[Record]
    make: Callable[[Record], Document]


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Return how many leading tokens a prompt shares with others about its document: at least one, never all."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))
