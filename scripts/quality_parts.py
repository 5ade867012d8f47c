"""The sections of docs/quality.md: which ways are asked what, of which model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quality_ways import Line, keydiff_kernels, lines, longer, masks, needles, snapkv_options

from mlx_snapkv.demo.documents import make_document, make_facts
from mlx_snapkv.demo.questions import question_prompt, token_counter
from mlx_snapkv.evals.answering import KNOWN, LATER
from mlx_snapkv.evals.document import Document, Question, n_shared
from mlx_snapkv.evals.suite import MAX_TOKENS, QUESTION_TOKENS, Suite

SEED, LENGTH = 7_000_000, 2048
TASKS = ("single", "look-alikes", "overwritten", "several", "three-links")
SIX_DIGITS = "six digits"


@dataclass(frozen=True)
class Part:
    """A section.

    Attributes:
        lines: the first of them is what the others are compared with.
        length: of the prompts, in tokens.
        documents: of each task; questions: about each.
    """

    model: str
    setting: str
    lines: list[Line]
    tasks: Sequence[str] = TASKS
    length: int = LENGTH
    documents: int = 5
    questions: int = 4

    def documents_of(self, tokenizer) -> Suite:
        made = SixDigits if self.tasks == (SIX_DIGITS,) else Suite
        size = self.documents, self.questions
        return made(tokenizer, self.tasks, [self.length], *size, SEED)


PARTS = {
    "known": Part("demo-tasks", KNOWN, lines(KNOWN)),
    "later": Part("demo-tasks", LATER, lines(LATER)),
    "needles": Part("demo", KNOWN, needles(), (SIX_DIGITS,), documents=25),
    "options": Part("demo-tasks", KNOWN, snapkv_options()),
    "kernels": Part("demo-tasks", LATER, keydiff_kernels()),
    "masks": Part("demo-tasks", KNOWN, masks()),
    "two_links": Part("demo-tasks", KNOWN, longer(), ("two-links",), documents=25),
    "hybrid": Part("demo-qwen3-next", KNOWN, needles(), (SIX_DIGITS,), documents=25),
    "longer": Part("demo-tasks", KNOWN, longer(), (*TASKS, "two-links"), 2 * LENGTH),
}


class SixDigits(Suite):
    """Access codes of six digits, all of one document asked for."""

    def setting(self) -> dict[str, Any]:
        return {"task": SIX_DIGITS, "seed": self.seed}

    def document(self, task: str, length: int, number: int) -> Document:
        rng = random.Random(f"{self.seed} {task} {length} {number}")
        facts = make_facts(rng, self.n_questions, attributes=["access code"])
        count = token_counter(self.tokenizer)
        text = make_document(rng, facts, length - QUESTION_TOKENS, count)
        prompts = [question_prompt(self.tokenizer, text, fact.question) for fact in facts]
        asked = [
            Question(prompt, fact.value, partial(_equal, fact.value), MAX_TOKENS)
            for prompt, fact in zip(prompts, facts)
        ]
        return Document(asked, n_shared(*prompts))


def _equal(value: str, answer: str) -> float:
    return float(answer.strip() == value)
