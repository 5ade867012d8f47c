"""Needle in a haystack: a fact hidden at a depth of a long document, and asked for at its end.

Kamradt, "Needle In A Haystack: Pressure Testing LLMs", 2023; SnapKV's section 4.1. The facts are those of
`demo/documents.py`: invented values of several tokens, which no model can guess and of which no part will do.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..demo.documents import fact_sentence, filler_sentence, make_facts
from ..inspecting.sentences import sentences_of
from .haystack import Haystack, Hidden


@dataclass(frozen=True)
class Needle(Haystack):
    """One fact is asked for; the other `needles - 1` are spread over the document.

    Attributes:
        text: the filler, cut to length between sentences and repeated if it is too short; by default the sentences
            that the embedded models were trained on.
    """

    task: ClassVar[str] = "needle"

    needles: int = 1
    text: str | None = None

    def setting(self) -> dict[str, Any]:
        filler = "synthetic"
        if self.text is not None:
            filler = "sha256 " + hashlib.sha256(self.text.encode()).hexdigest()[:16]
        return super().setting() | {"needles": self.needles, "haystack": filler}

    def hide(self, rng: random.Random, depth: float) -> Hidden:
        facts = make_facts(rng, self.needles)
        sentences = [fact_sentence(fact, rng) + " " for fact in facts]
        n = self.needles - 1
        # The others are in the middles of `n` equal parts of the document.
        depths = [depth, *((i + 0.5) / n for i in range(n))]
        filler = synthetic(rng) if self.text is None else repeated(self.text)
        return Hidden(list(zip(depths, sentences)), filler, facts[0].question, facts[0].value)


def synthetic(rng: random.Random) -> Iterator[str]:
    """Ordinary sentences, without end."""
    while True:
        yield filler_sentence(rng) + " "


def repeated(text: str) -> Iterator[str]:
    """The sentences of a text, from the start again when they run out."""
    return itertools.cycle(list(sentences_of(text.strip() + "\n\n")))
