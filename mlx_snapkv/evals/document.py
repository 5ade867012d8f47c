"""Documents with questions, as the evaluations ask them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..chat.common_prefix import common_prefix

Place = dict[str, Any]  # a document's `task`, `length` (a number, or None) and `document`, and more


@dataclass(frozen=True)
class Question:
    """A document with a question, and the judgement of its answer.

    Attributes:
        prompt: token ids.
        expected: what a right answer has, for the records.
        score: of an answer's text as it was decoded, 0 to 1.
        max_tokens: of the answer.
    """

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int


@dataclass(frozen=True)
class Document:
    """A document's questions.

    Attributes:
        n_shared: tokens that all prompts begin with, whatever is asked: the document. At least one, and fewer than any
            prompt has.
    """

    questions: list[Question]
    n_shared: int


class Dataset(Protocol):
    """Documents, each with its place.

    Attributes:
        lengths: tokens of the prompts, where all are made to have them; else none.
    """

    tokenizer: Any

    @property
    def lengths(self) -> list[int]: ...

    def setting(self) -> dict[str, Any]:
        """What the prompts depend on besides the tokenizer, as a JSON object with the `task`."""

    def __iter__(self) -> Iterator[tuple[Place, Document]]: ...

    def __len__(self) -> int: ...


def n_shared(prompt: list[int], *others: list[int]) -> int:
    """Tokens that a prompt begins with whatever is asked, by other prompts about the same document; never all."""
    return max(1, min(common_prefix([prompt, *others]), len(prompt) - 1))
