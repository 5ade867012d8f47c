"""Documents of every length with what is asked hidden at every depth: the grid of `needle` and `lines`."""

from __future__ import annotations

import bisect
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..demo.questions import contains, question_prompt
from ..errors import SnapKVError
from .document import Document, Place, Question, n_shared
from .score_tables import Page

MAX_TOKENS = 24  # of an answer
PAGE = Page(
    "Retrieval", "Shares of right answers: an answer is right if the exact value stands in it."
)


@dataclass(frozen=True)
class Hidden:
    """What is hidden in a document, and asked for.

    Attributes:
        parts: depths, 0 to 1 of the document's pieces, and the text that goes there, between two of them.
        filler: pieces without end, each with white space behind it.
        value: what a right answer has.
    """

    parts: Sequence[tuple[float, str]]
    filler: Iterator[str]
    question: str
    value: str
    introduction: str = ""


@dataclass(frozen=True)
class Haystack(ABC):
    """Documents with one question each; the same fields always give the same ones.

    Attributes:
        lengths: tokens of the prompts, at most.
        n_depths: evenly from the start, 0, to the end, 1; a single one is the middle.
        n_documents: of each length and depth.
    """

    task: ClassVar[str]

    tokenizer: Any
    lengths: Sequence[int]
    n_depths: int = 5
    n_documents: int = 1
    seed: int = 0

    @abstractmethod
    def hide(self, rng: random.Random, depth: float) -> Hidden:
        """What one document hides, that which is asked for at `depth`."""

    def setting(self) -> dict[str, Any]:
        return {"task": self.task, "seed": self.seed}

    def __len__(self) -> int:
        return len(self.lengths) * self.n_depths * self.n_documents

    def __iter__(self) -> Iterator[tuple[Place, Document]]:
        """Raises: SnapKVError: a length has no room for the question."""
        last = self.n_depths - 1
        depths = [round(i / last, 4) for i in range(self.n_depths)] if last else [0.5]
        for length, depth, number in itertools.product(
            self.lengths, depths, range(self.n_documents)
        ):
            place = {"task": self.task, "length": length, "document": f"{number} at {depth:g}"}
            rng = random.Random(f"{self.seed} {place}")
            yield place | {"depth": depth}, self._document(length, self.hide(rng, depth))

    def _document(self, length: int, hidden: Hidden) -> Document:
        def prompt_of(text: str, question: str = hidden.question) -> list[int]:
            return question_prompt(self.tokenizer, hidden.introduction + text, question)

        text = fill(length, hidden.parts, hidden.filler, lambda t: len(prompt_of(t)))
        prompt = prompt_of(text)
        asked = Question(prompt, hidden.value, partial(_has, hidden.value), MAX_TOKENS)
        return Document([asked], n_shared(prompt, prompt_of(text, "Why?")))


def _has(value: str, answer: str) -> float:
    return float(contains(answer, value))


def fill(
    length: int,
    hidden: Sequence[tuple[float, str]],
    filler: Iterator[str],
    n_prompt: Callable[[str], int],
) -> str:
    """The longest document with `hidden` in it whose prompt has at most `length` tokens.

    Args:
        hidden, filler: as of `Hidden`.
        n_prompt: tokens of a document's prompt.

    Raises:
        SnapKVError: not even one piece of filler has room.
    """
    pieces = [next(filler)]
    least = n_prompt(hide(pieces, hidden))
    if least > length:
        raise SnapKVError(f"--length must be at least {least} for this question, got {length}")
    while n_prompt(hide(pieces, hidden)) <= length:
        pieces += itertools.islice(filler, len(pieces))
    numbers = range(1, len(pieces) + 1)
    n = bisect.bisect_right(numbers, length, key=lambda n: n_prompt(hide(pieces[:n], hidden)))
    return hide(pieces[:n], hidden)


def hide(pieces: Sequence[str], hidden: Sequence[tuple[float, str]]) -> str:
    """The pieces with each hidden text at its depth among them; two of the same depth in the order given."""
    parts = list(pieces)
    for i, (depth, text) in enumerate(sorted(hidden, key=lambda part: part[0])):
        parts.insert(round(depth * len(pieces)) + i, text)
    return "".join(parts).strip()
