"""RULER (Hsieh et al., 2024), on data that its own scripts prepared, or as the parquet that kvpress uses.

Nothing of RULER's text is here: prompts, beginnings of answers and references are those of the data.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from . import prompts, rows
from .asking import Paper, Question
from .score_tables import Page

# What may be generated, by the first part of a task's name: RULER's tokens_to_generate.
MAX_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
PREPARED = {"input": rows.SOME_TEXT, "outputs": rows.TEXTS}
PARQUET = {
    "context": rows.TEXT,
    "question": rows.TEXT,
    "answer_prefix": rows.TEXT,
    "answer": rows.TEXTS,
    "task": rows.TEXT,
    "max_new_tokens": rows.COUNT,
}
PAGE = Page(
    "RULER",
    "RULER's string match, 0 to 100: the share of the references that stand in the answer, for qa whether one does. "
    f"The score is the mean over tasks, RULER's own if all {len(TASKS)} are there.",
    points=100,
)


ANSWERS = "pred"  # RULER's folder of answers, beside its data


def match_all(references: Sequence[str], answer: str) -> float:
    """The share of the references that stand in the answer, whatever their case."""
    text = _cleaned(answer)
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(references: Sequence[str], answer: str) -> float:
    """Whether a reference stands in the answer, whatever its case."""
    text = _cleaned(answer)
    return float(any(reference.lower() in text for reference in references))


def _cleaned(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()


@dataclass(frozen=True)
class Source:
    """A file and the rows of a task in it; `length` is the number that a folder above it is named by."""

    task: str
    path: Path
    length: int | None

    def rows(self) -> Iterator[rows.Row]:
        if self.path.suffix == ".jsonl":
            return rows.read_rows(self.path, PREPARED)
        return rows.read_rows(self.path, PARQUET, only=("task", self.task))


def find(folder: Path, tasks: list[str] | None) -> tuple[list[Source], str]:
    """TASK/validation.jsonl and TASK.jsonl as RULER has them, and parquet files, in the folder and below.

    The answers that RULER writes beside its data are passed over.

    Returns:
        Those of the tasks, in RULER's order, and what tells this copy of the data from others.

    Raises:
        SnapKVError: there is none, none of a task, two of the same, or no such task.
    """
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        task = path.parent.name if path.stem in ("validation", "test") else path.stem
        if task in TASKS and path.parent.name != ANSWERS:
            found.append(Source(task, path, _length(path)))
    for path in sorted(folder.rglob("*.parquet")):
        names = rows.texts_in(path, "task")
        found += [Source(task, path, _length(path)) for task in names if task in TASKS]
    if not found:
        raise SnapKVError(
            f"--data {folder}: no TASK/validation.jsonl, TASK.jsonl or parquet file of RULER in it"
        )
    for one, other in itertools.combinations(found, 2):
        if (one.task, one.length) == (other.task, other.length):
            raise SnapKVError(
                f"--data {folder}: both {one.path} and {other.path} are {one.task} of one length: give the folder of "
                "one of them"
            )
    chosen = rows.chosen_tasks(tasks, [source.task for source in found], TASKS)
    order = {task: i for i, task in enumerate(TASKS)}
    data = rows.fingerprint(source.path for source in found)
    found = [source for source in found if source.task in chosen]
    return sorted(found, key=lambda source: (source.length or 0, order[source.task])), data


def _length(path: Path) -> int | None:
    folders = list(path.resolve().parents)[:3]  # RULER's are LENGTH/data/TASK
    return next((int(p.name) for p in folders if p.name.isdecimal()), None)


@dataclass(frozen=True)
class Ruler:
    """Its documents, with one question each.

    Attributes:
        data: what tells this copy of the data from others.
        n_documents: of each task and length, at most.
        in_chat_template: put prepared prompts in the model's chat template; for those prepared without one (`base`).
        room: tokens that the model was trained to.

    Raises:
        SnapKVError: a prompt and its answer have more.
    """

    tokenizer: Any
    sources: Sequence[Source]
    data: str = ""
    n_documents: int | None = None
    in_chat_template: bool = False
    room: int | None = None

    def setting(self) -> dict[str, Any]:
        return {"task": "ruler", "data": self.data, "chat_template": self.in_chat_template}

    def __len__(self) -> int:
        return sum(
            1 for source in self.sources for _ in rows.limited(source.rows(), self.n_documents)
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Paper]]:
        for source in self.sources:
            for document, row in rows.limited(source.rows(), self.n_documents):
                place = {"task": source.task, "length": source.length, "document": document}
                yield place, self.paper(source, row)

    def require_room(self) -> None:
        """Raises: SnapKVError: the longest prompt of a task does not fit."""
        for source in self.sources:
            found = (row for _, row in rows.limited(source.rows(), self.n_documents))
            longest = max(
                found, key=lambda row: len(row.get("input") or row["context"]), default=None
            )
            if longest is not None:
                self.paper(source, longest)

    def require_documents(self) -> None:
        """Raises: SnapKVError: prepared prompts of a task have no line that is the question, after a document."""
        for source in self.sources:
            row = next(source.rows(), {})
            if "input" in row and not _in_two(row["input"])[0]:
                raise SnapKVError(
                    f"{source.path}: its prompts are one line each, so the question can't be told from its document: "
                    "give --setting known, or prepare them without --remove_newline_tab"
                )

    def paper(self, source: Source, row: rows.Row) -> Paper:
        prepared = source.path.suffix == ".jsonl"
        prompt, n = self._prepared(row) if prepared else self._from_parquet(row)
        most = MAX_TOKENS[source.task.partition("_")[0]] if prepared else row["max_new_tokens"]
        if self.room is not None and len(prompt) + most > self.room:
            raise SnapKVError(
                f"{source.path}: a prompt of {len(prompt)} tokens and its answer of {most} are more than the "
                f"{self.room} that the model was trained to: give --data a folder of shorter ones, which RULER's "
                "prepare.py makes with a lower --max_seq_length"
            )
        references = row["outputs" if prepared else "answer"]
        match = match_part if source.task.startswith("qa") else match_all
        return Paper([Question(prompt, references, partial(match, references), most)], n)

    def _prepared(self, row: rows.Row) -> tuple[list[int], int]:
        text, prefix = row["input"], row.get("answer_prefix", "")
        other = f"{_in_two(text)[0]}\n{prompts.OTHER}"
        if self.in_chat_template:
            prompt = prompts.chat(self.tokenizer, text, prefix)
            return prompt, prompts.n_shared(prompt, prompts.chat(self.tokenizer, other, prefix))
        prompt = prompts.plain(self.tokenizer, text + prefix)
        return prompt, prompts.n_shared(prompt, prompts.plain(self.tokenizer, other))

    def _from_parquet(self, row: rows.Row) -> tuple[list[int], int]:
        """As kvpress has it, which gives models without a chat template a line break before the answer."""
        parts = row["context"], row["question"], row["answer_prefix"]
        return prompts.in_two(self.tokenizer, *parts, raw_ending="\n")


def _in_two(text: str) -> tuple[str, str]:
    """The document of a prepared prompt, and its question: the last line that has more than a word.

    What templates put on lines of their own behind it is one word, such as the name of who speaks next.
    """
    document, _, last = text.rstrip().rpartition("\n")
    if document and len(last.split()) < 2:
        return _in_two(document)
    return document, last
