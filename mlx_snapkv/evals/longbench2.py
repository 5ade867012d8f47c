"""LongBench v2 (Bai et al., 2024): questions with four choices, on the user's own copy of data and prompt.

The prompt comes from the repository's `prompts/0shot.txt`. What is different from its own script: answers are
greedy here and sampled at temperature 0.1 there, and the chat template is the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from . import prompts, rows
from .asking import Paper, Question
from .score_tables import Page, Records, mean

MAX_TOKENS = 128  # of an answer
PLACES = {"$Q$": "question"} | {f"$C_{x}$": f"choice_{x}" for x in "ABCD"}
NAMES = ("context", *PLACES.values(), "answer", "difficulty", "length")
FIELDS = dict.fromkeys(NAMES, rows.TEXT)


def chosen(answer: str) -> str | None:
    """The letter that an answer gives, by the two forms that the data set's own script looks for."""
    text = answer.strip().replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(
        r"The correct answer is ([A-D])", text
    )
    return found and found[1]


def _is_chosen(letter: str, answer: str) -> float:
    return float(chosen(answer) == letter)


def averages(records: Records) -> dict[str, float]:
    """Right answers overall, by difficulty and by length, as the paper's table has them."""
    found = {"overall": mean([r["score"] for r in records])}
    for name, kinds in (("difficulty", ("easy", "hard")), ("size", ("short", "medium", "long"))):
        for kind in kinds:
            own = [r["score"] for r in records if r[name] == kind]
            if own:
                found[kind] = mean(own)
    return found


PAGE = Page(
    "LongBench v2",
    "Right choices in 100, as the data set's own script reads an answer: none is wrong.",
    points=100,
    averages=averages,
)


def find(folder: Path) -> tuple[Path, Path]:
    """The data's file and the prompt's.

    Raises:
        SnapKVError: there is no prompt, or it has no place for the document.
    """
    data, prompt = data_file(folder), rows.first_file(folder, "0shot.txt", "prompts/0shot.txt")
    if data is None or prompt is None:
        raise SnapKVError(
            f"--data {folder}: neither 0shot.txt nor prompts/0shot.txt is there: copy the folder prompts of "
            "LongBench v2's repository to it"
        )
    if "$DOC$" not in prompt.read_text(encoding="utf-8", errors="replace"):
        raise SnapKVError(f"{prompt} has no place for $DOC$: copy LongBench v2's own file")
    return data, prompt


def data_file(folder: Path) -> Path | None:
    return rows.first_file(
        folder, "data.json", "data.jsonl", "data/train-*.parquet", "train-*.parquet"
    )


@dataclass(frozen=True)
class LongBench2:
    """Its documents, with one question each; attributes as of `LongBench`.

    Attributes:
        prompt: the file of the prompt, with places for the document, the question and the choices.
    """

    tokenizer: Any
    file: Path
    prompt: Path
    room: int | None = None
    n_documents: int | None = None

    def setting(self) -> dict[str, Any]:
        data = rows.fingerprint([self.file, self.prompt])
        return {"task": "longbench-v2", "data": data, "length": self.room}

    def __len__(self) -> int:
        return sum(1 for _ in self._rows())

    def _rows(self) -> Iterator[tuple[int, rows.Row]]:
        return rows.limited(rows.read_rows(self.file, FIELDS), self.n_documents)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Paper]]:
        for document, row in self._rows():
            place = {"task": "longbench-v2", "length": None, "document": document}
            yield place | {"difficulty": row["difficulty"], "size": row["length"]}, self.paper(row)

    def paper(self, row: rows.Row) -> Paper:
        before, after = (
            self._filled(part, row)
            for part in self.prompt.read_text(encoding="utf-8").split("$DOC$", 1)
        )
        text = before + row["context"].strip() + after
        taken = MAX_TOKENS + len(prompts.chat(self.tokenizer, ""))
        text = prompts.cut_middle(self.tokenizer, text, prompts.left(self.room, taken))
        prompt = prompts.chat(self.tokenizer, text)
        other = prompts.chat(self.tokenizer, text[: len(text) - len(after)] + prompts.OTHER)
        score = partial(_is_chosen, row["answer"])
        question = Question(prompt, row["answer"], score, MAX_TOKENS)
        return Paper([question], prompts.n_shared(prompt, other))

    @staticmethod
    def _filled(text: str, row: rows.Row) -> str:
        for mark, name in PLACES.items():
            text = text.replace(mark, row[name].strip())
        return text
