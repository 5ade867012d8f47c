"""Lines that differ only in a name and a number, and a question for one of them: the task of SnapKV's pooling ablation.

The task is LongEval's (Li et al., "How Long Can Open-Source LLMs Truly Promise on Context Length?", 2023), with
numbers of five digits. Every line looks like the right one, so a policy that keeps part of a number shows.

The embedded models know one kind of sentence only and can't do the task in LongEval's words, even with the
full cache. For them the lines are facts of `demo/documents.py` with one attribute, and numbers of eight digits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..demo.documents import make_subject
from .haystack import Haystack, Hidden


@dataclass(frozen=True)
class Wording:
    """How lines and questions are put; `line` and `question` have places for a name and a number."""

    name: str
    introduction: str
    line: str
    question: str
    digits: int


LONGEVAL = Wording(
    "longeval",
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n",
    "line {name}: REGISTER_CONTENT is <{number}>\n",
    "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number.",
    digits=5,
)
FACTS = Wording(
    "facts",
    "",
    "The account number of the {name} is {number}.\n",
    "What is the account number of the {name}?",
    digits=8,
)


@dataclass(frozen=True)
class Lines(Haystack):
    """One line of a long list is asked for."""

    task: ClassVar[str] = "lines"

    wording: Wording = LONGEVAL

    def setting(self) -> dict[str, Any]:
        return super().setting() | {"wording": self.wording.name}

    def hide(self, rng: random.Random, depth: float) -> Hidden:
        words, lines = self.wording, self._lines(rng)
        name, number = next(lines)
        asked = words.line.format(name=name, number=number)
        others = (words.line.format(name=name, number=number) for name, number in lines)
        question = words.question.format(name=name)
        return Hidden([(depth, asked)], others, question, number, words.introduction)

    def _lines(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        """Names, each only once, and numbers, without end."""
        seen: set[str] = set()
        low = 10 ** (self.wording.digits - 1)
        while True:
            name = make_subject(rng)
            while name in seen:
                name = make_subject(rng, made_up=1.0)
            seen.add(name)
            joined = name.replace(" ", "-") if self.wording is LONGEVAL else name
            yield joined, str(rng.randrange(low, 10 * low))
