"""Answers that need more than was voted for, by every way to verify them.

python scripts/measure_answers.py                      # writes docs/answers.json; then: make docs
python scripts/measure_answers.py --models real-models/smollm2-135m-instruct --texts real-models/essays --tokens 8000
                        # asks a real model open questions, and adds what that takes to the same file
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import about, clock, mlx_versions, shared_options, write_json

from mlx_snapkv import SnapKV, stream_generate
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, make_task
from mlx_snapkv.engine.prefill import read

SEED = 9_000_000
MOST_TOKENS = 60
BELOW = (0.9, 0.99, 1.0)
LAST_TOKENS = 64  # of a prompt, which hold its question
CHUNK = 512
OPEN = (
    "Summarize in detail what the author thinks about startups.",
    "What does the author say about programming languages, and why?",
    "Explain the author's view of writing and essays in your own words.",
)
OPEN_TOKENS = 100


def ways(entries: int) -> dict[str, dict[str, Any]]:
    """The options of every way, for so many entries."""
    n_window = entries // 4
    policy = SnapKV(
        top_k=entries - n_window - 4,
        n_sink=4,
        n_window=n_window,
        obs_window=min(32, n_window),
        lookahead=0,
        min_ctx=0,
    )
    recall = {"policy": policy, "memory": "recall"}
    unsure = {
        f"unsure, {below:g}": recall | {"verify": "unsure", "verify_below": below}
        for below in BELOW
    }
    return {"SnapKV": recall, **unsure, "all": recall | {"verify": "all"}}


@dataclass
class Count:
    """What came of the answers of one way."""

    right: int = 0
    same: int = 0
    asked: int = 0
    tokens: int = 0
    votes: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def row(self, **about: Any) -> dict[str, Any]:
        return about | vars(self)


def answer(model, tokenizer, caches: list, last: list[int], most: int, options: dict[str, Any]):
    """Tokens and text of an answer to what follows on caches, what it verified, and seconds after its first token."""
    reports: list[Any] = []
    tokens, text, times = [], "", []
    options = options | {"prompt_cache": copy.deepcopy(caches), "on_report": reports.append}
    for response in stream_generate(model, tokenizer, last, most, **options):
        tokens.append(response.token)
        text += response.text
        times.append(clock())
    return tokens, text.strip(), reports[0].verified, times[-1] - times[0]


# Its task, the tokens before, the last ones, and the right answer if there is one.
Question = tuple[str, list[int], list[int], str | None]


def task_questions(tokenizer, n_tokens: int, asked: int) -> Iterator[Question]:
    """So many questions of every task, each at the end of a document of its own."""
    count_tokens = token_counter(tokenizer)
    for task in TASKS:
        for n in range(asked):
            rng = random.Random(f"{SEED} {task} {n}")
            document, (question, *_) = make_task(task, rng, n_tokens - 60, count_tokens)
            prompt = question_prompt(tokenizer, document, question.question)
            yield task, prompt[:-LAST_TOKENS], prompt[-LAST_TOKENS:], question.value


def open_questions(tokenizer, folder: Path, n_tokens: int) -> Iterator[Question]:
    """Questions after the beginning of a folder's texts."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    ids = tokenizer.encode("\n\n".join(texts))[: n_tokens - LAST_TOKENS]
    text = tokenizer.decode(ids)
    for question in OPEN:
        message = {"role": "user", "content": f"{text}\n\n{question}"}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        yield "open", prompt[: len(ids)], prompt[len(ids) :], None


def measure(
    model, tokenizer, questions: Iterable[Question], n_tokens: int, shares: list[int], most: int
) -> list[dict[str, Any]]:
    """A JSON object a task and way, of answers of `most` tokens at most; what comes before is read once for all."""
    settings: dict[str, dict[str, Any]] = {"full cache": {}}
    for share in shares:
        found = ways(n_tokens // share)
        settings |= {f"{way}, 1/{share}": found[way] for way in found}
    counts: dict[tuple[str, str], Count] = defaultdict(Count)
    were: list[int] = []
    for task, before, last, value in questions:
        if before != were:
            caches, were = make_prompt_cache(model), before
            read(model, mx.array(before), caches, {"prefill_step_size": CHUNK})
        wanted: list[int] = []
        for name, options in settings.items():
            tokens, text, verified, seconds = answer(model, tokenizer, caches, last, most, options)
            wanted = wanted or tokens
            count = counts[task, name]
            count.asked += 1
            count.right += text == value
            count.same += tokens == wanted
            count.tokens += len(tokens) - 1
            count.seconds += seconds
            count.votes += verified.votes if verified else 0
            count.accepted += verified.accepted if verified else 0
            print(task, name, count, flush=True)
    return [count.row(task=task, way=name) for (task, name), count in counts.items()]


def main() -> None:
    parser = shared_options(__doc__, "answers")
    parser.set_defaults(models=["demo-tasks"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--shares", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--asked", type=int, default=20, help="questions a task")
    parser.add_argument("--texts", type=Path, help="folder of texts to ask open questions about")
    args = parser.parse_args()
    there = args.out.with_suffix(".json")
    before = json.loads(there.read_text(encoding="utf-8")) if there.exists() else {}
    if args.texts is not None and not before:
        parser.error(f"there is no {there} to add to: measure without --texts first")
    (name,) = args.models
    model, tokenizer = load_model(name)
    found = about("measure_answers.py", *sys.argv[1:])
    found |= {"versions": mlx_versions(), "model": Path(name).name, "tokens": args.tokens}
    questions = task_questions(tokenizer, args.tokens, args.asked)
    most = MOST_TOKENS
    if args.texts is not None:
        questions, most = open_questions(tokenizer, args.texts, args.tokens), OPEN_TOKENS
    found["rows"] = measure(model, tokenizer, questions, args.tokens, args.shares, most)
    told = {"open": before.get("open")} if args.texts is None else {"open": found}
    result = (found if args.texts is None else before) | told
    write_json(args.out, result)


if __name__ == "__main__":
    main()
