"""Needle in a haystack: a fact hidden at a depth of a long document, and asked for at its end.

Kamradt, "Needle In A Haystack: Pressure Testing LLMs", 2023; SnapKV's section 4.1. The facts are those of
`demo/documents.py`: invented values of several tokens, which no model can guess and of which no part will do.
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from ..demo.documents import fact_sentence, make_facts
from ..demo.questions import question_prompt, token_counter
from .grid import Cell, Question
from .haystack import fill, repeated, synthetic


@dataclass(frozen=True)
class Needle:
    """One fact is asked for; the other `needles - 1` are spread over the document.

    Attributes:
        haystack: the filler, cut to length between sentences and repeated if it is too short; by default the
            sentences that the embedded models were trained on.
    """

    tokenizer: Any
    seed: int = 0
    needles: int = 1
    haystack: str | None = None

    def setting(self) -> dict[str, Any]:
        filler = "synthetic"
        if self.haystack is not None:
            filler = "sha256 " + hashlib.sha256(self.haystack.encode()).hexdigest()[:16]
        return {"task": "needle", "seed": self.seed, "needles": self.needles, "haystack": filler}

    def ask(self, cell: Cell) -> Question:
        rng = random.Random(f"{self.seed} {cell}")
        facts = make_facts(rng, self.needles)
        sentences = [fact_sentence(fact, rng) + " " for fact in facts]
        n = self.needles - 1
        # The others are in the middles of `n` equal parts of the document.
        depths = [cell.depth, *((i + 0.5) / n for i in range(n))]
        prompt = fill(
            cell.length,
            list(zip(depths, sentences)),
            synthetic(rng) if self.haystack is None else repeated(self.haystack),
            token_counter(self.tokenizer),
            lambda document: question_prompt(self.tokenizer, document, facts[0].question),
        )
        return Question(prompt, facts[0].value)
