"""Datasets in the format of kvpress' datasets, such as RULER.

Without a `task` column, the task is the file name, or the folder name if the file is a split (`test-00000-of-00001`).
Without a `length` column, the length is the name of a folder (`4096/test.parquet`). Rows with the same context are
questions about one document.
"""

import importlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, PositiveInt, ValidationError

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.records import Record
from mlx_snapkv.measure.texts import digest_of, template_around
from mlx_snapkv.models.trained_length import trained_length
from mlx_snapkv.paths import path_of, reason

from .datasets import Dataset, Document, Question
from .scores import scores_page

MAX_LENGTHS = 8  # above this number of lengths, tables don't group documents by length
SPLIT = re.compile(r"(train|test|validation|data)\b")
PAGE = scores_page(
    "Questions of a data set",
    "Every task has RULER's score: the share of the references that the output contains; for qa, whether it contains "
    "one.",
)

Text = Annotated[str, Field(min_length=1)]


class Row(BaseModel, strict=True, frozen=True):
    """A question about a context.

    Attributes:
        answer: texts that a right answer contains.
        answer_prefix: first words of the answer, which end the prompt.
        length: number of tokens, by which tables group documents.
    """

    context: Text
    question: str
    answer: Annotated[
        list[Text],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(min_length=1, validation_alias=AliasChoices("answer", "answers")),
    ]
    max_new_tokens: PositiveInt
    answer_prefix: str = ""
    task: str
    length: int | None


def read_columns(
    name: str, tasks: Sequence[str] | None = None, max_documents: int | None = None
) -> tuple[list[list[Row]], str]:
    """Read a file, or all parquet and JSON-lines files in a folder and its subfolders.

    Args:
        name: path of the file or folder.
        tasks: tasks to read; None reads all.
        max_documents: maximum number of documents per length and task, from the first; None takes all.

    Returns: A list of rows for each document, ordered by length and task, and a digest of the data.

    Raises: SnapKVError: there is no such file, it can't be read or lacks a column, or it has no such task.
    """
    file_or_folder = path_of(name, "--data")
    paths = [file_or_folder]
    if not file_or_folder.is_file():
        paths = [
            *sorted(file_or_folder.rglob("*.jsonl")),
            *sorted(file_or_folder.rglob("*.parquet")),
        ]
    if not paths:
        raise SnapKVError(
            f"--data {name}: no such file, and no folder with .parquet or .jsonl files"
        )
    rows = [row for path in paths for row in _rows(path)]
    all_tasks = list(dict.fromkeys(row.task for row in rows))
    for task in tasks or []:
        if task not in all_tasks:
            raise SnapKVError(f"--task must be one of {', '.join(all_tasks)}, got {task!r}")
    groups_by_length = len({row.length for row in rows}) <= MAX_LENGTHS
    # (length, task) -> context -> the rows about this context
    groups: dict[tuple, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not groups_by_length:
            row = row.model_copy(update={"length": None})
        if row.task in (tasks or all_tasks):
            groups[row.length or 0, row.task][row.context].append(row)
    documents: list[list[Row]] = []
    for _, rows_by_context in sorted(groups.items()):
        documents += list(rows_by_context.values())[:max_documents]
    names_and_sizes = [(path.name, path.stat().st_size) for path in paths]
    return documents, digest_of(json.dumps(names_and_sizes))


def _rows(path: Path) -> Iterator[Row]:
    """Yield a file's rows, with every column checked or filled in."""
    length_folders = [folder for folder in path.resolve().parents[:3] if folder.name.isdecimal()]
    length = int(length_folders[0].name) if length_folders else None
    is_split = SPLIT.match(path.stem) is not None
    task = path.parent.name if is_split else path.stem
    file_rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
    number = 0
    try:
        for file_row in file_rows:
            number += 1
            values = {name: value for name, value in file_row.items() if value is not None}
            yield Row.model_validate({"task": task, "length": length} | values)
    except ValidationError as error:
        problem = error.errors()[0]
        column = ".".join(map(str, problem["loc"]))
        raise SnapKVError(
            f"{path}: row {number}: {column}: {problem['msg']}; every row needs context, question, answer and "
            "max_new_tokens"
        ) from None
    except OSError as error:
        raise SnapKVError(f"{path}: {reason(error)}") from error
    if not number:
        raise SnapKVError(f"{path} has no rows: get the file again, or remove it from the folder")


def _lines(path: Path) -> Iterator[dict]:
    """Yield the objects in a JSON-lines file."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                row = dict(json.loads(line.decode("utf-8-sig")))
                json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate
            except (ValueError, TypeError, RecursionError):
                raise SnapKVError(
                    f"{path}: line {number} is not a JSON object in UTF-8: fix or delete it"
                ) from None
            yield row


def _parquet(path: Path) -> Iterator[dict]:
    """Yield the rows of a parquet file."""
    try:
        arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise SnapKVError(f"{path}: parquet needs pyarrow: run pip install -e '.[dev]'") from None
    try:
        yield from parquet.ParquetFile(path).read().to_pylist()
    except arrow.ArrowException as error:
        raise SnapKVError(f"{path} is damaged or not a parquet file: get it again") from error


def columns(
    tokenizer: Any, documents: Sequence[list[Row]], digest: str, template: bool = True
) -> Dataset:
    """Return a dataset with prompts built as in kvpress.

    Document and question are tokenised separately and form the user's turn. `answer_prefix` begins the assistant's
    turn. Without a chat template, a line break ends the question.

    Args:
        tokenizer: the model's tokenizer.
        documents: a list of rows for each document.
        digest: digest of the data, which is part of the dataset's setting.
        template: whether to use the tokenizer's chat template, if it has one.
    """
    before, after = "", "\n"
    uses_template = template and tokenizer.has_chat_template
    if uses_template:
        before, after = template_around(tokenizer)
    numbers: dict[tuple, Iterator[int]] = defaultdict(itertools.count)
    places = [
        {"task": row.task, "length": row.length, "document": next(numbers[row.task, row.length])}
        for row, *_ in documents
    ]

    def make(place: Record) -> Document:
        rows = documents[places.index(place)]
        # Without a template, text starts with the tokenizer's own special tokens.
        context = before + rows[0].context
        context_tokens = tokenizer.encode(context, add_special_tokens=not uses_template)
        questions = []
        for row in rows:
            text = row.question + after + row.answer_prefix
            prompt = context_tokens + tokenizer.encode(text, add_special_tokens=False)
            questions.append(Question(prompt, row.answer, score_of(row), row.max_new_tokens))
        return Document(questions, len(context_tokens))

    setting = {"task": "data", "data": digest, "chat_template": template}
    return Dataset(tokenizer, setting, places, make)


def require_room(model: Any, dataset: Dataset, documents: Sequence[list[Row]]) -> None:
    """Raise SnapKVError if the longest prompt and its answer exceed the model's trained length."""
    limit = trained_length(model)
    context_lengths = [len(rows[0].context) for rows in documents]
    place_of_longest = dataset.places[context_lengths.index(max(context_lengths))]
    questions = dataset.make(place_of_longest).questions
    n_tokens = max(len(question.prompt) + question.max_tokens for question in questions)
    if limit is not None and n_tokens > limit:
        raise SnapKVError(
            f"--data has a prompt of {n_tokens} tokens with its answer, but the model's trained length is {limit}: "
            "give shorter documents, or another model"
        )


# RULER's scores (0 to 1) of an output given its references, computed as in kvpress.


def string_match_all(references: Sequence[str], output: str) -> float:
    """Return the share of references that the output contains, ignoring case (niah, vt, cwe and fwe)."""
    text = re.sub(r"[\x00-\x1f]", "", output.strip()).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(references: Sequence[str], output: str) -> float:
    """Return 1 if the output contains any of the references, ignoring case, else 0 (qa)."""
    return float(string_match_all(references, output) > 0)


PARTIAL = {"qa_1", "qa_2"}  # tasks in which one reference is enough


def score_of(row: Row) -> Callable[[str], float]:
    """Return a function that scores an answer to a row's question."""
    return partial(string_match_part if row.task in PARTIAL else string_match_all, row.answer)
