"""Greedy accuracy of `demo-tasks` by task and length, with the full cache and with SnapKV, and its model card.

    python scripts/evaluate_tasks_model.py mlx_snapkv/demo/models/tasks --card

Every question is asked on its own at the end of a document, each with the full cache and with SnapKV at a sixteenth
of the entries, `lookahead=0`. What the questions of a document share is read once. The seeds of the documents are
not used in training.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from itertools import count
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlx_snapkv import SnapKV
from mlx_snapkv.chat.common_prefix import common_prefix
from mlx_snapkv.demo.questions import is_right, question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, Question, make_task
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.engine.request import Request
from scripts.demo_training.quick_exp import quick_llama

FIRST_SEED = 2_000_000
SHARE = 16
N_WINDOW = 32
MAX_TOKENS = 56

Counts = dict[str, int]  # questions asked, and answered rightly with either cache


def policy_for(length: int) -> SnapKV:
    sizes = {"budget": length // SHARE, "n_sink": 4, "n_window": N_WINDOW, "min_ctx": 0}
    return SnapKV(**sizes, lookahead=0)


def accuracy(model, tokenizer, task: str, length: int, questions: int) -> Counts:
    """Over as many documents of about `length` tokens as it takes, of 8 questions at most."""
    counts = {"asked": 0, "full": 0, "snapkv": 0}
    for i in count():
        rng = random.Random(f"{FIRST_SEED} {length} {i}")
        document, asked = make_task(task, rng, length - 60, token_counter(tokenizer))
        asked = asked[: min(8, questions - counts["asked"])]
        for name, right in ask_all(model, tokenizer, document, asked, policy_for(length)).items():
            counts[name] += right
        counts["asked"] += len(asked)
        if counts["asked"] >= questions:
            return counts
    raise AssertionError


def ask_all(
    model, tokenizer, document: str, questions: list[Question], policy: SnapKV
) -> dict[str, int]:
    """Right answers with the full cache and with the policy."""
    prompts = [question_prompt(tokenizer, document, question.question) for question in questions]
    # The window votes, so all of it is read with the question.
    shared = min(common_prefix([*prompts, prompts[0][:-1]]), len(prompts[0]) - 2 * N_WINDOW)
    cache = make_prompt_cache(model)
    with quick_llama():
        read(model, mx.array(prompts[0][:shared]), cache, {"prefill_step_size": 512})
    right = {"full": 0, "snapkv": 0}
    for prompt, question in zip(prompts, questions):
        rest = mx.array(prompt[shared:])
        full = copy.deepcopy(cache)
        answers = {"full": decoded(model, tokenizer, read(model, rest, full, {}), full)}
        request = Request(model, policy, len(prompt), make_prompt_cache(model))
        for recording, held in zip(request.caches, cache):
            recording.keys, recording.values, recording.offset = held.keys, held.values, held.offset
        with request.recording():
            first = read(model, rest, request.caches, {})
        request.compress()
        answers["snapkv"] = decoded(model, tokenizer, first, request.caches)
        for name, answer in answers.items():
            right[name] += is_right(question, answer)
    return right


def decoded(model, tokenizer, first: mx.array, prompt_cache: list) -> str:
    """The answer that begins with this token `(1,)`."""
    tokens = first.tolist()
    for token, _ in generate_step(first, model, max_tokens=MAX_TOKENS, prompt_cache=prompt_cache):
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)


CARD = """# tasks

A LLaMA that does more than look one fact up, small enough to ship inside mlx-snapkv: look-alike names, several
facts in one question, values that were overwritten, and chains over two and three links. The tasks are those of
`mlx_snapkv/demo/tasks.py`; of other texts it knows nothing.

- Parameters: {parameters:,}, float16.
- Shape: {num_hidden_layers} layers, hidden size {hidden_size}, {num_attention_heads} heads over
  {num_key_value_heads} KV heads of {head_dim}, RoPE base {rope_theta:g}.
- Tokenizer and chat template: those of `demo`.
- Training: `python scripts/train_tasks_model.py --out build/tasks`, from `demo`'s weights and one layer more, seed
  {seed}, {steps:,} steps and {tokens:,} tokens, documents lengthened from {shortest:,} to {longest:,} tokens.
  Sittings that the run was made in: {sittings}. {history}

## Greedy accuracy

Exact answers to questions that training has not seen, one question at the end of each prompt, in float32, with the
full cache and with SnapKV at 1/16 of the entries (`lookahead=0`); documents of more than {longest:,} tokens are longer
than any it was trained on:
`python scripts/evaluate_tasks_model.py mlx_snapkv/demo/models/tasks --card`

| task | {heads} |
| --- |{rule}
{rows}
"""


def write_card(folder: Path, results: dict[str, dict[int, Counts]], model) -> None:
    config = json.loads((folder / "config.json").read_text())
    run = {"history": ""} | json.loads((folder / "training.json").read_text())
    lengths = list(next(iter(results.values())))
    rows = []
    for task, by_length in results.items():
        cells = [
            f"{c[name]}/{c['asked']}" for c in by_length.values() for name in ("full", "snapkv")
        ]
        rows.append(f"| {task} | " + " | ".join(cells) + " |")
    card = CARD.format(
        **(config | run),
        parameters=sum(v.size for _, v in tree_flatten(model.parameters())),
        heads=" | ".join(f"{n:,} tokens, full | SnapKV" for n in lengths),
        rule=" ---: |" * (2 * len(lengths)),
        rows="\n".join(rows),
    )
    (folder / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--questions", type=int, default=56, help="of each task and length")
    parser.add_argument("--card", action="store_true", help="write the folder's README.md")
    args = parser.parse_args()
    model, tokenizer = load(str(args.folder))
    model.set_dtype(mx.float32)
    results: dict[str, dict[int, Counts]] = {task: {} for task in args.tasks}
    for length in args.lengths:
        for task in args.tasks:
            results[task][length] = accuracy(model, tokenizer, task, length, args.questions)
            print(f"{length} tokens, {task}: {results[task][length]}", flush=True)
    if args.card:
        write_card(args.folder, results, model)


if __name__ == "__main__":
    main()
