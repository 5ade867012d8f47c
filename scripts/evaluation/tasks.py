"""The tasks that are made here: `needle`, `lines` and `suite`.

Needle in a haystack: a fact in a long document (Kamradt, "Needle In A Haystack: Pressure Testing LLMs", 2023; SnapKV's
section 4.1). The facts are those of `mlx_snapkv/demo/documents.py`: invented values of several tokens, which no model
can guess.

Lines (LongEval's: Li et al., "How Long Can Open-Source LLMs Truly Promise on Context Length?", 2023): they differ in a
name and a number only, so a policy that keeps part of a number shows. SnapKV's ablation of pooling.

Suite: the tasks of `suite_tasks.py`, which tell policies apart, with many questions about each document.

The same arguments always make the same documents.
"""

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mlx_snapkv.demo.documents import fact_sentence, filler_sentence, make_facts, make_subject
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
HAYSTACK_TOKENS, SUITE_TOKENS = 24, 60  # of an answer
QUESTION_TOKENS = 60  # of the suite's prompts, template included


class Hidden(NamedTuple):
    """What a document hides and is asked for: `parts` of text with their depths (0 to 1), in endless `filler`."""

    parts: Sequence[tuple[float, str]]
    filler: Iterator[str]
    question: str
    value: str
    introduction: str = ""


@dataclass(frozen=True)
class Grid:
    """Which documents there are, with one question each."""

    lengths: Sequence[int]  # tokens of the prompts, at most
    n_depths: int = 5  # evenly from the start, 0, to the end, 1; a single one is the middle
    n_documents: int = 1  # of each length and depth
    seed: int = 0

    def places(self, task: str) -> list[Record]:
        last = self.n_depths - 1
        depths = [round(i / last, 4) for i in range(self.n_depths)] if last else [0.5]
        each = itertools.product(self.lengths, depths, range(self.n_documents))
        return [
            {"task": task, "length": length, "document": f"{i} at {depth:g}", "depth": depth}
            for length, depth, i in each
        ]


def haystack(
    task: str,
    tokenizer: Any,
    grid: Grid,
    hide: Callable[[random.Random, float], Hidden],
    **setting: Any,
) -> Dataset:
    """Documents in which `hide` hides what is asked for at each depth; `setting` is what that depends on."""

    def make(place: Record) -> Document:
        named = {key: place[key] for key in ("task", "length", "document")}
        hidden = hide(random.Random(f"{grid.seed} {named}"), place["depth"])

        def prompt_of(text: str, question: str = hidden.question) -> list[int]:
            return question_prompt(tokenizer, hidden.introduction + text, question)

        n_prompt = lambda text: len(prompt_of(text))  # noqa: E731
        text = filled(place["length"], hidden.parts, hidden.filler, n_prompt)
        prompt = prompt_of(text)
        asked = Question(
            prompt, hidden.value, partial(contains, value=hidden.value), HAYSTACK_TOKENS
        )
        return Document([asked], n_shared(prompt, prompt_of(text, "Why?")))

    fixed = {"task": task, "seed": grid.seed, **setting}
    return Dataset(tokenizer, fixed, grid.places(task), make)


def contains(answer: str, value: str) -> bool:
    """The value stands in the answer by itself, not inside a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer) is not None


def filled(
    length: int,
    parts: Sequence[tuple[float, str]],
    filler: Iterator[str],
    n_prompt: Callable[[str], int],
) -> str:
    """The longest document with `parts` in it whose prompt has at most `length` tokens, as `n_prompt` counts them.

    Raises: SnapKVError: not even one piece of filler has room.
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
    """The pieces with each part at its depth among them; two of the same depth in the order given."""
    text = list(pieces)
    for i, (depth, part) in enumerate(sorted(parts, key=lambda part: part[0])):
        text.insert(round(depth * len(pieces)) + i, part)
    return "".join(text).strip()


def needle(tokenizer: Any, grid: Grid, needles: int = 1, text: str | None = None) -> Dataset:
    """One fact is asked for; the other `needles - 1` are spread over the document.

    The filler is `text`, cut to length between sentences and repeated if it is too short, or else the sentences that
    the embedded models were trained on.
    """

    def hide(rng: random.Random, depth: float) -> Hidden:
        facts = make_facts(rng, needles)
        sentences = [fact_sentence(fact, rng) + " " for fact in facts]
        others = ((i + 0.5) / (needles - 1) for i in range(needles - 1))  # in the middles of parts
        filler: Iterator[str] = (f"{filler_sentence(rng)} " for _ in itertools.count())
        if text is not None:
            filler = itertools.cycle(sentences_of(text.strip() + "\n\n"))
        parts = list(zip([depth, *others], sentences))
        return Hidden(parts, filler, facts[0].question, facts[0].value)

    made = "synthetic" if text is None else digest_of(text)
    return haystack("needle", tokenizer, grid, hide, needles=needles, haystack=made)


class Wording(NamedTuple):
    """How lines and questions are put; `line` and `question` have places for a name and a number."""

    name: str
    introduction: str
    line: str
    question: str
    digits: int
    space: str  # between a name's words


LONGEVAL = Wording(
    "longeval",
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n",
    "line {name}: REGISTER_CONTENT is <{number}>\n",
    "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number.",
    digits=5,
    space="-",
)
# The embedded models know one kind of sentence only: LongEval's words are too hard even for their full cache.
FACTS = Wording(
    "facts",
    "",
    "The account number of the {name} is {number}.\n",
    "What is the account number of the {name}?",
    digits=8,
    space=" ",
)


def lines(tokenizer: Any, grid: Grid, wording: Wording = LONGEVAL) -> Dataset:
    """One line of a long list is asked for."""

    def hide(rng: random.Random, depth: float) -> Hidden:
        pairs = _names_and_numbers(rng, wording)
        name, number = next(pairs)
        others = (wording.line.format(name=name, number=number) for name, number in pairs)
        asked = [(depth, wording.line.format(name=name, number=number))]
        question = wording.question.format(name=name)
        return Hidden(asked, others, question, number, wording.introduction)

    return haystack("lines", tokenizer, grid, hide, wording=wording.name)


def _names_and_numbers(rng: random.Random, wording: Wording) -> Iterator[tuple[str, str]]:
    """Without end; each name only once."""
    seen: set[str] = set()
    low = 10 ** (wording.digits - 1)
    while True:
        name = make_subject(rng)
        while name in seen:
            name = make_subject(rng, made_up=1.0)
        seen.add(name)
        yield name.replace(" ", wording.space), str(rng.randrange(low, 10 * low))


def suite(
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    n_documents: int,
    n_questions: int,
    seed: int = 0,
) -> Dataset:
    """Documents of every task and length, with at most `n_questions` about each."""

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
