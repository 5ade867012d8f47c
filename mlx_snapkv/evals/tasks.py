"""The tasks that are made here: `needle`, `lines` and `suite`.

Needle in a haystack: a fact in a long document (Kamradt, "Needle In A Haystack: Pressure Testing LLMs", 2023; SnapKV's
section 4.1). The facts are those of `demo/documents.py`: invented values of several tokens, which no model can guess.

Lines (LongEval's: Li et al., "How Long Can Open-Source LLMs Truly Promise on Context Length?", 2023): they differ in a
name and a number only, so a policy that keeps part of a number shows. SnapKV's ablation of pooling.

Suite: the tasks of `demo/tasks.py`, which tell policies apart, with many questions about each document.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..demo import tasks as suite_tasks
from ..demo.documents import fact_sentence, filler_sentence, make_facts, make_subject
from ..demo.questions import contains, question_prompt, token_counter
from ..errors import SnapKVError
from ..inspecting.sentences import sentences_of
from .document import Document, Place, Question, n_shared
from .tables import Page

RETRIEVAL = Page(
    "Retrieval", "Shares of right answers: an answer is right if it contains the exact value."
)
SUITE = Page(
    "Tasks that tell policies apart",
    "Shares of right answers: an answer is right if it is the value and nothing else.",
)
HAYSTACK_TOKENS, SUITE_TOKENS = 24, 60  # of an answer
QUESTION_TOKENS = 60  # of the suite's prompts, template included


@dataclass(frozen=True)
class Hidden:
    """What a document hides and is asked for.

    Attributes:
        parts: depths, 0 to 1, and the text that goes there, between two pieces of filler.
        filler: pieces without end, each with white space behind it.
        value: what a right answer contains.
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
        for length, depth, i in itertools.product(self.lengths, depths, range(self.n_documents)):
            place = {"task": self.task, "length": length, "document": f"{i} at {depth:g}"}
            rng = random.Random(f"{self.seed} {place}")
            yield place | {"depth": depth}, self._document(length, self.hide(rng, depth))

    def _document(self, length: int, hidden: Hidden) -> Document:
        def prompt_of(text: str, question: str = hidden.question) -> list[int]:
            return question_prompt(self.tokenizer, hidden.introduction + text, question)

        text = fill(length, hidden.parts, hidden.filler, lambda t: len(prompt_of(t)))
        prompt = prompt_of(text)
        score = lambda answer: float(contains(answer, hidden.value))  # noqa: E731
        asked = Question(prompt, hidden.value, score, HAYSTACK_TOKENS)
        return Document([asked], n_shared(prompt, prompt_of(text, "Why?")))


def fill(
    length: int,
    hidden: Sequence[tuple[float, str]],
    filler: Iterator[str],
    n_prompt: Callable[[str], int],
) -> str:
    """The longest document with `hidden` in it whose prompt has at most `length` tokens, as `n_prompt` counts them.

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
# The embedded models know one kind of sentence only: LongEval's words are too hard even for their full cache.
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
        words, pairs = self.wording, self._names_and_numbers(rng)
        name, number = next(pairs)
        lines = (words.line.format(name=name, number=number) for name, number in pairs)
        asked = [(depth, words.line.format(name=name, number=number))]
        return Hidden(asked, lines, words.question.format(name=name), number, words.introduction)

    def _names_and_numbers(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        """Without end; each name only once."""
        seen: set[str] = set()
        low = 10 ** (self.wording.digits - 1)
        while True:
            name = make_subject(rng)
            while name in seen:
                name = make_subject(rng, made_up=1.0)
            seen.add(name)
            joined = name.replace(" ", "-") if self.wording is LONGEVAL else name
            yield joined, str(rng.randrange(low, 10 * low))


@dataclass(frozen=True)
class Suite:
    """Documents of every task and length, with at most `n_questions` about each."""

    tokenizer: Any
    tasks: Sequence[str]
    lengths: Sequence[int]
    n_documents: int
    n_questions: int
    seed: int = 0

    def setting(self) -> dict[str, Any]:
        return {"task": "suite", "seed": self.seed}

    def __len__(self) -> int:
        return len(self.lengths) * len(self.tasks) * self.n_documents

    def __iter__(self) -> Iterator[tuple[Place, Document]]:
        for length, task, i in itertools.product(self.lengths, self.tasks, range(self.n_documents)):
            yield {"task": task, "length": length, "document": i}, self._document(task, length, i)

    def _document(self, task: str, length: int, number: int) -> Document:
        rng = random.Random(f"{self.seed} {task} {length} {number}")
        n_tokens = length - QUESTION_TOKENS
        text, chosen = suite_tasks.make_task(task, rng, n_tokens, token_counter(self.tokenizer))
        asked = [self._question(text, question) for question in chosen[: self.n_questions]]
        other = question_prompt(self.tokenizer, text, "Why?")
        return Document(asked, n_shared(other, *(question.prompt for question in asked)))

    def _question(self, text: str, asked: suite_tasks.Question) -> Question:
        prompt = question_prompt(self.tokenizer, text, asked.question)
        score = lambda answer: float(answer.strip() == asked.value)  # noqa: E731
        return Question(prompt, asked.value, score, SUITE_TOKENS)
