"""Tasks that tell policies apart: documents of `demo/tasks.py` with many questions each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..demo.questions import question_prompt, token_counter
from ..demo.tasks import make_task
from .document import Document, Place, Question, n_shared
from .score_tables import Page

MAX_TOKENS = 60  # of an answer
QUESTION_TOKENS = 60  # of the prompt, template included

PAGE = Page(
    "Tasks that tell policies apart",
    "Shares of right answers: an answer is right if it is the value and nothing else.",
)


@dataclass(frozen=True)
class Suite:
    """Documents of every task and length.

    Attributes:
        n_questions: asked about each document, at most; some tasks have fewer.
    """

    tokenizer: Any
    tasks: Sequence[str]
    lengths: Sequence[int]
    n_documents: int
    n_questions: int
    seed: int = 0

    def setting(self) -> dict[str, Any]:
        """What the prompts depend on besides the tokenizer."""
        return {"task": "suite", "seed": self.seed}

    def document(self, task: str, length: int, number: int) -> Document:
        rng = random.Random(f"{self.seed} {task} {length} {number}")
        n_tokens = length - QUESTION_TOKENS
        text, questions = make_task(task, rng, n_tokens, token_counter(self.tokenizer))
        chosen = questions[: self.n_questions]
        prompts = [question_prompt(self.tokenizer, text, q.question) for q in chosen]
        other = question_prompt(self.tokenizer, text, "Why?")
        asked = [
            Question(prompt, q.value, partial(_is_value, q.value), MAX_TOKENS)
            for prompt, q in zip(prompts, chosen)
        ]
        return Document(asked, n_shared(other, *prompts))

    def __len__(self) -> int:
        return len(self.lengths) * len(self.tasks) * self.n_documents

    def __iter__(self) -> Iterator[tuple[Place, Document]]:
        for length in self.lengths:
            for task in self.tasks:
                for number in range(self.n_documents):
                    place = {"task": task, "length": length, "document": number}
                    yield place, self.document(task, length, number)


def _is_value(value: str, answer: str) -> float:
    return float(answer.strip() == value)
