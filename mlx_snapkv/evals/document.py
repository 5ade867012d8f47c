"""Documents with questions, as the evaluations ask them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..chat.prompts import common_prefix

Place = dict[str, Any]  # a document's `task`, `length` (a number, or None) and `document`, and more


@dataclass(frozen=True)
class Question:
    """A document with a question: the prompt's token ids, and how an answer is scored.

    Attributes:
        expected: what a right answer contains, for the records.
        score: 0 to 1, of an answer's text as it was decoded.
        max_tokens: of the answer.
    """

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int


@dataclass(frozen=True)
class Document:
    """A document's questions, whose prompts share their first `n_shared` tokens: at least one, never all."""

    questions: list[Question]
    n_shared: int


class Dataset(Protocol):
    """Documents, each with its place; `lengths` are those of the prompts where all are made to have them."""

    tokenizer: Any

    @property
    def lengths(self) -> list[int]: ...

    def setting(self) -> dict[str, Any]:
        """What the prompts depend on besides the tokenizer, as a JSON object with the `task`."""

    def __iter__(self) -> Iterator[tuple[Place, Document]]: ...

    def __len__(self) -> int: ...


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Tokens that a prompt shares with others about the same document: at least one, never all of them."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))
