"""SCBench (Li et al., 2024): several questions about a long context, on the user's own copy of the data.

Prompts and lengths of answers come from the benchmark's own `eval_utils.py`, which is read and never run; nothing of
its text is here. Its two modes:

multi-request   the context is compressed alone, and each question comes to what is left
multi-turn      the context is compressed with its first question; the others follow, each after the right answers
                to those before it
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from . import prompts, rows
from . import scbench_scores as scores
from .asking import Paper, Question
from .score_tables import Page

MODES = ("multi-request", "multi-turn")
TURNS = 5  # asked about a context, at most
SPARE = 1000  # tokens that multi-request leaves for a question
METRICS: dict[str, Callable[[str, Any], float]] = {
    "scbench_kv": scores.contains,
    "scbench_kv_hard": scores.contains,
    "scbench_kv_compressible": scores.contains,
    "scbench_prefix_suffix": scores.contains,
    "scbench_hashhop": scores.contains,
    "scbench_passkey": scores.first_number,
    "scbench_vt": scores.contains_all,
    "scbench_qa_eng": scores.contains_one,
    "scbench_qa_chn": scores.characters_f1,
    "scbench_choice_eng": scores.choice,
    "scbench_many_shot": scores.contains_one,
}
REFUSED = {
    "scbench_repoqa": "its score parses code of several languages and compares it with that of the whole repository",
    "scbench_repoqa_and_kv": "half of it is scbench_repoqa, whose score parses code of several languages",
    "scbench_summary": "its score is that of another ROUGE package, which also splits sentences",
    "scbench_summary_with_needles": "half of it is scbench_summary, whose score is that of another ROUGE package",
    "scbench_mf": "its questions are put together by the benchmark's own code",
}
# The dictionaries of eval_utils.py, misspelt as there.
LENGTHS = "DATA_NAME_TO_MAX_NEW_TOKENS"
REQUEST, TURN = "multiturn_templates_scdq", "multiturn_templates"
FOLLOWING, FOLLOWING_IN_CHAT = (
    "multiturn_follow_up_templates",
    "multiturn_follow_up_templates_in_chat_tempate",
)
PAGE = Page(
    "SCBench",
    "SCBench's own scores, 0 to 100; the score is the mean over tasks, each over all contexts and turns. Multi-request "
    "is question later; multi-turn compresses the context with its first question, and the right answers stand "
    "between the turns.",
    points=100,
)


def find(folder: Path, given: list[str] | None) -> tuple[dict[str, Path], dict[str, Any], str]:
    """The data's files by task, the dictionaries of eval_utils.py by name, and what tells this copy from others.

    Raises:
        SnapKVError: there are none, none of a task, or it is one that can't be scored as there.
    """
    for task in given or []:
        if task in REFUSED:
            raise SnapKVError(f"--task {task} can't be scored here: {REFUSED[task]}")
    found = {task: _file(folder, task) for task in METRICS}
    there = {task: path for task, path in found.items() if path is not None}
    if not there:
        raise SnapKVError(
            f"--data {folder}: no scbench_NAME.jsonl and no scbench_NAME/*.parquet in it or its folder data, of "
            f"{', '.join(METRICS)}"
        )
    tasks = rows.chosen_tasks(given, list(there), METRICS)
    path = rows.first_file(folder, "eval_utils.py", "scbench/eval_utils.py")
    if path is None:
        raise SnapKVError(
            f"--data {folder}: eval_utils.py, which has the prompts, is not there: copy it from the folder scbench "
            "of MInference's repository"
        )
    data = rows.fingerprint([*there.values(), path])
    return {task: there[task] for task in tasks}, _dictionaries(path, tasks), data


def _file(folder: Path, task: str) -> Path | None:
    older = task.replace("scbench", "multi_turn")
    endings = [f"{name}{end}" for name in (task, older) for end in (".jsonl", "/*.parquet")]
    return rows.first_file(folder, *endings, *(f"data/{ending}" for ending in endings))


def _dictionaries(path: Path, tasks: Sequence[str]) -> dict[str, Any]:
    names = (LENGTHS, REQUEST, TURN, FOLLOWING, FOLLOWING_IN_CHAT)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in names
        }
        for name in names:
            for task in tasks:
                found[name][task]
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        raise SnapKVError(
            f"{path} is not SCBench's eval_utils.py: {error} is not as there"
        ) from error
    return found


@dataclass(frozen=True)
class SCBench:
    """Its contexts, with up to five questions each.

    Attributes:
        files: by task.
        wording: the dictionaries of eval_utils.py, by name.
        data: what tells this copy of the data from others.
        mode: of `MODES`.
        room: tokens of all prompts and answers about a context, longer contexts losing their middle; None: none does.
        n_documents: contexts of each task, at most.
    """

    tokenizer: Any
    files: dict[str, Path]
    wording: dict[str, Any]
    data: str
    mode: str
    room: int | None = None
    n_documents: int | None = None

    def setting(self) -> dict[str, Any]:
        return {"task": "scbench", "data": self.data, "mode": self.mode, "length": self.room}

    def __len__(self) -> int:
        return sum(1 for task in self.files for _ in self._rows(task))

    def _rows(self, task: str) -> Iterator[tuple[int, rows.Row]]:
        path = self.files[task]
        for document, row in rows.limited(
            rows.read_rows(path, {"context": rows.TEXT}), self.n_documents
        ):
            turns = row.get("multi_turns")
            if (
                not isinstance(turns, list)
                or not turns
                or not all(_is_turn(task, t) for t in turns)
            ):
                raise SnapKVError(
                    f"{path}: row {document + 1} has no 'multi_turns' as SCBench's {task} has them"
                )
            yield document, row

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Paper]]:
        for task in self.files:
            for document, row in self._rows(task):
                place = {"task": task, "length": None, "document": document}
                yield place, self.paper(task, row)

    def paper(self, task: str, row: rows.Row) -> Paper:
        turns = row["multi_turns"][:TURNS]
        most = self.wording[LENGTHS][task]
        spare = SPARE if self.mode == "multi-request" else 0
        taken = most * len(turns) + spare
        context = prompts.cut_middle(self.tokenizer, row["context"], prompts.left(self.room, taken))
        made = self._requests if self.mode == "multi-request" else self._turns
        asked, n = made(task, context, turns)
        questions = []
        for prompt, turn in zip(asked, turns):
            label = _label(task, turn)
            questions.append(Question(prompt, label, partial(_score, METRICS[task], label), most))
        return Paper(questions, n)

    def _requests(self, task: str, context: str, turns: list[dict]) -> tuple[list[list[int]], int]:
        wording = self.wording[REQUEST][task]
        alone, question = (wording, None) if isinstance(wording, str) else wording
        document = alone.format(context=context)
        asked = [question.format(**_fields(t)) if question else t["input"] for t in turns]
        made = [prompts.in_two(self.tokenizer, document, text) for text in asked]
        return [prompt for prompt, _ in made], made[0][1]

    def _turns(self, task: str, context: str, turns: list[dict]) -> tuple[list[list[int]], int]:
        said = [self.wording[TURN][task].format(context=context, **_fields(turns[0]))]
        chats = self.tokenizer.has_chat_template
        for before, turn in itertools.pairwise(turns):
            following = self.wording[FOLLOWING_IN_CHAT if chats else FOLLOWING][task]
            text = following.format(pre_ans=before["answer"], **_fields(turn))
            said += [str(before["answer"]), text] if chats else [said[-1] + text]
        if chats:
            texts = [
                prompts.chat_text(self.tokenizer, *said[: i + 1]) for i in range(0, len(said), 2)
            ]
            made = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            made = [prompts.plain(self.tokenizer, text) for text in said]
        return made, prompts.n_shared(*made)


def _is_turn(task: str, turn: Any) -> bool:
    """Whether it has a question, an answer that the task's score can use, and four options if it is a choice."""
    if not isinstance(turn, dict) or not isinstance(turn.get("input"), str):
        return False
    answer, options = turn.get("answer"), turn.get("options")
    if task == "scbench_choice_eng":
        return isinstance(options, list) and len(options) == 4 and answer in options
    return isinstance(answer, str) or (
        isinstance(answer, list) and METRICS[task] is not scores.contains
    )


def _fields(turn: dict[str, Any]) -> dict[str, Any]:
    """What a question's places are filled with."""
    options = turn.get("options") or []
    filled = {"input": turn["input"], "question": turn["input"]}
    return filled | {f"OPTION_{letter}": option for letter, option in zip("ABCD", options)}


def _label(task: str, turn: dict[str, Any]) -> Any:
    answer = turn["answer"]
    if task == "scbench_choice_eng":
        return [answer, "ABCD"[turn["options"].index(answer)]]
    return [answer] if task == "scbench_qa_eng" else answer


def _score(metric: Callable[[str, Any], float], label: Any, answer: str) -> float:
    return metric(answer, label)
