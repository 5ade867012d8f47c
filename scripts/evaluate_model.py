"""What a model that was trained answers with the full cache: right answers by task and length.

    python scripts/evaluate_model.py build/tasks
    python scripts/evaluate_model.py build/llama --tasks facts --questions 208

Every question is asked on its own at the end of a document, in float32. The seeds of the documents are not used in
training. The table is printed, and written over the one that the folder's README.md ends with.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate
from mlx_lm.models.cache import make_prompt_cache
from results_page import table

from mlx_snapkv.chat.common_prefix import common_prefix
from mlx_snapkv.demo.documents import Fact
from mlx_snapkv.demo.questions import is_right, make_haystack, question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, Question, make_task
from mlx_snapkv.engine.prefill import read

FACTS = "facts"  # of unlike names, that `demo` and `demo-qwen3-next` were trained on
OF_A_DOCUMENT = 8  # questions


def documents(
    tokenizer, task: str, length: int, questions: int
) -> Iterator[tuple[str, list[Fact] | list[Question]]]:
    """Documents of about `length` tokens with what they are asked."""
    for i in count():
        if questions <= 0:
            return
        if task == FACTS:
            rng = random.Random(1_000_000 + length + i)
            document, asked = make_haystack(tokenizer, rng, OF_A_DOCUMENT, length - 40)
        else:
            rng = random.Random(f"2000000 {length} {i}")
            document, asked = make_task(task, rng, length - 60, token_counter(tokenizer))
        asked = asked[: min(OF_A_DOCUMENT, questions)]
        questions -= len(asked)
        yield document, asked


def n_right(model, tokenizer, document: str, asked: list) -> int:
    """Right answers about a document, of which what the questions share is read once."""
    prompts = [question_prompt(tokenizer, document, question.question) for question in asked]
    shared = common_prefix([*prompts, prompts[0][:-1]])
    cache = make_prompt_cache(model)
    read(model, mx.array(prompts[0][:shared]), cache, {"prefill_step_size": 512})
    right = 0
    for prompt, question in zip(prompts, asked):
        own = copy.deepcopy(cache)
        answer = generate(model, tokenizer, prompt[shared:], max_tokens=56, prompt_cache=own)
        right += is_right(question, answer)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=[FACTS, *TASKS], default=list(TASKS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--questions", type=int, default=56, help="of each task and length")
    args = parser.parse_args()
    model, tokenizer = load(str(args.folder))
    model.set_dtype(mx.float32)
    rows = []
    for task in args.tasks:
        rows.append([task])
        for n in args.lengths:
            about = documents(tokenizer, task, n, args.questions)
            right = sum(n_right(model, tokenizer, *each) for each in about)
            rows[-1].append(f"{right}/{args.questions}")
            print(f"{task}, {n} tokens: {rows[-1][-1]}", flush=True)
    lines = "\n".join(table(["task", *(f"{n:,} tokens" for n in args.lengths)], rows)) + "\n"
    print(lines)
    card = args.folder / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        card.write_text(text.partition("\n| ")[0] + "\n" + lines, encoding="utf-8")


if __name__ == "__main__":
    main()
