"""LongBench (Bai et al., 2024): 21 tasks, on the user's own copy of the data and of its configuration.

Prompts and lengths of answers come from the data set's `dataset2prompt.json` and `dataset2maxlen.json`; nothing of its
text is here. What is different from its own scripts: the chat template is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from . import longbench_scores as scores
from . import prompts, rows
from .asking import Paper, Question
from .score_tables import Page, Records, grouped, mean, task_means

# The category of each task in the paper's tables, and its score. Code is in the English and in the Chinese average.
CATEGORIES: dict[str, dict[str, Callable[..., float]]] = {
    "single-document QA": {
        "narrativeqa": scores.qa_f1,
        "qasper": scores.qa_f1,
        "multifieldqa_en": scores.qa_f1,
        "multifieldqa_zh": scores.qa_f1_zh,
    },
    "multi-document QA": {
        "hotpotqa": scores.qa_f1,
        "2wikimqa": scores.qa_f1,
        "musique": scores.qa_f1,
        "dureader": scores.rouge_l_zh,
    },
    "summarization": {
        "gov_report": scores.rouge_l,
        "qmsum": scores.rouge_l,
        "multi_news": scores.rouge_l,
        "vcsum": scores.rouge_l_zh,
    },
    "few-shot": {
        "trec": scores.classified,
        "triviaqa": scores.qa_f1,
        "samsum": scores.rouge_l,
        "lsht": scores.classified,
    },
    "synthetic": {
        "passage_count": scores.counted,
        "passage_retrieval_en": scores.retrieved,
        "passage_retrieval_zh": scores.retrieved,
    },
    "code": {"lcc": scores.edit_similarity, "repobench-p": scores.edit_similarity},
}
METRICS = {task: metric for tasks in CATEGORIES.values() for task, metric in tasks.items()}
TASKS = tuple(METRICS)
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
CODE = ("lcc", "repobench-p")
NO_TEMPLATE = ("trec", "triviaqa", "samsum", "lsht", *CODE)
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
CONFIG = ("dataset2prompt", "dataset2maxlen")
FIELDS = {"input": rows.TEXT, "context": rows.TEXT, "answers": rows.TEXTS, "length": rows.NUMBER}


def averages(records: Records) -> dict[str, float]:
    """The paper's table 2: means over tasks by category, and over categories in all and by language.

    Of LongBench-E, whose tasks end in `_e`, the means over tasks by length.
    """
    tasks = task_means(records)
    found = {}
    for name, category in CATEGORIES.items():
        own = [tasks[task] for task in category if task in tasks]
        if own:
            found[name] = mean(own)
    if found:
        found["all"] = mean(list(found.values()))
    for name, wanted in (
        ("English", lambda t: t not in CHINESE),
        ("Chinese", lambda t: t in (*CHINESE, *CODE)),
    ):
        means = [
            mean(own)
            for category in CATEGORIES.values()
            if (own := [tasks[task] for task in category if task in tasks and wanted(task)])
        ]
        if means:
            found[name] = mean(means)
    return found | _by_size([r for r in records if r["task"].endswith("_e")])


def _by_size(records: Records) -> dict[str, float]:
    sizes = grouped(sorted(records, key=lambda r: r["size"]), "size")
    return {size: mean(list(task_means(own).values())) for (size,), own in sizes.items()}


PAGE = Page(
    "LongBench",
    "LongBench's own scores, 0 to 100. The score is the mean over tasks. By category, as the paper: means over tasks; "
    "all, English and Chinese: means over categories, code in both languages.",
    points=100,
    averages=averages,
)


def find(folder: Path, given: list[str] | None) -> tuple[dict[str, Path], dict[str, Any], str]:
    """The data's files by task, its configuration, and what tells this copy from others.

    LongBench-E's tasks, with `_e` to their names, are asked only if they are given.

    Raises:
        SnapKVError: there are none, none of a task, or no configuration of it.
    """
    known = [*TASKS, *(f"{task}_e" for task in TASKS)]
    found = {task: rows.first_file(folder, f"{task}.jsonl", f"data/{task}.jsonl") for task in known}
    there = {task: path for task, path in found.items() if path is not None}
    plain = [task for task in there if task in TASKS]
    if not there or not (given or plain):
        raise SnapKVError(
            f"--data {folder}: no TASK.jsonl of LongBench, no data/TASK.jsonl and no data.json of v2 in it"
        )
    tasks = rows.chosen_tasks(given, list(there) if given else plain, known)
    config_files = [_config_file(folder, f"{name}.json") for name in CONFIG]
    config = {name: _config(path, tasks) for name, path in zip(CONFIG, config_files)}
    for task in tasks:
        if "{context}" not in str(config["dataset2prompt"][_base(task)]):
            raise SnapKVError(
                f"dataset2prompt.json: the prompt of {task} has no place for {{context}}"
            )
        _require_packages(task)
    data = rows.fingerprint([*there.values(), *config_files])
    return {task: there[task] for task in tasks}, config, data


def _config_file(folder: Path, name: str) -> Path:
    path = rows.first_file(folder, name, f"config/{name}", f"LongBench/config/{name}")
    if path is None:
        raise SnapKVError(
            f"--data {folder}: neither {name} nor config/{name} is there: copy LongBench's folder config to it"
        )
    return path


def _config(path: Path, tasks: Sequence[str]) -> dict[str, Any]:
    config = rows.read_json(path)
    for task in tasks:
        if not isinstance(config, dict) or _base(task) not in config:
            raise SnapKVError(f"{path} has no entry {_base(task)!r}: copy LongBench's own file")
    return config


def _require_packages(task: str) -> None:
    metric = METRICS[_base(task)]
    if metric in (scores.rouge_l, scores.rouge_l_zh):
        rows.require("rouge", f"--task {task}")
    if metric in (scores.qa_f1_zh, scores.rouge_l_zh):
        rows.require("jieba", f"--task {task}")


def _base(task: str) -> str:
    return task.removesuffix("_e")


@dataclass(frozen=True)
class LongBench:
    """Its documents, with one question each.

    Attributes:
        files: by task.
        config: the data set's two files, by name.
        data: what tells this copy of the data from others.
        room: tokens of a prompt and its answer, longer prompts losing their middle; None: nothing is cut.
        n_documents: of each task, at most.
    """

    tokenizer: Any
    files: dict[str, Path]
    config: dict[str, Any]
    data: str
    room: int | None = None
    n_documents: int | None = None

    def setting(self) -> dict[str, Any]:
        return {"task": "longbench", "data": self.data, "length": self.room}

    def __len__(self) -> int:
        return sum(1 for path in self.files.values() for _ in self._rows(path))

    def _rows(self, path: Path) -> Iterator[tuple[int, rows.Row]]:
        return rows.limited(rows.read_rows(path, FIELDS), self.n_documents)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Paper]]:
        for task, path in self.files.items():
            for document, row in self._rows(path):
                place = {"task": task, "length": None, "document": document}
                size = "0-4k" if row["length"] < 4000 else "4-8k" if row["length"] < 8000 else "8k+"
                yield place | {"size": size}, self.paper(_base(task), row)

    def paper(self, task: str, row: rows.Row) -> Paper:
        most = int(self.config["dataset2maxlen"][task])
        wording = self.config["dataset2prompt"][task]
        try:
            text, after = (
                part.format(**row) for part in (wording, wording.partition("{context}")[2])
            )
        except (KeyError, IndexError, ValueError) as error:
            raise SnapKVError(
                f"dataset2prompt.json: the prompt of {task} asks for {error}"
            ) from error
        encode = prompts.plain if task in NO_TEMPLATE else prompts.chat
        template = len(encode(self.tokenizer, "")) if encode is prompts.chat else 0
        text = prompts.cut_middle(self.tokenizer, text, prompts.left(self.room, most + template))
        prompt = encode(self.tokenizer, text)
        other = encode(self.tokenizer, text[: len(text) - len(after)] + prompts.OTHER)
        score = partial(self._score, task, row)
        question = Question(prompt, row["answers"], score, most, task in FIRST_LINE)
        return Paper([question], prompts.n_shared(prompt, other))

    @staticmethod
    def _score(task: str, row: rows.Row, answer: str) -> float:
        """The best over the references."""
        if task in FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        more = [row.get("all_classes") or []] if METRICS[task] is scores.classified else []
        return max(METRICS[task](answer, reference, *more) for reference in row["answers"])
