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
from functools import partial
from operator import itemgetter
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

    def n_prompt_with(n_pieces: int) -> int:
        return n_prompt(joined(pieces[:n_pieces], parts))

    shortest = n_prompt_with(1)
    if shortest > length:
        raise SnapKVError(f"--length must be at least {shortest} for this question, got {length}")
    while n_prompt_with(len(pieces)) <= length:
        pieces += itertools.islice(filler, len(pieces))
    n_fitting = bisect.bisect_right(range(1, len(pieces) + 1), length, key=n_prompt_with)
    return joined(pieces[:n_fitting], parts)


def joined(pieces: Sequence[str], parts: Iterable[tuple[float, str]]) -> str:
    """Join the pieces, with each part inserted at its depth. Parts of equal depth keep their order."""
    all_pieces = list(pieces)
    by_depth = sorted(parts, key=itemgetter(0))
    for n_inserted, (depth, part) in enumerate(by_depth):
        all_pieces.insert(round(depth * len(pieces)) + n_inserted, part)
    return "".join(all_pieces).strip()


def needle(
    tokenizer: Any,
    lengths: Sequence[int],
    n_depths: int = 5,
    n_documents: int = 1,
    needles: int = 1,
    text: str | None = None,
    seed: int = 0,
) -> Dataset:
    """Return a dataset whose documents hide `needles` facts. The question asks for one of them.

    Args:
        tokenizer: the model's tokenizer.
        lengths: maximum prompt lengths in tokens.
        n_depths: number of depths, evenly spaced from 0 (start) to 1 (end). A single depth is the middle. The fact that
            is asked for is at a document's depth; the other facts are spread evenly.
        n_documents: number of documents per length and depth, each with one question.
        needles: number of facts in each document.
        text: filler, which is cut between sentences, and repeated if it is too short. By default, the filler is
            sentences like those in the built-in models' training data.
        seed: seed for all random choices.
    """

    def make(place: Record) -> Document:
        identity = {key: place[key] for key in ("task", "length", "document")}
        rng = random.Random(f"{seed} {identity}")
        facts = make_facts(rng, needles)
        sentences = [fact_sentence(fact, rng) + " " for fact in facts]
        n_others = needles - 1
        other_depths = ((i + 0.5) / n_others for i in range(n_others))
        parts = list(zip([place["depth"], *other_depths], sentences))
        filler: Iterator[str] = (f"{filler_sentence(rng)} " for _ in itertools.count())
        if text is not None:
            filler = itertools.cycle(sentences_of(text.strip() + "\n\n"))
        prompt_of = partial(question_prompt, tokenizer)
        question, value = facts[0].question, facts[0].value

        def n_prompt(document: str) -> int:
            return len(prompt_of(document, question))

        document = filled(place["length"], parts, filler, n_prompt)
        prompt = prompt_of(document, question)
        asked = Question(prompt, value, partial(contains, value=value), HAYSTACK_TOKENS)
        return Document([asked], n_shared(prompt, prompt_of(document, "Why?")))

    haystack = "synthetic" if text is None else digest_of(text)
    setting = {"task": "needle", "seed": seed, "needles": needles, "haystack": haystack}
    last = n_depths - 1
    depths = [round(i / last, 4) for i in range(n_depths)] if last else [0.5]
    places = [
        {"task": "needle", "length": length, "document": f"{i} at {depth:g}", "depth": depth}
        for length, depth, i in itertools.product(lengths, depths, range(n_documents))
    ]
    return Dataset(tokenizer, setting, places, make)


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
        text, task_questions = suite_tasks.make_task(place["task"], rng, n_tokens, count)
        prompt_of = partial(question_prompt, tokenizer, text)
        questions = [
            Question(
                prompt=prompt_of(task_question.question),
                expected=task_question.value,
                score=partial(_is_exactly, task_question.value),
                max_tokens=SUITE_TOKENS,
            )
            for task_question in task_questions[:n_questions]
        ]
        prompts = [question.prompt for question in questions]
        return Document(questions, n_shared(prompt_of("Why?"), *prompts))

    places = [
        {"task": task, "length": length, "document": i}
        for length, task, i in itertools.product(lengths, tasks, range(n_documents))
    ]
    return Dataset(tokenizer, {"task": "suite", "seed": seed}, places, make)


def _is_exactly(value: str, answer: str) -> bool:
    """Return whether the answer consists of the value and nothing else."""
    return answer.strip() == value
