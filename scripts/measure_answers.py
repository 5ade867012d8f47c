"""Answers that need more than was voted for, by every way to verify them; and what that costs larger models.

python scripts/measure_answers.py                      # writes docs/answers.json and docs/answers.md
python scripts/measure_answers.py --models real-models/smollm2-135m-instruct --texts real-models/essays --tokens 8000
                        # asks a real model open questions, and adds what that takes to the same page
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import about, mlx_versions, shared_options, table, write, written_by

from mlx_snapkv import SnapKV, stream_generate
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, make_task
from mlx_snapkv.engine.prefill import read
from mlx_snapkv.engine.report import VERIFY_BELOW
from mlx_snapkv.engine.unsure import VOTES_A_TOKEN, VOTES_AT_FIRST

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
    # What others do on a busy machine does not count, where the processor computes.
    clock = time.process_time if mx.default_device().type == mx.cpu else time.perf_counter
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


@dataclass(frozen=True)
class Shape:
    """A model as a decoding step reads it: bytes of weights, and of one entry of all layers."""

    name: str
    weights: float
    entry: float

    def gains(self, context: int) -> dict[str, float]:
        """Times fewer bytes a token reads than with the full cache."""
        full = context * self.entry
        small = full / 16
        step = self.weights + small
        drafts, accepted = 4, 0.7
        checked = (self.weights + full + drafts * step) * (1 - accepted)
        return {
            "small": (self.weights + full) / step,
            "all": (self.weights + full) / checked,
        }

    def wins_from(self, way: str) -> int:
        """The shortest context, in steps of 1,024 tokens, from which on a way reads fewer bytes."""
        return next(n for n in range(1024, 1 << 22, 1024) if self.gains(n)[way] > 1)


# Weights in 4 bits with a scale and a bias for each 64; entries in 16 bits.
BITS = 4.5 / 8
SHAPES = (
    Shape("8B (32 layers, 8 KV heads of 128)", 8.0e9 * BITS, 32 * 8 * 128 * 2 * 2),
    Shape("30B-A3B (48 layers, 4 KV heads of 128)", 3.3e9 * BITS, 48 * 4 * 128 * 2 * 2),
)


INTRO = """\
# Verified answers

A policy keeps what the prompt's last tokens look at. The next link of a chain, or the second of three facts,
nobody has voted for before the answer names it. With `memory="recall"` every entry stays at hand, and `verify`
lets the answer use it:

- `verify="unsure"`: when the most likely token has less than `verify_below` ({below:g} by default), its own queries
  vote over all entries, the small cache is gathered anew (sink, recent window, and what they vote for), and that
  same token is decoded again. Entries may be in memory, quantised or in files; linear and sliding-window layers go
  back by one token. An answer has {first} votes at first, and {rate:g} more with every token; with `verify_below=1`
  every token votes. In a real model's prose nearly every token is less sure than that, so an answer takes all the
  votes it has ([below](#open-answers)). The closing line says how fast it was, and warns if that was slower than
  the full cache; it knows where `lookahead` tokens were decoded on all entries in memory.
- `verify="all"`: the model drafts a few tokens on the small cache, and checks them in one pass over all
  entries. The answer is the full cache's own, greedy or sampled: the sampler and the logits processors see the
  full cache's logits. After a round of right drafts two more are made, else one fewer; where a hundred tokens
  were not faster than without drafts, it goes on without. Entries must be in memory, and every layer able to
  take tokens back.

Which to use: nothing for one fact and for summaries; `unsure` for short answers with several facts, and chains;
`all` where the answer must be the full cache's own, and reading entries costs more than reading weights.
"""

FOUND = """\
`{model}`, documents of {tokens:,} tokens with the question at the end, exact whole answers, SnapKV without
lookahead. After the names: the probability under which a token votes, and the share of the entries in the small
cache. "Same as full" counts answers equal to the full cache's token for token.
"""

OPENLY = """\
`{model}`, open questions about {tokens:,} tokens of essays, {questions} in all, answers of {most} tokens at most,
SnapKV without lookahead. Where the processor computes, its own time is taken, so that what else runs does not count.
"""

COST = """\
Measured side by side on a model where attention dominates: [benchmarks-answers](benchmarks-answers.md). On an
NVIDIA GPU they were slower than the full cache: [measuring](measuring.md#on-a-gpu).

![tokens per second by context](benchmarks-answers-verified.png)

**Arithmetic, not measured:** times fewer bytes a token reads than with the full cache; weights in 4 bits and
entries in 16, 1/16 of them in the small cache; 4 drafts a round, 70% of the tokens drafted. Of votes bytes tell too
little.
"""


def page(result: dict[str, Any]) -> str:
    """docs/answers.md, from its result."""
    rows = result["rows"]
    names = list(dict.fromkeys(r["way"] for r in rows))
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    by = {(r["way"], r["task"]): r for r in rows}
    body = []
    for name in names:
        of = [by[name, task] for task in tasks]
        mean = sum(r["right"] for r in of) / sum(r["asked"] for r in of)
        tokens = sum(r["tokens"] for r in of)
        same = sum(r["same"] for r in of)
        cells = [f"{r['right']}/{r['asked']}" for r in of]
        asked = f"{sum(r['votes'] for r in of) / tokens:.2f}"
        drafted = f"{sum(r['accepted'] for r in of) / tokens:.2f}" if "all" in name else ""
        total = sum(r["asked"] for r in of)
        body.append([name, *cells, f"{mean:.3f}", f"{same}/{total}", asked, drafted])
    gains = []
    for shape in SHAPES:
        for context in (32, 128, 256):
            found = shape.gains(context * 1024)
            gains.append([shape.name, f"{context}k", *(f"{gain:.2f}x" for gain in found.values())])
    starts = [
        [shape.name, *(f"{shape.wins_from(way):,}" for way in ("small", "all"))] for shape in SHAPES
    ]
    header = ["cache", *tasks, "right", "same as full", "votes a token", "drafted"]
    intro = INTRO.format(below=VERIFY_BELOW, first=VOTES_AT_FIRST, rate=VOTES_A_TOKEN)
    lines = [intro, written_by(result), "", "## What they find", ""]
    lines += [FOUND.format(**result), *table(header, body)]
    if result.get("open"):
        lines += ["", "## Open answers", "", *open_answers(result["open"])]
    lines += ["", "## What they cost", "", COST]
    lines += table(["model", "context", "small cache", "all"], gains)
    lines += ["", "The shortest context at which a token reads fewer bytes:", ""]
    lines += table(["model", "small cache", "all"], starts)
    return "\n".join(lines) + "\n"


def open_answers(result: dict[str, Any]) -> list[str]:
    """Lines of the page about the answers of a real model."""
    speeds = [row["tokens"] / row["seconds"] for row in result["rows"]]
    body = [
        [
            row["way"],
            f"{row['votes'] / row['tokens']:.2f}",
            f"{row['accepted'] / row['tokens']:.2f}",
            f"{speed:.2f}",
            f"{speed / speeds[0]:.2f}x",
        ]
        for row, speed in zip(result["rows"], speeds)
    ]
    header = ["cache", "votes a token", "drafted", "tokens/s", "of the full cache's"]
    about_it = OPENLY.format(**result, questions=result["rows"][0]["asked"], most=OPEN_TOKENS)
    told = [written_by(result), *result.get("notes", [])]
    return [*told, "", about_it, *table(header, body)]


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
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
