"""Questions that share no content word with the fact that answers them, in heterogeneous text.

Each fact in `associations.json` needs one association, such as account book and ledger. The questions follow NoLiMa
(arXiv:2502.05167): if a question's words are in the text, it can be answered by looking for them.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mlx_snapkv.measure.records import Record
from mlx_snapkv.measure.texts import digest_of, template_around

from .datasets import Dataset, Document, Question
from .haystack import Haystack
from .tasks import contains, filled

DATA = Path(__file__).with_name("associations.json")
INTRODUCTION = "Here are some papers from a desk.\n\n"
ASKED = "\n\nQuestion about the papers above: {} Answer in a few words."
ASKED_LATE = (
    "\n\nFirst describe in five sentences what kinds of papers are above. "
    "Then answer this question in a few words: {}"
)
CORRECTION = "Correction of an earlier note: {}"
ANSWER_TOKENS = 24

LATE = "late"  # variant whose questions are answered at the end of a long answer
# Number of facts per text, by variant. A contradicting fact takes two sentences.
VARIANTS = {"one": 1, "several": 8, "contradicting": 4, LATE: 4}


@dataclass(frozen=True)
class Fact:
    """A sentence with a placeholder for a value, and the question that this value answers.

    Attributes:
        topic: topic of the fact, for readers of the file.
        text: the sentence, with `{}` for the value.
        question: a question that shares no content word with the sentence.
        answer: accepted spellings of the value. The first one is in the text.
        before: earlier value, which the variant "contradicting" states before the correction.
    """

    topic: str
    text: str
    question: str
    answer: list[str]
    before: list[str]

    @property
    def sentence(self) -> str:
        """Return the sentence with its value."""
        return self.text.format(self.answer[0])

    @property
    def values(self) -> list[str]:
        """Return all spellings of the value and of the earlier value."""
        return [*self.answer, *self.before]


@cache
def facts() -> list[Fact]:
    """Return the facts in the file."""
    return [Fact(**row) for row in json.loads(DATA.read_text(encoding="utf-8"))["facts"]]


@cache
def begun() -> str:
    """Return the start of every late answer: five sentences that are true of every text."""
    return " ".join(json.loads(DATA.read_text(encoding="utf-8"))["begun"])


def score(fact: Fact, answer: str) -> float:
    """Return 1 if an answer names the fact's value and no other fact's value, else 0."""
    named = {v for each in facts() for v in each.values if contains(answer.lower(), v.lower())}
    return float(bool(named) and named <= set(fact.answer))


def chosen(variant: str, document: int, seed: int) -> list[Fact]:
    """Return a text's facts. A variant's texts take all facts in turn, in an order drawn from the seed."""
    n = VARIANTS[variant]
    order = random.Random(f"{seed} {variant}").sample(facts(), len(facts()))
    turns = itertools.cycle(order)
    return list(itertools.islice(turns, document * n, (document + 1) * n))


def sentences(variant: str, own: Sequence[Fact], rng: random.Random) -> list[tuple[float, str]]:
    """Return the sentences to hide and their depths (0 to 1), evenly spread and in random order."""
    if variant != "contradicting":
        hidden = [fact.sentence for fact in rng.sample(own, len(own))]
    else:
        hidden = [fact.text.format(fact.before[0]) for fact in rng.sample(own, len(own))]
        hidden += [CORRECTION.format(fact.sentence) for fact in rng.sample(own, len(own))]
    if len(hidden) == 1:
        return [(rng.random(), hidden[0])]
    return [((i + 0.5) / len(hidden), sentence) for i, sentence in enumerate(hidden)]


def associations(
    tokenizer: Any,
    haystack: Haystack,
    variants: Sequence[str],
    lengths: Sequence[int],
    n_documents: Sequence[int],
    seed: int = 0,
) -> Dataset:
    """Return a dataset with texts for every variant and length.

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        haystack: paragraphs between the facts.
        variants: names of `VARIANTS`.
        lengths: maximum numbers of tokens in prompt and answer together.
        n_documents: number of texts per variant, for each length.
        seed: seed for all random choices.
    """
    before, after = template_around(tokenizer)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    forced = encode(begun())

    def make(place: Record) -> Document:
        rng = random.Random("{} {task} {length} {document}".format(seed, **place))
        own = chosen(place["task"], place["document"], seed)
        parts = [(d, haystack.hiding(rng, s)) for d, s in sentences(place["task"], own, rng)]
        form, first = (ASKED_LATE, forced) if place["task"] == LATE else (ASKED, [])
        tails = [encode(form.format(fact.question) + after) for fact in own]
        limit = len(first) + ANSWER_TOKENS
        most = max(map(len, tails)) + limit

        def head(text: str) -> list[int]:
            return encode(before + INTRODUCTION + text)

        found = filled(
            place["length"], parts, haystack.paragraphs(rng), lambda text: len(head(text)) + most
        )
        read = head(found)
        questions = [
            Question(read + tail, _expected(fact), partial(score, fact), limit, first)
            for fact, tail in zip(own, tails)
        ]
        return Document(questions, len(read))

    places = [
        {"task": variant, "length": length, "document": i}
        for length, n in zip(lengths, n_documents, strict=True)
        for variant in variants
        for i in range(n)
    ]
    data = json.dumps(haystack.texts) + DATA.read_text(encoding="utf-8")
    setting = {"task": "associations", "seed": seed, "data": digest_of(data)}
    return Dataset(tokenizer, setting, places, make)


def _expected(fact: Fact) -> dict[str, Any]:
    """Return the question and the fact, for the record."""
    return {"question": fact.question, "fact": fact.sentence}
