"""Questions that share no content word with the fact that answers them, in heterogeneous text.

Each fact in `associations.json` needs one association, such as account book and ledger. The questions follow NoLiMa
(arXiv:2502.05167), because a question that shares words with the fact can be answered by looking for these words.
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
    all_values = [value for any_fact in facts() for value in any_fact.values]
    named_values = {value for value in all_values if contains(answer.lower(), value.lower())}
    return float(bool(named_values) and named_values <= set(fact.answer))


def facts_of_text(variant: str, document: int, seed: int) -> list[Fact]:
    """Return a text's facts. A variant's texts take all facts in turn, in an order drawn from the seed."""
    n_facts = VARIANTS[variant]
    shuffled_facts = random.Random(f"{seed} {variant}").sample(facts(), len(facts()))
    turns = itertools.cycle(shuffled_facts)
    start = document * n_facts
    return list(itertools.islice(turns, start, start + n_facts))


def depths_and_sentences(
    variant: str, text_facts: Sequence[Fact], rng: random.Random
) -> list[tuple[float, str]]:
    """Return the sentences to hide and their depths (0 to 1), evenly spread and in random order."""

    def shuffled() -> list[Fact]:
        return rng.sample(text_facts, len(text_facts))

    if variant != "contradicting":
        sentences = [fact.sentence for fact in shuffled()]
    else:
        sentences = [fact.text.format(fact.before[0]) for fact in shuffled()]
        sentences += [CORRECTION.format(fact.sentence) for fact in shuffled()]
    if len(sentences) == 1:
        return [(rng.random(), sentences[0])]
    return [((i + 0.5) / len(sentences), sentence) for i, sentence in enumerate(sentences)]


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
    late_answer_start = encode(begun())

    def make(place: Record) -> Document:
        rng = random.Random("{} {task} {length} {document}".format(seed, **place))
        text_facts = facts_of_text(place["task"], place["document"], seed)
        parts = [
            (depth, haystack.hiding(rng, sentence))
            for depth, sentence in depths_and_sentences(place["task"], text_facts, rng)
        ]
        is_late = place["task"] == LATE
        question_format = ASKED_LATE if is_late else ASKED
        first_tokens = late_answer_start if is_late else []
        suffixes = [encode(question_format.format(fact.question) + after) for fact in text_facts]
        n_reserved = max(map(len, suffixes)) + len(first_tokens) + ANSWER_TOKENS

        def encode_text(text: str) -> list[int]:
            return encode(before + INTRODUCTION + text)

        def n_prompt(text: str) -> int:
            return len(encode_text(text)) + n_reserved

        text = filled(place["length"], parts, haystack.paragraphs(rng), n_prompt)
        shared_tokens = encode_text(text)
        questions = [
            _question(fact, shared_tokens + suffix, first_tokens)
            for fact, suffix in zip(text_facts, suffixes)
        ]
        return Document(questions, len(shared_tokens))

    places = [
        {"task": variant, "length": length, "document": i}
        for length, n_texts in zip(lengths, n_documents, strict=True)
        for variant in variants
        for i in range(n_texts)
    ]
    data = json.dumps(haystack.texts) + DATA.read_text(encoding="utf-8")
    setting = {"task": "associations", "seed": seed, "data": digest_of(data)}
    return Dataset(tokenizer, setting, places, make)


def _question(fact: Fact, prompt: list[int], first_tokens: Sequence[int]) -> Question:
    """Return the question about a fact. Every answer begins with `first_tokens`."""
    return Question(
        prompt=prompt,
        expected={"question": fact.question, "fact": fact.sentence},
        score=partial(score, fact),
        max_tokens=len(first_tokens) + ANSWER_TOKENS,
        begun=first_tokens,
    )
