"""Answers that need more than was voted for, by every way to verify them; and what that costs larger models.

python scripts/measure_answers.py                      # writes docs/answers.json and docs/answers.md
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from results_page import about, mlx_versions, shared_options, table, write, written_by

from mlx_snapkv import SnapKV, stream_generate
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.documents import filler_sentence
from mlx_snapkv.demo.questions import question_prompt, token_counter
from mlx_snapkv.demo.tasks import TASKS, make_task

SEED = 9_000_000
MOST_TOKENS = 60
PROSE_TOKENS = 200
BELOW = (0.99, 0.999, 1.0)


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
    return {"SnapKV": {"policy": policy}, **unsure, "all": recall | {"verify": "all"}}


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


def answer(model, tokenizer, prompt: list[int], max_tokens: int, options: dict[str, Any]):
    """The tokens and text of an answer, and what it verified."""
    reports: list[Any] = []
    tokens, text = [], ""
    for response in stream_generate(
        model, tokenizer, prompt, max_tokens, on_report=reports.append, **options
    ):
        tokens.append(response.token)
        text += response.text
    return tokens, text.strip(), reports[0].verified


def measure(model, tokenizer, n_tokens: int, shares: list[int], asked: int) -> list[dict[str, Any]]:
    """A JSON object a task and way; the last task is prose, which has no right answer."""
    settings = {"full cache": (0, {})}
    for share in shares:
        found = ways(n_tokens // share)
        settings |= {f"{way}, 1/{share}": (share, found[way]) for way in found}
    count_tokens = token_counter(tokenizer)
    rows = []
    for task in [*TASKS, "prose"]:
        counts = {name: Count() for name in settings}
        for n in range(asked if task != "prose" else max(1, asked // 4)):
            rng = random.Random(f"{SEED} {task} {n}")
            if task == "prose":
                text = " ".join(filler_sentence(rng) for _ in range(n_tokens))
                prompt, value = tokenizer.encode(text)[:n_tokens], None
            else:
                document, (question, *_) = make_task(task, rng, n_tokens - 60, count_tokens)
                prompt, value = (
                    question_prompt(tokenizer, document, question.question),
                    question.value,
                )
            wanted: list[int] = []
            for name, (_, options) in settings.items():
                count = counts[name]
                started = time.perf_counter()
                most = PROSE_TOKENS if value is None else MOST_TOKENS
                tokens, said, verified = answer(model, tokenizer, prompt, most, options)
                count.seconds += time.perf_counter() - started
                wanted = wanted or tokens
                count.asked += 1
                count.right += said == value
                count.same += tokens == wanted
                count.tokens += verified.tokens if verified else len(tokens)
                count.votes += verified.votes if verified else 0
                count.accepted += verified.accepted if verified else 0
        for name, (share, _) in settings.items():
            rows.append(counts[name].row(task=task, way=name, share=share))
            print(rows[-1], flush=True)
    return rows


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
        votes, drafts, accepted = 0.3, 4, 0.7
        unsure = (1 + votes) * step + votes * (full / 2 + small)
        checked = (self.weights + full + drafts * step) * (1 - accepted)
        return {
            "small": (self.weights + full) / step,
            "unsure": (self.weights + full) / unsure,
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

- `verify="unsure"`: when the most likely token has less than `verify_below`, its own queries vote over all
  entries, the small cache is gathered anew (sink, recent window, and what they vote for), and that same token
  is decoded again. Entries may be in memory, quantised or in files; linear and sliding-window layers go back by
  one token. An answer has 64 votes to spare and half a vote a token; with `verify_below=1` every token votes.
- `verify="all"`: the model drafts a few tokens on the small cache, and checks them in one pass over all
  entries. The answer is the full cache's own, greedy or sampled: the sampler and the logits processors see the
  full cache's logits. After a round of right drafts two more are made, else one fewer; where a hundred tokens
  were not faster than without drafts, it goes on without. Entries must be in memory, and every layer able to
  take tokens back.

Which to use: nothing for one fact and for summaries; `unsure` for several facts and chains, where most tokens
are sure; `all` where the answer must be the full cache's own, and reading entries costs more than reading
weights.
"""

FOUND = """\
`{model}`, documents of {tokens:,} tokens with the question at the end, exact whole answers, SnapKV without
lookahead. After the names: the probability under which a token votes, and the share of the entries in the small
cache. "Same as full" counts answers equal to the full cache's token for token.
"""

LONG = """\
{} tokens that go on with a text, few of which are as sure as a fact's: how often they vote, and how many are
drafted.
"""

COST = """\
Measured side by side on a model where attention dominates: [benchmarks-answers](benchmarks-answers.md). `all`
gains in two ways there: by right drafts, and since few tokens attend to all float32 entries in a way of our own on
a CPU, which takes about 0.6 of the time of MLX's. Entries of other kinds, and Metal, have MLX's own attention. On an
NVIDIA GPU they were slower than the full cache: [measuring](measuring.md#on-a-gpu).

![tokens per second by context](benchmarks-answers-verified.png)

**Arithmetic, not measured:** times fewer bytes a token reads than with the full cache; weights in 4 bits and
entries in 16, 1/16 of them in the small cache, 30% of the tokens voting; 4 drafts a round, 70% of the tokens
drafted.
"""


def page(result: dict[str, Any]) -> str:
    """docs/answers.md, from its result."""
    rows = result["rows"]
    names = list(dict.fromkeys(r["way"] for r in rows))
    tasks = [t for t in dict.fromkeys(r["task"] for r in rows) if t != "prose"]
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
    prose = [
        [
            name,
            f"{by[name, 'prose']['votes'] / by[name, 'prose']['tokens']:.2f}",
            f"{by[name, 'prose']['accepted'] / by[name, 'prose']['tokens']:.2f}",
            f"{by[name, 'prose']['same']}/{by[name, 'prose']['asked']}",
        ]
        for name in names[1:]
    ]
    gains = []
    for shape in SHAPES:
        for context in (32, 128, 256):
            found = shape.gains(context * 1024)
            gains.append([shape.name, f"{context}k", *(f"{gain:.2f}x" for gain in found.values())])
    starts = [
        [shape.name, *(f"{shape.wins_from(way):,}" for way in ("small", "unsure", "all"))]
        for shape in SHAPES
    ]
    header = ["cache", *tasks, "right", "same as full", "votes a token", "drafted"]
    lines = [INTRO, written_by(result), "", "## What they find", ""]
    lines += [FOUND.format(**result), *table(header, body)]
    lines += ["", "## Long answers", "", LONG.format(PROSE_TOKENS)]
    lines += table(["cache", "votes a token", "drafted", "same as full"], prose)
    lines += ["", "## What they cost", "", COST]
    lines += table(["model", "context", "small cache", "unsure", "all"], gains)
    lines += ["", "The shortest context at which a token reads fewer bytes:", ""]
    lines += table(["model", "small cache", "unsure", "all"], starts)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = shared_options(__doc__, "answers")
    parser.set_defaults(models=["demo-tasks"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--shares", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--asked", type=int, default=20, help="questions a task")
    args = parser.parse_args()
    here = about("measure_answers.py", *sys.argv[1:])
    (name,) = args.models
    model, tokenizer = load_model(name)
    mx.random.seed(0)
    rows = measure(model, tokenizer, args.tokens, args.shares, args.asked)
    result = {
        **here,
        "versions": mlx_versions(),
        "model": name,
        "tokens": args.tokens,
        "rows": rows,
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
