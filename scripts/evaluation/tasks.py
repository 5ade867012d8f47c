"""The generated datasets `needle` and `suite`.

Needle in a haystack: a fact in a long document (Kamradt, "Needle In A Haystack: Pressure Testing LLMs", 2023; SnapKV's
section 4.1). The facts come from `mlx_snapkv/demo/documents.py`: invented values of several tokens, which no model can
guess.

Suite: the tasks of `suite_tasks.py`, which show differences between policies, with many questions per document.

The same arguments always generate the same documents.
"""

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_snapkv.demo.documents import fact_sentence, filler_sentence, make_facts
from mlx_snapkv.demo.questions import question_prompt, token_counter
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.records import Record
from mlx_snapkv.measure.sentences import sentences_of
from mlx_snapkv.measure.texts import digest_of

from . import suite_tasks
from .datasets import Dataset, Document, Question, n_shared
from .scores import scores_page

RETRIEVAL = scores_page("Retrieval", "An answer is right if it contains the exact value.")
ALONE = "An answer is right if it consists of the value and nothing else."
SUITE = scores_page("Tasks that tell policies apart", ALONE)
HAYSTACK_TOKENS, SUITE_TOKENS = 24, 60  # maximum answer tokens
QUESTION_TOKENS = 60  # tokens of a suite question, including the chat template


@dataclass(frozen=True)
class Grid:
    """Lengths and depths of the documents for `needle`. Each document has one question.

    Attributes:
        lengths: maximum prompt lengths in tokens.
        n_depths: number of depths, evenly spaced from 0 (start) to 1 (end). A single depth is the middle.
        n_documents: number of documents per length and depth.
    """

    lengths: Sequence[int]
    n_depths: int = 5
    n_documents: int = 1
    seed: int = 0

    def places(self, task: str) -> list[Record]:
        """Return a record for each document; see `Dataset`."""
        last = self.n_depths - 1
        depths = [round(i / last, 4) for i in range(self.n_depths)] if last else [0.5]
        each = itertools.product(self.lengths, depths, range(self.n_documents))
        return [
            {"task": task, "length": length, "document": f"{i} at {depth:g}", "depth": depth}
            for length, depth, i in each
        ]


def contains(answer: str, value: str) -> bool:
    """Return whether the answer contains the value as a whole word, not inside a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer) is not None


def filled(
    length: int,
    parts: Sequence[tuple[float, str]],
    filler: Iterator[str],
    n_prompt: Callable[[str], int],
) -> str:
    """Return the longest document whose prompt has at most `length` tokens.

    Args:
        length: maximum prompt length in tokens.
        parts: depth (0 to 1) and text of each part that the document must contain.
        filler: pieces of text for the rest.
        n_prompt: returns the length of a document's prompt in tokens.

    Raises: SnapKVError: the prompt is too long even with one piece of filler.
    """
    pieces = [next(filler)]
    least = n_prompt(joined(pieces, parts))
    if least > length:
        raise SnapKVError(f"--length must be at least {least} for this question, got {length}")
    while n_prompt(joined(pieces, parts)) <= length:
        pieces += itertools.islice(filler, len(pieces))
    numbers = range(1, len(pieces) + 1)
    n = bisect.bisect_right(numbers, length, key=lambda n: n_prompt(joined(pieces[:n], parts)))
    return joined(pieces[:n], parts)


def joined(pieces: Sequence[str], parts: Iterable[tuple[float, str]]) -> str:
    """Join the pieces, with each part inserted at its depth. Parts of equal depth keep their order."""
    text = list(pieces)
    for i, (depth, part) in enumerate(sorted(parts, key=lambda part: part[0])):
        text.insert(round(depth * len(pieces)) + i, part)
    return "".join(text).strip()


def needle(tokenizer: Any, grid: Grid, needles: int = 1, text: str | None = None) -> Dataset:
    """Return a dataset whose documents hide `needles` facts. The question asks for one of them.

    Args:
        tokenizer: the model's tokenizer.
        grid: lengths and depths. The fact that is asked for is at this depth; the other facts are spread evenly.
        needles: number of facts in each document.
        text: filler, which is cut between sentences, and repeated if it is too short. By default, the filler is
            sentences like those in the embedded models' training data.
    """

    def make(place: Record) -> Document:
        named = {key: place[key] for key in ("task", "length", "document")}
        rng = random.Random(f"{grid.seed} {named}")
        facts = make_facts(rng, needles)
        sentences = [fact_sentence(fact, rng) + " " for fact in facts]
        depths = ((i + 0.5) / (needles - 1) for i in range(needles - 1))  # the other facts' depths
        parts = list(zip([place["depth"], *depths], sentences))
        filler: Iterator[str] = (f"{filler_sentence(rng)} " for _ in itertools.count())
        if text is not None:
            filler = itertools.cycle(sentences_of(text.strip() + "\n\n"))
        prompt_of = partial(question_prompt, tokenizer)
        question, value = facts[0].question, facts[0].value
        document = filled(
            place["length"], parts, filler, lambda made: len(prompt_of(made, question))
        )
        prompt = prompt_of(document, question)
        asked = Question(prompt, value, partial(contains, value=value), HAYSTACK_TOKENS)
        return Document([asked], n_shared(prompt, prompt_of(document, "Why?")))

    made = "synthetic" if text is None else digest_of(text)
    setting = {"task": "needle", "seed": grid.seed, "needles": needles, "haystack": made}
    return Dataset(tokenizer, setting, grid.places("needle"), make)


def suite(
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    n_documents: int,
    n_questions: int,
    seed: int = 0,
) -> Dataset:
    """Return a dataset of documents for every task and length, with at most `n_questions` per document."""

    def make(place: Record) -> Document:
        rng = random.Random("{} {task} {length} {document}".format(seed, **place))
        n_tokens = place["length"] - QUESTION_TOKENS
        count = token_counter(tokenizer)
        text, chosen = suite_tasks.make_task(place["task"], rng, n_tokens, count)
        prompt_of = partial(question_prompt, tokenizer, text)
        questions = []
        for asked in chosen[:n_questions]:
            score = lambda answer, value=asked.value: answer.strip() == value  # noqa: E731
            questions.append(Question(prompt_of(asked.question), asked.value, score, SUITE_TOKENS))
        return Document(questions, n_shared(prompt_of("Why?"), *(q.prompt for q in questions)))

    places = [
        {"task": task, "length": length, "document": i}
        for length, task, i in itertools.product(lengths, tasks, range(n_documents))
    ]
    return Dataset(tokenizer, {"task": "suite", "seed": seed}, places, make)
